"""The commands against a cluster: where a run goes, what is refused, and what they say next.

| the last submission ran | options | resume goes |
|---|---|---|
| on this cluster | – | there, in its namespace |
| on another cluster | – | refused, with both names |
| on another cluster, sealed | --cluster | to this one |
| on this cluster, sealed | --local | to this machine |
| here, sealed | --cluster -n NS | to this cluster, in NS |
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support.builders.argo_objects import workflow
from support.builders.compiled_workflows import History, gated, pipeline_of
from support.fakes.submitter import FakeSubmitter
from support.processes.polling import until
from support.servers.kube_server import KubeServer
from support.stories import small_pipeline
from tiphys_controller import start_run
from tiphys_controller.doctor import obstacles
from tiphys_controller.kubernetes import KubernetesSubmitter

from hera_pipelines.ui.run_page import UsageReader, read_run_view
from tiphys.kube import KubeApi, identify_cluster
from tiphys.kube.resources import PODS, WORKFLOWS
from tiphys.records import SubmissionClaim, SubmissionEnd, SubmissionKind, utc_now
from tiphys.store import RunLayout, Store, read_submissions
from tiphys.store.format import mark_format

from .conftest import Command

RUN = "digits-1"
SUBMIT = ("run", "--cluster", "--no-preflight")
"""Preflight has its own tests; this server has nothing of Argo or Tiphys."""


PIPELINE = pipeline_of(gated("prep"), gated("fit", depends="prep"))


def begun(store: Store, submitter: Any, namespace: str = "ml", sealed: str = "") -> None:
    """A run whose first step is done; ``sealed``: how its Workflow said that it ended."""
    start_run(store, submitter, PIPELINE, RUN, namespace=namespace)
    History(store, RUN).done("prep")
    if sealed:
        end = SubmissionEnd(run=RUN, submission=1, status=sealed)
        store.create(RunLayout(RUN).submission_end(1), end.to_bytes())


def on(api: KubeApi) -> KubernetesSubmitter:
    return KubernetesSubmitter(api, identify_cluster(api))


def end(api: KubeApi, name: str, phase: str = "Failed", namespace: str = "ml", **status: Any) -> None:
    api.patch(WORKFLOWS, namespace, name, {"status": {"phase": phase, **status}})


@contextmanager
def meanwhile(action: Callable[[], None]) -> Iterator[None]:
    """Do something in the cluster while the body runs; its failure is the test's."""
    failures: list[BaseException] = []

    def work() -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001  told by the thread of the test
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    assert not failures, failures


def exists(server: KubeServer, name: str) -> bool:
    return any(one["metadata"]["name"] == name for one in server.objects("workflows"))


def test_a_run_goes_on_at_its_cluster_in_its_namespace(
    tiphys: Command, server: KubeServer, api: KubeApi, kubeconfig: Path, store: Store
) -> None:
    server.add_namespace("tenant")
    begun(store, on(api), namespace="tenant")
    end(api, RUN, namespace="tenant")

    def finish() -> None:
        until(lambda: exists(server, f"{RUN}-2"))
        end(api, f"{RUN}-2", "Succeeded", "tenant", nodes={"n": {"name": f"{RUN}-2.fit", "phase": "Succeeded"}})

    with meanwhile(finish):
        answer = tiphys("resume", RUN, "--store", store.url, "--kubeconfig", kubeconfig)

    assert answer.code == 0
    assert "fit: Succeeded" in answer.err
    assert f"submission 2 of run {RUN}" in answer.err
    assert "fit" in answer.out
    second = read_submissions(store, RUN)[-1]
    assert second.binding is not None
    assert (second.binding.namespace, second.binding.cluster) == ("tenant", identify_cluster(api))


@pytest.mark.parametrize("options", [(), ("-n", "tenant")])
def test_a_fork_goes_to_the_cluster_of_its_parent_and_leaves_that_alone(
    options: tuple[str, ...],
    tiphys: Command,
    server: KubeServer,
    api: KubeApi,
    kubeconfig: Path,
    store: Store,
) -> None:
    server.add_namespace("tenant")
    begun(store, on(api), namespace="tenant")

    answer = tiphys(
        *("fork", RUN, "--from", "fit", "--run", "hot", "--detach"),
        *("--store", store.url, "--kubeconfig", kubeconfig, *options),
    )

    assert (answer.code, answer.out) == (0, "hot\n")
    assert "creating Workflow hot in namespace tenant, under service account default" in answer.err
    assert api.get(WORKFLOWS, "tenant", "hot")["metadata"]["labels"]["tiphys.dev/run"] == "hot"
    first = read_submissions(store, "hot")[0].claim
    assert (first.kind, first.cluster, first.rerun_since) == ("fork", identify_cluster(api), {"fit": 1})
    assert len(read_submissions(store, RUN)) == 1


PULL = 'Back-off pulling image "a/b:1": ErrImagePull: manifest unknown'


def run_on(api: KubeApi, *names: str) -> None:
    """Argo runs the Workflows, which have the label that compile gives them."""
    for name in names:
        api.patch(WORKFLOWS, "ml", name, {"metadata": {"labels": {"tiphys.dev/pipeline": "digits"}}})
        end(api, name, "Running")


def waiting_pod(api: KubeApi, workflow_name: str, step: str) -> None:
    """A pod of a running step whose image is not there."""
    metadata = {
        "name": f"{workflow_name}-{step}",
        "namespace": "ml",
        "labels": {"workflows.argoproj.io/workflow": workflow_name},
        "annotations": {"workflows.argoproj.io/node-name": f"{workflow_name}.{step}.run(0)"},
    }
    state = {"waiting": {"reason": "ImagePullBackOff", "message": PULL}}
    container = {"name": "main", "image": "a/b:1", "state": state}
    api.create(PODS, "ml", {"metadata": metadata, "spec": {"containers": [{"name": "main", "image": "a/b:1"}]}})
    api.patch(PODS, "ml", metadata["name"], {"status": {"phase": "Pending", "containerStatuses": [container]}})


def test_get_and_runs_and_the_page_say_what_a_step_waits_for(
    tiphys: Command,
    server: KubeServer,
    api: KubeApi,
    kubeconfig: Path,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(obstacles, "_PATIENCE", timedelta())  # the server gives the pod the time of now
    begun(store, on(api))
    start_run(store, on(api), PIPELINE, "digits-2", namespace="ml")
    run_on(api, RUN, "digits-2")
    waiting_pod(api, RUN, "fit")
    options = ("--store", store.url, "--kubeconfig", kubeconfig, "--cluster")
    said = "fit waits: container main of image a/b:1 does not start: ImagePullBackOff"

    shown, document = tiphys("get", RUN, *options), tiphys("get", RUN, *options, "-o", "json")
    assert said in shown.out and "; correct the image of the step" in shown.out
    [obstacle] = json.loads(document.out)["obstacles"]
    assert (obstacle["step"], obstacle["remedy"]) == ("fit.run(0)", "correct the image of the step")
    assert said not in tiphys("get", f"{RUN}/prep", *options).out
    assert "waits" not in tiphys("get", "digits-2", *options).out

    server.requests.clear()
    rows = json.loads(tiphys("runs", *options, "-o", "json").out)["runs"]
    assert [(one["run"], len(one.get("obstacles", ()))) for one in rows] == [("digits-2", 0), (RUN, 1)], (
        "the newest comes first"
    )
    listings = [one.plural for one in server.requests if one.verb == "list"]
    assert sorted(listings) == ["events", "pods", "workflows"], "one of each, however many runs there are"
    assert said in tiphys("runs", *options).out

    view = read_run_view(store, UsageReader(utc_now), on(api), RUN, None, 1, 1, utc_now())
    assert [said in sentence for sentence in view.obstacles] == [True]

    end(api, RUN), end(api, "digits-2")
    server.requests.clear()
    assert "waits" not in tiphys("runs", *options).out
    assert not [one for one in server.requests if one.verb == "list"], "nothing runs, so nothing is asked"


def test_waiting_reasons_are_unknown_without_the_right_to_list_pods(
    tiphys: Command, server: KubeServer, api: KubeApi, kubeconfig: Path, store: Store
) -> None:
    begun(store, on(api))
    run_on(api, RUN)
    server.authorize = lambda request: request.plural != "pods"
    answer = tiphys("get", RUN, "--store", store.url, "--kubeconfig", kubeconfig, "--cluster")
    assert answer.code == 0
    assert "what steps wait for is not known" in answer.err
    view = read_run_view(store, UsageReader(utc_now), on(api), RUN, None, 1, 1, utc_now())
    assert "is not known" in view.obstacles[0]


def test_get_of_a_workflow_without_a_record_points_to_why(tiphys: Command, store: Store) -> None:
    mark_format(store)
    answer = tiphys("get", "digits-9", "--store", store.url)
    assert answer.code == 3
    assert "`tiphys why digits-9` shows what one waits for" in answer.error


def unrecorded(api: KubeApi, store: Store, name: str, phase: str, run: str = "", **changes: Any) -> None:
    """A Workflow whose plugin calls no service answered: Argo ran it, and the store knows nothing of it."""
    manifest = {**PIPELINE, "metadata": {**PIPELINE["metadata"], "name": name, "namespace": "ml"}}
    manifest["metadata"]["annotations"] = {
        "tiphys.dev/pipeline": "digits",
        "tiphys.dev/store": store.url,
        **changes,
    }
    manifest["metadata"].pop("generateName")
    given = [{"name": "tiphys-run", "value": run}, {"name": "tiphys-submission", "value": ""}]
    manifest["spec"] = {**manifest["spec"], "arguments": {"parameters": given}}
    api.create(WORKFLOWS, "ml", manifest)
    nodes = {"a": {"name": f"{name}.prep", "phase": "Succeeded"}}
    end(api, name, phase, nodes=nodes)


@pytest.mark.parametrize(
    ("workflow_name", "parameter", "run"),
    [
        ("digits-x7k2p", "", "digits-x7k2p"),
        ("nightly.v2-a", "", "nightly.v2-a"),
        ("digits-x7k2p", "Mine", "mine"),
    ],
)
def test_a_workflow_that_was_never_recorded_becomes_a_run_and_all_its_steps_run_again(
    workflow_name: str,
    parameter: str,
    run: str,
    tiphys: Command,
    server: KubeServer,
    api: KubeApi,
    kubeconfig: Path,
    store: Store,
) -> None:
    mark_format(store)
    unrecorded(api, store, workflow_name, "Failed", parameter)
    options = ("--store", store.url, "--kubeconfig", kubeconfig, "--cluster")

    planned = tiphys("plan", workflow_name, "--store", store.url)
    dry = tiphys("resume", workflow_name, "--dry-run", *options)
    assert not [*store.list("control/runs/")]
    answer = tiphys("resume", workflow_name, "--detach", *options)

    assert (planned.code, dry.code, answer.code) == (3, 0, 0)
    assert f"`tiphys resume {workflow_name} --cluster` takes up a Workflow of this name" in planned.error
    for said in (dry, answer):
        assert f"Workflow {workflow_name} was never recorded; it is run {run}" in said.err
    first, second = read_submissions(store, run)
    assert first.binding is not None and first.binding.uid == api.get(WORKFLOWS, "ml", workflow_name)["metadata"]["uid"]
    assert first.binding.cluster == identify_cluster(api)
    assert (second.claim.kind, second.claim.steps) == ("resume", ("prep", "fit"))
    assert exists(server, f"{run}-2")
    again = tiphys("plan", run, "--store", store.url)
    assert "prep" in again.out and "2 of 2 steps would run" in again.err


@pytest.mark.parametrize(
    ("phase", "annotations", "message", "code"),
    [
        ("Running", {}, "has not ended (Running), and the next call that a service answers records its run", 4),
        ("Failed", {"tiphys.dev/store": "s3://other/place"}, "is of the store s3://other/place, and this is file:", 2),
        (
            "Failed",
            {"tiphys.dev/pipeline": ""},
            "the Workflow is compiled and has no annotation tiphys.dev/pipeline",
            2,
        ),
    ],
)
def test_a_workflow_that_cannot_become_a_run_is_refused_and_nothing_is_written(
    phase: str,
    annotations: dict[str, str],
    message: str,
    code: int,
    tiphys: Command,
    api: KubeApi,
    kubeconfig: Path,
    store: Store,
) -> None:
    mark_format(store)
    unrecorded(api, store, "digits-x7k2p", phase, **annotations)
    if not annotations.get("tiphys.dev/pipeline", "digits"):
        api.patch(WORKFLOWS, "ml", "digits-x7k2p", {"metadata": {"annotations": {"tiphys.dev/pipeline": None}}})

    answer = tiphys("resume", "digits-x7k2p", "--store", store.url, "--kubeconfig", kubeconfig, "-n", "ml")
    absent = tiphys("resume", "digits-absent", "--store", store.url, "--kubeconfig", kubeconfig, "--cluster")

    assert (answer.code, message in answer.error) == (code, True), answer.error
    assert (absent.code, "a Workflow of this name; check the name" in absent.error) == (3, True)
    assert not [*store.list("control/runs/")]


def test_a_workflow_of_which_a_record_exists_already_becomes_the_rest_of_a_run(
    tiphys: Command, server: KubeServer, api: KubeApi, kubeconfig: Path, store: Store
) -> None:
    """The outage began between the binding and the record of the run."""
    mark_format(store)
    unrecorded(api, store, "digits-x7k2p", "Failed")
    claim = SubmissionClaim(
        run="digits-x7k2p",
        submission=1,
        kind=SubmissionKind.ORIGINAL,
        workflow_name="digits-x7k2p",
        namespace="ml",
    )
    store.create(RunLayout("digits-x7k2p").submission(1), claim.to_bytes())

    answer = tiphys(
        *("resume", "digits-x7k2p", "--detach", "--cluster", "--store", store.url, "--kubeconfig", kubeconfig)
    )

    assert answer.code == 0, answer.error
    assert exists(server, "digits-x7k2p-2")


def test_a_run_that_fails_there_says_why_and_how_to_go_on(
    tiphys: Command, server: KubeServer, api: KubeApi, kubeconfig: Path, store: Store
) -> None:
    begun(store, on(api))
    end(api, RUN)
    nodes = {
        "a": {"name": f"{RUN}-2.fit", "phase": "Failed", "type": "Steps", "message": "child failed"},
        "b": {"name": f"{RUN}-2.fit(0).conclude", "phase": "Failed", "type": "Plugin", "message": "given up: no GPU"},
    }

    def fail() -> None:
        until(lambda: exists(server, f"{RUN}-2"))
        end(api, f"{RUN}-2", "Failed", nodes=nodes)

    with meanwhile(fail):
        answer = tiphys("resume", RUN, "--store", store.url, "--kubeconfig", kubeconfig)

    assert answer.code == 1
    assert f"run {RUN} failed: fit: given up: no GPU; `tiphys get {RUN}" in answer.error
    assert f"`tiphys resume {RUN} --store {store.url} --kubeconfig {kubeconfig}` continues" in answer.error


def test_a_workflow_that_is_deleted_meanwhile_says_how_to_go_on(
    tiphys: Command, server: KubeServer, api: KubeApi, kubeconfig: Path, store: Store
) -> None:
    begun(store, on(api))
    end(api, RUN)

    def delete() -> None:
        # Once somebody watches it: before, it would be gone before it was found.
        until(lambda: exists(server, f"{RUN}-2") and server.count("list", "workflows"))
        api.delete(WORKFLOWS, "ml", f"{RUN}-2")

    with meanwhile(delete):
        answer = tiphys("resume", RUN, "--store", store.url, "--kubeconfig", kubeconfig)

    assert answer.code == 3
    assert f"Workflow ml/{RUN}-2 was deleted; finished steps and checkpoints are kept" in answer.error
    assert f"continue with `tiphys resume {RUN}" in answer.error


def test_a_cluster_other_than_that_of_the_run_is_refused_with_both_names(
    tiphys: Command, api: KubeApi, kubeconfig: Path, store: Store, tmp_path: Path
) -> None:
    begun(store, FakeSubmitter(tmp_path / "cluster", "kubernetes:0123456789ab"))
    answer = tiphys("resume", RUN, "--store", store.url, "--kubeconfig", kubeconfig)
    assert answer.code == 2
    assert "went to cluster kubernetes:0123456789ab" in answer.error
    assert f"leads to {identify_cluster(api)}" in answer.error
    assert len(read_submissions(store, RUN)) == 1


@pytest.mark.parametrize(
    ("before", "namespace"), [("kubernetes:0123456789ab", "dev"), ("local:desk:/state", "default")]
)
def test_a_sealed_run_may_go_on_at_another_cluster(
    before: str,
    namespace: str,
    tiphys: Command,
    server: KubeServer,
    api: KubeApi,
    kubeconfig: Path,
    store: Store,
    tmp_path: Path,
) -> None:
    server.add_namespace("dev")
    begun(store, FakeSubmitter(tmp_path / "cluster", before), namespace=namespace, sealed="Failed")

    def finish() -> None:
        until(lambda: exists(server, f"{RUN}-2"))
        end(api, f"{RUN}-2", "Succeeded", "dev")

    with meanwhile(finish):
        answer = tiphys("resume", RUN, "--store", store.url, "--kubeconfig", kubeconfig, "--cluster", "-n", "dev")

    assert answer.code == 0
    bound = read_submissions(store, RUN)[-1].binding
    assert bound is not None
    assert (bound.cluster, bound.namespace) == (identify_cluster(api), "dev")


@pytest.mark.parametrize("command", [("resume", RUN), ("fork", RUN, "--from", "fit")])
def test_a_namespace_that_is_not_that_of_the_records_is_refused(
    command: tuple[str, ...], tiphys: Command, server: KubeServer, api: KubeApi, kubeconfig: Path, store: Store
) -> None:
    for namespace in ("tenant", "ml"):
        server.add_namespace(namespace)
    begun(store, on(api), namespace="tenant")
    end(api, RUN, namespace="tenant")

    answer = tiphys(*command, "--store", store.url, "--kubeconfig", kubeconfig, "-n", "ml")

    assert answer.code == 2
    assert f"-n ml: the records of run {RUN} name namespace tenant" in answer.error
    assert [one["metadata"]["name"] for one in server.objects("workflows")] == [RUN]


def test_a_plan_asks_no_cluster(tiphys: Command, api: KubeApi, store: Store, tmp_path: Path) -> None:
    begun(store, on(api))
    answer = tiphys("resume", RUN, "--store", store.url, "--dry-run", "-o", "json")
    assert answer.code == 0
    assert '"decision": "run"' in answer.out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--queues", "q.yaml"], "--queues: this is for the local engine"),
        (["--speed", "2", "--plugin-port", "1"], "--plugin-port, --speed: this is for the local engine"),
        (["--cluster", "--local"], "exclude each other"),
        (["--local", "--context", "east"], "--context: this is for a cluster"),
    ],
)
def test_options_that_mean_nothing_there_are_refused_by_name(
    options: list[str], sentence: str, tiphys: Command, api: KubeApi, kubeconfig: Path, store: Store
) -> None:
    begun(store, on(api))
    given = options if "--local" in options else [*options, "--kubeconfig", str(kubeconfig)]
    answer = tiphys("resume", RUN, "--store", store.url, *given)
    assert (answer.code, len(read_submissions(store, RUN))) == (2, 1)
    assert sentence in answer.error


def test_a_pipeline_runs_on_the_cluster_under_the_charts_account(
    tiphys: Command, server: KubeServer, api: KubeApi, kubeconfig: Path, store: Store, tmp_path: Path
) -> None:
    file = small_pipeline.write(tmp_path / "code")
    answer = tiphys(
        "run",
        file,
        "--cluster",
        "--no-preflight",
        "--detach",
        "--run",
        "hot",
        "--store",
        store.url,
        "--kubeconfig",
        kubeconfig,
    )
    assert (answer.code, answer.out) == (0, "hot\n")
    [found] = server.objects("workflows")
    assert (found["metadata"]["name"], found["metadata"]["namespace"]) == ("hot", "ml")
    assert found["spec"]["serviceAccountName"] == "tiphys-workflow"
    assert "tiphys.dev/code" not in found["metadata"]["annotations"]
    assert f"stop it with `tiphys stop hot --store {store.url} --kubeconfig {kubeconfig}`" in answer.err


@pytest.mark.parametrize(("items", "is_warned"), [(6000, True), (100, False)])
def test_a_run_that_argo_cannot_store_is_started_with_a_warning(
    tiphys: Command,
    server: KubeServer,
    api: KubeApi,
    kubeconfig: Path,
    store: Store,
    tmp_path: Path,
    items: int,
    is_warned: bool,
) -> None:
    file = tmp_path / "many.py"
    file.write_text(
        "from hera_pipelines import Pipeline, Step\n"
        "prep = Step(name='prep', image='alpine', command=['true'])\n"
        "with Pipeline('many') as pipeline:\n"
        f"    prep(with_sequence={{'count': '{items}'}})\n"
    )
    answer = tiphys(
        "run",
        file,
        "--cluster",
        "--no-preflight",
        "--detach",
        "--run",
        "many",
        "--store",
        store.url,
        "--kubeconfig",
        kubeconfig,
    )
    assert (answer.code, len(server.objects("workflows"))) == (0, 1)
    assert ("warning: the Workflow will have some 12,006 nodes" in answer.err) == is_warned


def test_a_run_on_the_cluster_is_watched_to_its_end(
    tiphys: Command, server: KubeServer, api: KubeApi, kubeconfig: Path, store: Store, tmp_path: Path
) -> None:
    def finish() -> None:
        until(lambda: exists(server, "hot"))
        end(api, "hot", "Running", nodes={"n": {"name": "hot.fit", "phase": "Running", "type": "Steps"}})
        until(lambda: server.count("watch", "workflows"))
        end(api, "hot", "Succeeded", nodes={"n": {"name": "hot.fit", "phase": "Succeeded", "type": "Steps"}})

    file = small_pipeline.write(tmp_path / "code")
    with meanwhile(finish):
        answer = tiphys(*SUBMIT, file, "--run", "hot", "--store", store.url, "--kubeconfig", kubeconfig)

    assert (answer.code, answer.out) == (0, "hot\n")
    assert "fit: Succeeded" in answer.err
    assert "run hot succeeded" in answer.err.splitlines()[-1]


def test_a_repeated_run_follows_the_workflow_that_it_finds_although_the_newest_one_is_gone(
    tiphys: Command, server: KubeServer, api: KubeApi, kubeconfig: Path, store: Store, tmp_path: Path
) -> None:
    words = (*SUBMIT, small_pipeline.write(tmp_path / "code"), "--run", "hot", "--store", store.url, "--detach")
    words = (*words, "--kubeconfig", kubeconfig, "--idempotency-key", "nightly")
    assert tiphys(*words).code == 0
    newest = SubmissionClaim(
        run="hot", submission=2, kind=SubmissionKind.RESUME, workflow_name="hot-2", namespace="gone"
    )
    store.create(RunLayout("hot").submission(2), newest.to_bytes())
    again = tiphys(*words)
    assert (again.code, again.out) == (0, "hot\n")
    assert "Workflow ml/hot in cluster" in again.err


def test_ctrl_c_ends_the_display_and_not_the_run(
    tiphys: Command,
    server: KubeServer,
    api: KubeApi,
    kubeconfig: Path,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object) -> Iterator[object]:
        yield {}
        raise KeyboardInterrupt

    monkeypatch.setattr(KubernetesSubmitter, "watch", interrupted)
    file = small_pipeline.write(tmp_path / "code")
    answer = tiphys(*SUBMIT, file, "--run", "hot", "--store", store.url, "--kubeconfig", kubeconfig)
    assert answer.code == 130
    assert "run hot continues on the cluster" in answer.error
    assert "stop it with `tiphys stop hot" in answer.error
    assert "shutdown" not in server.objects("workflows")[0]["spec"]


def test_a_folder_that_no_pod_sees_is_no_store_for_a_cluster(tiphys: Command, kubeconfig: Path, tmp_path: Path) -> None:
    answer = tiphys("run", small_pipeline.write(tmp_path / "code"), "--cluster", "--kubeconfig", kubeconfig)
    assert answer.code == 2
    assert "give --store s3://" in answer.error


def test_options_of_a_cluster_are_refused_without_one(tiphys: Command, tmp_path: Path) -> None:
    answer = tiphys("run", small_pipeline.write(tmp_path / "code"), "-n", "ml")
    assert answer.code == 2
    assert "--namespace: this is for a cluster; add --cluster" in answer.error


def test_a_cluster_that_cannot_be_reached_is_said_with_what_to_do(tiphys: Command, tmp_path: Path) -> None:
    missing = tmp_path / "no-such-kubeconfig"
    file = small_pipeline.write(tmp_path / "code")
    answer = tiphys(*SUBMIT, file, "--store", tmp_path / "store", "--kubeconfig", missing)
    assert answer.code == 2
    assert "set KUBECONFIG or give --context" in answer.error


@pytest.mark.parametrize(("options", "word"), [([], "Stop"), (["--terminate"], "Terminate")])
def test_a_run_is_stopped_on_its_cluster(
    options: list[str], word: str, tiphys: Command, server: KubeServer, api: KubeApi, kubeconfig: Path, store: Store
) -> None:
    begun(store, on(api))
    answer = tiphys("stop", RUN, "--store", store.url, "--kubeconfig", kubeconfig, *options)
    assert answer.code == 0
    assert server.objects("workflows")[0]["spec"]["shutdown"] == word
    assert f"`tiphys resume {RUN} --store {store.url}` continues" in answer.err


def test_a_run_that_is_over_is_not_stopped(
    tiphys: Command, server: KubeServer, api: KubeApi, kubeconfig: Path, store: Store
) -> None:
    begun(store, on(api))
    end(api, RUN)
    answer = tiphys("stop", RUN, "--store", store.url, "--kubeconfig", kubeconfig)
    assert answer.code == 0
    assert f"run {RUN} is not running: its Workflow ml/{RUN} is Failed" in answer.err
    assert "shutdown" not in server.objects("workflows")[0]["spec"]


def test_a_workflow_that_took_its_name_is_not_stopped(
    tiphys: Command, server: KubeServer, api: KubeApi, kubeconfig: Path, store: Store
) -> None:
    begun(store, on(api))
    api.delete(WORKFLOWS, "ml", RUN)
    api.create(WORKFLOWS, "ml", workflow(RUN))
    answer = tiphys("stop", RUN, "--store", store.url, "--kubeconfig", kubeconfig)
    assert answer.code == 3
    assert "was deleted, so nothing runs" in answer.error
    assert "shutdown" not in server.objects("workflows")[0]["spec"]


def test_the_cluster_is_asked_which_runs_are_alive(
    tiphys: Command, api: KubeApi, kubeconfig: Path, store: Store
) -> None:
    begun(store, on(api))
    unasked = tiphys("get", RUN, "--store", store.url)
    assert "Unknown" in unasked.out
    asked = tiphys("get", RUN, "--store", store.url, "--cluster", "--kubeconfig", kubeconfig)
    assert f"Running, submission 1 is Workflow {RUN} (Pending)" in asked.out
    listed = tiphys("runs", "--store", store.url, "--cluster", "--kubeconfig", kubeconfig, "-o", "json")
    assert '"phase": "Running"' in listed.out
    refused = tiphys("runs", "--store", store.url, "--context", "east")
    assert (refused.code, "--context: this is for a cluster; add --cluster" in refused.error) == (2, True)


def test_a_local_run_is_stopped_where_it_runs(tiphys: Command, store: Store, tmp_path: Path) -> None:
    begun(store, FakeSubmitter(tmp_path / "cluster", "local:desk:/state"))
    answer = tiphys("stop", RUN, "--store", store.url)
    assert answer.code == 2
    assert f"run {RUN} was started on machine desk; use this command there" in answer.error
