"""The controller against an API server: it leads, watches, heals, tells and ends."""

import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.builders.argo_objects import NARRATED, posted_events, put, put_agent, workflow
from support.builders.compiled_workflows import History
from support.fakes.argo_workflow import ArgoWorkflow, bare
from support.processes.polling import until
from support.servers.kube_server import KubeServer, Request
from tiphys_controller.kubernetes.controller import Controller, ControllerDependencies
from tiphys_controller.kubernetes.events.recorder import EventRecorder
from tiphys_controller.kubernetes.metrics import ControllerMetrics
from tiphys_controller.kubernetes.pod_cleanup import AgentPodCleaner
from tiphys_controller.kubernetes.watch_cache import WatchCache
from tiphys_controller.kubernetes.writer import ClusterWriter
from tiphys_controller.server.app import create_controller_app

from tiphys.errors import StoreError, UsageError
from tiphys.kube import KubeApi, ListSnapshot, Object
from tiphys.kube.resources import LEASES, PODS, WORKFLOWS
from tiphys.protocol.step_spec import PIPELINE_ANNOTATION
from tiphys.records import (
    AttemptClaim,
    Cause,
    SubmissionBinding,
    SubmissionClaim,
    SubmissionEnd,
    SubmissionKind,
    TrainingProgress,
    utc_now,
)
from tiphys.service.http_server import AppServer
from tiphys.store import (
    LineageLayout,
    RunLayout,
    Store,
    TenantStores,
    find_attempt_end,
    find_record,
    lineage_name,
    read_submissions,
)

RUN = "digits-1"


class Bench:
    """A narrator and a healer whose rounds and clock are in the test's hands."""

    def __init__(self, server: KubeServer, api: KubeApi, store: Store) -> None:
        self.server, self.api, self.store = server, api, store
        self.leads = True
        self.moment = 1000.0
        self.now = utc_now()
        self.restart()

    def restart(self) -> None:
        """A new process: nothing is remembered."""
        self.view, self.metrics = WatchCache(), ControllerMetrics()
        writer = ClusterWriter(self.api, lambda: self.leads, self.metrics, lambda: self.now)
        self.narrator = EventRecorder(
            self.view, lambda _: self.store, writer, self.metrics, lambda: self.now, lambda: self.moment
        )
        self.healer = AgentPodCleaner(self.view, writer, self.metrics)

    def round(self) -> None:
        """All there is, seen and worked on, a minute after the last round."""
        self.moment += 60
        self.view.apply_workflow_change("ml", ListSnapshot(self.api.list(WORKFLOWS, "ml").items))
        self.view.apply_agent_pod_change("ml", ListSnapshot(self.api.list(PODS, "ml").items))
        self.healer.delete_stuck_pods()
        with ThreadPoolExecutor(1) as pool:
            self.narrator.run_round(pool, threading.Event())

    def submitted(self, **fields: Any) -> Object:
        """A Workflow that its first admit has bound to the run."""
        found = put(self.api, workflow(store=self.store.url, run=RUN, **fields))
        layout = RunLayout(RUN)
        claimed = SubmissionClaim(
            run=RUN, submission=1, kind=SubmissionKind.ORIGINAL, workflow_name=RUN, namespace="ml"
        )
        uid = found["metadata"]["uid"]
        record = SubmissionBinding(run=RUN, submission=1, cluster="c", namespace="ml", workflow_name=RUN, uid=uid)
        self.store.create(layout.submission(1), claimed.to_bytes())
        self.store.create(layout.submission_binding(1), record.to_bytes())
        return found

    def annotation(self, name: str) -> str:
        [found] = self.server.objects("workflows")
        text: str = found["metadata"]["annotations"][f"workflows.argoproj.io/{name}"]
        return text


def raise_away(*_: object, **__: object) -> None:
    raise StoreError("storage did not answer")


@pytest.fixture
def bench(server: KubeServer, api: KubeApi, store: Store) -> Bench:
    return Bench(server, api, store)


def test_a_failed_agent_pod_is_deleted_with_an_event_of_its_workflow(bench: Bench) -> None:
    owner = put(bench.api, workflow())
    put_agent(bench.api, owner)
    put_agent(bench.api, owner, name="works", phase="Running")
    put_agent(bench.api, {"metadata": {"uid": "uid-of-another"}}, name="not-ours")

    bench.round()

    assert [pod["metadata"]["name"] for pod in bench.server.objects("pods")] == ["not-ours", "works"]
    assert [reason for reason, _ in posted_events(bench.server)] == ["AgentPodDeleted"]
    assert bench.metrics.registry.get_sample_value("tiphys_controller_agent_pods_deleted_total") == 1


def test_an_agent_pod_that_its_node_does_not_end_is_removed_without_it(bench: Bench) -> None:
    owner = put(bench.api, workflow())
    pod = put_agent(bench.api, owner, phase="Running")
    pod["metadata"]["deletionTimestamp"] = "2026-05-04T11:00:00Z"
    bench.view.apply_workflow_change("ml", ListSnapshot(bench.api.list(WORKFLOWS, "ml").items))
    bench.view.apply_agent_pod_change("ml", ListSnapshot([pod]))

    bench.healer.delete_stuck_pods()

    assert bench.server.objects("pods") == []
    [(reason, message)] = posted_events(bench.server)
    assert reason == "AgentPodDeleted"
    assert "its node has not ended it since 2026-05-04T11:00:00Z" in message


def test_a_pod_that_took_the_name_of_the_failed_one_stays(bench: Bench) -> None:
    owner = put(bench.api, workflow())
    put_agent(bench.api, owner)
    bench.view.apply_workflow_change("ml", ListSnapshot(bench.api.list(WORKFLOWS, "ml").items))
    bench.view.apply_agent_pod_change("ml", ListSnapshot(bench.api.list(PODS, "ml").items))
    bench.api.delete(PODS, "ml", "digits-1-1340600742-agent")
    put_agent(bench.api, owner, phase="Running")

    bench.healer.delete_stuck_pods()

    assert len(bench.server.objects("pods")) == 1


def test_a_deletion_that_fails_is_tried_again(bench: Bench) -> None:
    put_agent(bench.api, put(bench.api, workflow()))
    bench.server.fail_next(500, verb="delete", plural="pods")
    bench.round()
    assert len(bench.server.objects("pods")) == 1
    bench.round()
    assert bench.server.objects("pods") == []


def test_a_controller_that_lost_leadership_writes_nothing(bench: Bench) -> None:
    put_agent(bench.api, bench.submitted())
    History(bench.store, RUN).failed("fit")
    bench.leads = False
    bench.round()
    assert len(bench.server.objects("pods")) == 1
    assert posted_events(bench.server) == []
    assert bench.annotation("title") == "digits"


def test_an_event_of_a_run_is_posted_once_across_controllers(bench: Bench) -> None:
    bench.submitted()
    History(bench.store, RUN).failed("fit", 1, Cause.PREEMPTION, "the node was taken away")
    bench.round()
    first = posted_events(bench.server)
    assert first == [("AttemptFailed", "fit: attempt 1 ended by preemption: the node was taken away")]
    [event] = bench.server.objects("events")
    assert event["involvedObject"]["kind"] == "Workflow"
    assert event["involvedObject"]["uid"] == bench.server.objects("workflows")[0]["metadata"]["uid"]
    assert event["type"] == "Warning"

    bench.round()
    bench.restart()
    bench.round()

    assert posted_events(bench.server) == first


def test_old_events_are_not_posted_by_a_controller_that_comes_late(bench: Bench) -> None:
    bench.submitted()
    History(bench.store, RUN).failed("fit")
    bench.now += timedelta(hours=2)
    bench.round()
    assert posted_events(bench.server) == []


def test_title_and_description_follow_the_run_and_are_written_on_change_only(bench: Bench) -> None:
    bench.submitted()
    history = History(bench.store, RUN)
    history.opened("fit")
    bench.round()
    assert bench.annotation("title") == RUN
    assert "Under way: fit." in bench.annotation("description")
    patches = bench.server.count("patch", "workflows")

    bench.round()
    assert bench.server.count("patch", "workflows") == patches

    history.finish("fit")
    bench.round()
    assert "Done: fit." in bench.annotation("description")
    assert bench.server.count("patch", "workflows") == patches + 1


def test_description_of_a_workflow_with_many_pods_is_written_seldom_and_at_its_end(bench: Bench) -> None:
    found = bench.submitted(status={"progress": "3/500"})  # 100 s between two texts; a round is a minute
    history = History(bench.store, RUN)
    history.opened("fit")
    bench.round()
    history.finish("fit")
    bench.round()
    assert "Done" not in bench.annotation("description")
    bench.round()
    assert "Done: fit." in bench.annotation("description")

    history.opened("test")
    bench.round()
    assert "Under way" not in bench.annotation("description")
    ended = {"phase": "Succeeded", "progress": "500/500", "finishedAt": "2026-07-01T00:00:00Z"}
    newest = bench.api.get(WORKFLOWS, "ml", found["metadata"]["name"])
    assert newest is not None
    bench.api.replace(WORKFLOWS, "ml", newest | {"status": ended})
    bench.now = datetime(2026, 7, 1, tzinfo=UTC)
    bench.round()
    assert bench.annotation("description").startswith("Succeeded.")


def test_the_description_follows_a_training_at_leisure(bench: Bench) -> None:
    bench.submitted()
    lineage = lineage_name(RUN, "fit")
    claim = AttemptClaim(
        run=RUN, step="fit", attempt=1, submission=1, uid="u", node="n", instance="i", step_key="k", lineage=lineage
    )
    bench.store.create(RunLayout(RUN).attempt("fit", 1), claim.to_bytes())

    def report(step: int) -> None:
        progress = TrainingProgress(global_step=step, total_steps=500)
        bench.store.create(LineageLayout(lineage).training_progress_report(1, step), progress.to_bytes())

    bench.round()
    assert bench.annotation("description").startswith("Under way: fit.")
    report(10)
    bench.round()
    assert bench.annotation("description").startswith("Training: step 10 of 500 (fit). ")
    report(20)
    patches = bench.server.count("patch", "workflows")
    bench.round()
    assert bench.server.count("patch", "workflows") == patches
    bench.moment += 300
    bench.round()
    assert bench.annotation("description").startswith("Training: step 20 of 500 (fit). ")


def test_a_refused_resubmission_does_not_carry_the_description_of_the_run_that_it_was_copied_from(bench: Bench) -> None:
    copied = {**NARRATED, "workflows.argoproj.io/description": "Succeeded. Run `digits-1`."}
    refusal = {"type": "Plugin", "phase": "Failed", "message": "run digits-1 is that of another Workflow"}
    put(
        bench.api,
        workflow(
            "digits-1-x", "Failed", store=bench.store.url, run=RUN, annotations=copied, status={"nodes": {"a": refusal}}
        ),
    )
    bench.round()
    assert bench.annotation("description").startswith("Failed: run digits-1 is that of another Workflow. ")
    assert bench.annotation("title") == "digits-1-x"


@pytest.mark.parametrize("ours", ["", "title", "description"])
def test_annotations_of_the_author_stay(ours: str, bench: Bench) -> None:
    bench.submitted(annotations={**NARRATED, "tiphys.dev/narrated": ours})
    bench.round()
    assert (bench.annotation("title") != "digits") == (ours == "title")
    assert (bench.annotation("description") != "Pipeline `digits`.") == (ours == "description")


def test_a_failed_workflow_says_how_to_go_on(bench: Bench) -> None:
    bench.submitted(phase="Failed")
    bench.round()
    [(reason, message)] = posted_events(bench.server)
    assert reason == "RunFailed"
    assert message.endswith(f"`tiphys resume {RUN} --store {bench.store.url}`")
    resume = f"`tiphys resume {RUN} --store {bench.store.url}`"
    assert bench.annotation("description").startswith(f"Failed: without a message; resume with {resume}. ")


@pytest.mark.parametrize(
    ("phase", "status", "message"),
    [
        ("Succeeded", {"message": "left over"}, ""),
        ("Failed", {"message": "child 'läufe.v1' failed"}, "child 'läufe.v1' failed"),
        ("Error", {}, ""),
    ],
)
def test_end_that_finalize_could_not_record_is_recorded(bench: Bench, phase: str, status: Object, message: str) -> None:
    bench.submitted(phase=phase, status=status)
    bench.round()
    [submission] = read_submissions(bench.store, RUN)
    assert submission.end is not None
    assert (submission.end.status, submission.end.message) == (phase, message)


def test_end_is_recorded_once_storage_answers_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.submitted(phase="Succeeded")
    monkeypatch.setattr(bench.store, "create", raise_away)
    bench.round()
    monkeypatch.undo()
    assert read_submissions(bench.store, RUN)[0].end is None
    bench.round()
    assert read_submissions(bench.store, RUN)[0].end is not None


def test_end_of_finalize_stands(bench: Bench) -> None:
    bench.submitted(phase="Succeeded")
    sealed = SubmissionEnd(run=RUN, submission=1, status="Failed", message="fit failed in attempt 1")
    bench.store.create(RunLayout(RUN).submission_end(1), sealed.to_bytes())
    bench.round()
    assert read_submissions(bench.store, RUN)[0].end == sealed


@pytest.mark.parametrize("fields", [{}, {"phase": "Failed", "spec": {"shutdown": "Terminate"}}])
def test_workflow_that_runs_or_was_stopped_gets_no_end(bench: Bench, fields: dict[str, Any]) -> None:
    bench.submitted(**fields)
    bench.round()
    assert read_submissions(bench.store, RUN)[0].end is None


def test_a_workflow_that_is_deleted_while_it_runs_says_how_to_go_on(bench: Bench) -> None:
    bench.submitted()
    bench.round()
    bench.api.delete(WORKFLOWS, "ml", RUN)
    bench.round()
    bench.round()
    [(reason, message)] = posted_events(bench.server)
    assert reason == "WorkflowDeleted"
    assert f"`tiphys resume {RUN} --store" in message


def test_a_workflow_of_another_store_is_left_to_the_plugins_refusal(bench: Bench) -> None:
    put(bench.api, workflow(store="s3://elsewhere", run=RUN))
    History(bench.store, RUN).failed("fit")
    bench.round()
    assert posted_events(bench.server) == []


def test_a_run_that_cannot_be_read_silences_no_other(bench: Bench) -> None:
    put(bench.api, workflow("broken", store=bench.store.url, run="broken"))
    bench.store.create(RunLayout("broken").submission(1), b"not a record")
    bench.submitted(phase="Failed")
    bench.round()
    assert [reason for reason, _ in posted_events(bench.server)] == ["RunFailed"]
    assert bench.metrics.registry.get_sample_value("tiphys_controller_failures_total", {"what": "look"}) == 1


def test_a_workflow_that_was_over_long_ago_costs_nothing(bench: Bench) -> None:
    put(bench.api, workflow(phase="Failed", store=bench.store.url, status={"finishedAt": "2020-01-01T00:00:00Z"}))
    bench.round()
    assert posted_events(bench.server) == []
    assert bench.metrics.registry.get_sample_value("tiphys_controller_looks_total") == 0


def test_several_namespaces_need_a_store_each(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"put \{namespace\} into the URL, such as s3://ml-runs/tiphys/\{namespace\}"):
        TenantStores("s3://ml-runs/tiphys", None)
    url = f"file://{tmp_path}/{{namespace}}/runs"
    assert TenantStores(url, ("a", "b")).store("b").url == f"file://{tmp_path}/b/runs"


@contextmanager
def running(api: KubeApi, store: Store, identity: str = "one", **options: bool) -> Iterator[Controller]:
    """A whole controller, until the body is over."""
    stop = threading.Event()
    given = ControllerDependencies(api, ("ml",), lambda _: store, identity, "tiphys-system", **options)
    controller = Controller(given, lease_seconds=300.0, renew_seconds=0.05)
    thread = threading.Thread(target=controller.run, args=(stop,))
    thread.start()
    try:
        yield controller
    finally:
        stop.set()
        thread.join(60)
        assert not thread.is_alive()


def leads(controller: Controller) -> bool:
    return controller.metrics.registry.get_sample_value("tiphys_controller_leads") == 1


def ready(controller: Controller) -> bool:
    try:
        controller.check_ready()
    except StoreError:
        return False
    return True


def test_a_controller_leads_heals_and_tells_until_it_is_stopped(server: KubeServer, api: KubeApi, store: Store) -> None:
    server.add_namespace("tiphys-system")
    with running(api, store) as controller:
        until(lambda: leads(controller) and ready(controller))
        put_agent(api, put(api, workflow(phase="Failed", name="over")))
        put_agent(api, put(api, workflow()), name="agent-of-digits-1")
        until(lambda: {reason for reason, _ in posted_events(server)} == {"AgentPodDeleted", "RunFailed"})
    assert not leads(controller)
    assert len(server.objects("pods")) == 1
    [lease] = server.objects("leases")
    assert lease["spec"]["holderIdentity"] == ""


def test_a_controller_that_leads_records_steps_without_a_gate(server: KubeServer, api: KubeApi, store: Store) -> None:
    server.add_namespace("tiphys-system")
    flow = ArgoWorkflow(store, [bare()], parameters={"tiphys-run": RUN})
    flow.start()
    manifest = flow.manifest
    manifest["metadata"]["labels"] = {PIPELINE_ANNOTATION: "digits"}
    created = put(api, manifest)
    with running(api, store):
        until(lambda: find_record(store, RunLayout(RUN).attempt("prep", 1), AttemptClaim))
        flow.finish()
        api.patch(WORKFLOWS, "ml", flow.name, {"status": flow.manifest["status"]})
        until(lambda: find_attempt_end(store, RUN, "prep", 1))
    claim = find_record(store, RunLayout(RUN).attempt("prep", 1), AttemptClaim)
    assert claim is not None
    assert claim.uid == created["metadata"]["uid"]


@pytest.mark.parametrize("switched_on", [True, False])
def test_pods_are_seen_and_workflows_patched_only_where_that_is_switched_on(
    server: KubeServer, api: KubeApi, store: Store, switched_on: bool
) -> None:
    server.add_namespace("tiphys-system")
    Bench(server, api, store).submitted()
    History(store, RUN).failed("fit")
    before = len(server.requests)
    with running(api, store, agent_pods=switched_on, descriptions=switched_on) as controller:
        until(lambda: ready(controller) and posted_events(server))
    asked = {(one.verb, one.plural) for one in server.requests[before:]}
    assert (("patch", "workflows") in asked) is switched_on
    assert ("pods" in {plural for _, plural in asked}) is switched_on


def test_a_second_controller_takes_over_the_lost_leadership(server: KubeServer, api: KubeApi, store: Store) -> None:
    server.add_namespace("tiphys-system")
    with running(api, store, "one") as one:
        until(lambda: leads(one))
        with running(server.api("ml"), store, "two") as two:
            until(lambda: ready(two))
            assert not leads(two)
            api.patch(LEASES, "tiphys-system", "tiphys-controller", {"spec": {"holderIdentity": "two"}})
            until(lambda: leads(two) and not leads(one))


def test_a_right_that_is_missing_is_named_by_readyz(server: KubeServer, api: KubeApi, store: Store) -> None:
    server.add_namespace("tiphys-system")

    def without_pods(request: Request) -> bool:
        return request.plural != "pods"

    server.authorize = without_pods
    with running(api, store) as controller, served(controller) as health:
        until(lambda: "cannot watch pods; the log says where and why" in get(health, "/readyz")[1])
        status, body = get(health, "/readyz")
        assert status == 503
        assert "ml" not in json.loads(body)["error"]
        assert get(health, "/healthz") == (200, "ok\n")
        server.authorize = lambda _: True
        until(lambda: get(health, "/readyz") == (200, "ok\n"))
        until(lambda: "tiphys_controller_leads 1.0" in get(health, "/metrics")[1])
        assert get(health, "/")[0] == 404


def served(controller: Controller) -> AppServer:
    return AppServer(create_controller_app(controller.check_ready, controller.metrics.render), "127.0.0.1", 0)


def get(server: AppServer, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=120)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()
