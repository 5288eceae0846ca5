"""What lies in a tenant's store never acts in another namespace, and never brings instructions of its own.

| forged in the store of namespace ``ml`` | before | now |
|---|---|---|
| a submission that names namespace ``vision`` | the controller created a Workflow there | damage |
| ``run.json`` with a Workflow of another namespace | created there | refused at the submitter |
| an unbound submission with the name of somebody's Workflow | it was stopped | only a bound uid is stopped |
| a binding that names ``vision`` | the victim's Job was deleted | damage |
| an attempt claim with a pod patch | Argo applied it | worked out from spec and lease |
| an alert's claim with an action | it overrode the administrator's rules | the rules of now |
| a record of 600 MiB | read into the memory of the services | not read |
"""

import contextlib
import json
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.builders.compiled_workflows import History, gated, pipeline_of
from support.fakes.memory_store import MemoryStore
from support.fakes.submitter import FakeSubmitter
from support.stories.plugin import Flow, fit, workflow, world
from tiphys_controller import LiveWorkflow, TenantSubmitter, resume_run, start_run
from tiphys_controller.alerts.handler import AlertHandler
from tiphys_controller.alerts.rules import AlertAction
from tiphys_controller.alerts.webhook import AlertInbox, parse_delivery
from tiphys_controller.auto_resume.act import AutoResumeReconciler, stop_workflow
from tiphys_controller.auto_resume.observation_health import ObservationHealth
from tiphys_controller.auto_resume.state import AutomationMode, AutoResumeLimits
from tiphys_controller.kubernetes.alert_worker import AlertSweep
from tiphys_controller.kubernetes.events.run_log import RunLog
from tiphys_plugin.attempts import pods

from tiphys.errors import IntegrityError, TiphysError, UsageError
from tiphys.protocol.auto_resume_policy import AUTO_RESUME_ANNOTATION, AutoResumePolicy
from tiphys.protocol.compiled_workflow import CompiledPipeline
from tiphys.protocol.step_spec import CheckpointPolicy
from tiphys.records import (
    AttemptClaim,
    CheckpointRef,
    CrashRecord,
    Event,
    EventBatch,
    QuarantineRecord,
    RunRecord,
    SubmissionBinding,
    SubmissionClaim,
    SubmissionKind,
    json_digest,
)
from tiphys.records.base import compute_seal, encode_document
from tiphys.records.event import PROGRAM_EVENT_SOURCE
from tiphys.store import (
    DirectoryStore,
    RunLayout,
    Store,
    append_events,
    find_record,
    read_events,
    read_record,
    read_submissions,
)
from tiphys.store.incarnations import crash_key, find_crash_record
from tiphys.store.layout import DATA, alert_key, event_batch_key

OWN, OTHER = "ml", "vision"
RUN = "digits-1"
LAYOUT = RunLayout(RUN)


class Cluster(FakeSubmitter):
    """Workflows of both namespaces; it remembers which ones were stopped."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.stopped: list[tuple[str, str]] = []

    def stop(self, workflow: LiveWorkflow, strategy: Any = None) -> None:
        self.stopped.append((workflow.namespace, workflow.name))

    def watch(self, workflow: LiveWorkflow, *_: Any) -> Any:
        return iter(())

    def workflows(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "cluster")


@pytest.fixture
def store() -> MemoryStore:
    """The store of the attacker's namespace."""
    return MemoryStore(namespace=OWN)


def asking() -> dict[str, Any]:
    """A pipeline that asks for automatic resumes."""
    manifest = pipeline_of(gated("prep"), gated("fit", depends="prep"))
    manifest["metadata"]["annotations"][AUTO_RESUME_ANNOTATION] = AutoResumePolicy().model_dump_json()
    return manifest


def forge_run(store: Store, namespace: str, claimed_namespace: str) -> None:
    """A run that was never started: its record, and a submission that was never sent."""
    document = asking()
    document["metadata"] |= {"name": RUN, "namespace": namespace}
    record = RunRecord(run=RUN, pipeline="digits", workflow=document, digest=json_digest(document))
    store.create(LAYOUT.run_record, record.to_bytes())
    claim = SubmissionClaim(
        run=RUN, submission=1, kind=SubmissionKind.ORIGINAL, workflow_name=RUN, namespace=claimed_namespace
    )
    store.create(LAYOUT.submission(1), claim.to_bytes())


def reconciler_of(stores: Mapping[str, Store], cluster: Cluster) -> AutoResumeReconciler:
    return AutoResumeReconciler(
        stores.__getitem__,
        lambda: cluster,
        lambda: True,
        lambda _: ObservationHealth(),
        iter(range(10**9)).__next__,
        AutoResumeLimits(mode=AutomationMode.ON, resumes_per_minute=6000.0),
    )


def test_a_forged_submission_creates_nothing_in_another_namespace(store: MemoryStore, cluster: Cluster) -> None:
    forge_run(store, OTHER, OTHER)

    with pytest.raises(IntegrityError, match=f"names namespace {OTHER}, and this store belongs to namespace {OWN}"):
        reconciler_of({OWN: store}, cluster).reconcile((OWN, RUN))

    assert cluster.workflows() == set()


def test_a_forged_run_creates_nothing_in_another_namespace(store: MemoryStore, cluster: Cluster) -> None:
    forge_run(store, OTHER, OWN)
    store.delete(LAYOUT.submission(1))

    with pytest.raises(IntegrityError, match=f"Workflow {OTHER}/{RUN}, and this store belongs to namespace {OWN}"):
        resume_run(store, TenantSubmitter(cluster, OWN), RUN)

    assert cluster.workflows() == set()


def test_a_run_of_the_own_namespace_is_created(store: MemoryStore, cluster: Cluster) -> None:
    forge_run(store, OWN, OWN)

    resume_run(store, TenantSubmitter(cluster, OWN), RUN)

    assert cluster.workflows() == {f"{OWN}_{RUN}.json"}


def test_a_submitter_of_a_tenant_refuses_every_verb_in_another_namespace(cluster: Cluster) -> None:
    confined = TenantSubmitter(cluster, OWN)
    manifest = {"metadata": {"name": "victim", "namespace": OTHER}, "spec": {}}
    victim = cluster.create(manifest)

    for verb in (
        lambda: confined.find(OTHER, "victim"),
        lambda: confined.create({**manifest, "metadata": {"name": "second", "namespace": OTHER}}),
        lambda: confined.create({"metadata": {"name": "unnamed"}}),
        lambda: confined.stop(victim),
        lambda: confined.watch(victim, None),  # type: ignore[arg-type]
    ):
        with pytest.raises(IntegrityError, match=f"belongs to namespace {OWN}"):
            verb()

    assert cluster.workflows() == {f"{OTHER}_victim.json"}
    assert cluster.stopped == []


@pytest.mark.parametrize(("bound_uid", "stopped"), [(None, []), ("uid-of-another", []), ("uid-of-victim", ["victim"])])
def test_only_the_workflow_that_is_bound_is_stopped(
    bound_uid: str | None, stopped: list[str], store: MemoryStore, cluster: Cluster
) -> None:
    cluster.create({"metadata": {"name": "victim", "namespace": OWN}})
    claim = SubmissionClaim(run=RUN, submission=1, kind=SubmissionKind.ORIGINAL, workflow_name="victim", namespace=OWN)
    store.create(LAYOUT.submission(1), claim.to_bytes())
    if bound_uid:
        binding = SubmissionBinding(
            run=RUN, submission=1, cluster="west", namespace=OWN, workflow_name="victim", uid=bound_uid
        )
        store.create(LAYOUT.submission_binding(1), binding.to_bytes())

    stop_workflow(store, TenantSubmitter(cluster, OWN), RUN)

    assert [name for _, name in cluster.stopped] == stopped


def test_a_forged_binding_shows_no_pods_of_another_namespace(tmp_path: Path) -> None:
    here = world(tmp_path, store=DirectoryStore(tmp_path / "own", namespace=OWN))
    binding = SubmissionBinding(
        run=RUN,
        submission=1,
        cluster=here.cluster.name.replace("local:", "kubernetes:"),
        namespace=OTHER,
        workflow_name="victim",
        uid="uid-1",
    )
    here.store.create(LAYOUT.submission_binding(1), binding.to_bytes())
    claim = AttemptClaim(
        run=RUN, step="fit", attempt=1, submission=1, uid="uid-1", node="n", instance="victim.fit", step_key="k"
    )

    with pytest.raises(IntegrityError, match=f"names namespace {OTHER}"):
        pods.list_attempt_pods(here.store, here.cluster, claim)


def test_a_recorded_pod_patch_is_not_applied(tmp_path: Path) -> None:
    here = world(tmp_path, store=DirectoryStore(tmp_path / "own", namespace=OWN))
    here.cluster.write_workflow(workflow([fit()]))
    flow = Flow(here, "digits-abc12", "uid-1")
    claim = AttemptClaim(
        run="digits-abc12", step="fit", attempt=1, submission=1, uid="uid-1", node=flow.admit_node("fit", 0),
        instance="digits-abc12.fit[0]", step_key="k", lineage="digits-abc12/fit",
    )  # fmt: skip
    document = {**json.loads(claim.to_bytes()), "pod_patch": json.dumps({"serviceAccountName": "argo-admin"})}
    forged = encode_document({**document, "seal": compute_seal(document)})
    here.store.create(RunLayout("digits-abc12").attempt("fit", 1), forged)

    reply = flow.admit("fit", 0).to_json()

    given = {one["name"]: one["value"] for one in reply["node"]["outputs"]["parameters"]}
    assert (given["run"], given["attempt"]) == ("true", "1"), "the forged claim was replayed"
    assert json.loads(given["pod-patch"]) == {"terminationGracePeriodSeconds": 30}


class AlertWorld:
    """The alert handler of one controller, with rules that only report."""

    def __init__(self, stores: Mapping[str, Store], cluster: Cluster) -> None:
        self.inbox = AlertInbox(stores.__getitem__, tuple(stores))
        self.outcomes: list[str] = []
        rules = {"*": AlertAction.NOTIFY}
        self.stores = stores
        self.handler = AlertHandler(stores.__getitem__, reconciler_of(stores, cluster), rules, self)

    def work(self, namespace: str) -> None:
        self.handler.handle_pending(namespace, AlertSweep().find_next_pending(self.stores[namespace]))

    def find_run(self, namespace: str, labels: Mapping[str, str]) -> str:
        return labels.get("tiphys_run", "")

    def find_shutdowns(self, namespace: str) -> Mapping[str, str]:
        return {}

    def record_handled(self, key: Any, alert: str, record: Any, done: Any) -> None:
        self.outcomes.append(done.outcome)


def test_a_recorded_action_does_not_override_the_rules(store: MemoryStore, cluster: Cluster) -> None:
    start_run(store, TenantSubmitter(cluster, OWN), asking(), RUN, namespace=OWN)
    desk = AlertWorld({OWN: store}, cluster)
    firing = {
        "status": "firing", "labels": {"alertname": "Any", "namespace": OWN, "tiphys_run": RUN}, "annotations": {},
        "startsAt": "2026-05-04T11:00:00Z", "endsAt": "0001-01-01T00:00:00Z", "fingerprint": "ab12",
    }  # fmt: skip
    delivery = parse_delivery({"version": "4", "groupKey": "{}", "status": "firing", "alerts": [firing]})
    desk.inbox.store_delivery(delivery)
    forged = {"version": 1, "nonce": "n", "written_at": "2026-05-04T11:00:00.000Z", "action": "save-and-restart"}
    store.create(alert_key(delivery.alerts[0].id, "claim"), encode_document({**forged, "run": RUN, "submission": 1}))

    desk.work(OWN)

    assert cluster.stopped == []
    assert len(desk.outcomes) == 1


@pytest.mark.parametrize("key", [LAYOUT.run_record, LAYOUT.submission(1)])
def test_a_huge_record_is_not_read(key: str, tmp_path: Path, cluster: Cluster) -> None:
    store = DirectoryStore(tmp_path / "store", namespace=OWN)
    forge_run(store, OWN, OWN)
    with (tmp_path / "store" / key).open("r+b") as file:
        file.truncate(600 << 20)  # sparse: it needs no disk
    tracemalloc.start()
    try:
        with pytest.raises(IntegrityError, match="629,145,600 bytes, and no record has more than 4,194,304"):
            resume_run(store, TenantSubmitter(cluster, OWN), RUN)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak_bytes < 64 << 20
    assert cluster.workflows() == set()


def test_a_crash_report_of_megabytes_is_not_read_and_a_long_one_is_cut(store: MemoryStore) -> None:
    key = crash_key(LAYOUT, "fit", 1)
    report = CrashRecord(run=RUN, step="fit", attempt=1, error="[Gloo]" * 10_000, fingerprint="x" * 5000)
    assert len(report.error) == 4096
    store.objects[key] = report.to_bytes()
    assert find_crash_record(store, RUN, "fit", 1) is not None
    store.objects[key] = report.to_bytes()[:-3] + b', "more": [' + b"{}," * 1_000_000 + b"{}]}\n"

    with pytest.raises(IntegrityError, match="a CrashRecord has at most 65,536"):
        find_crash_record(store, RUN, "fit", 1)


def test_an_event_of_a_program_keeps_plain_and_short_values_only(store: MemoryStore) -> None:
    data = {"checkpoint": "1-5", "nested": [{}] * 1000, "long": "x" * 5000, "number": 7, "huge": 10**400}
    event = Event(name="checkpoint.skipped", message="m" * 5000, step="fit", data=data)
    append_events(store, RUN, PROGRAM_EVENT_SOURCE, [event])
    store.objects[event_batch_key(LAYOUT.program_events, 2)] = b"no record"

    [read] = read_events(store, RUN)

    assert len(read.message) == 1000
    assert read.data == {"checkpoint": "1-5", "long": "x" * 300, "number": 7}


def test_a_reason_for_a_quarantine_is_cut(store: MemoryStore) -> None:
    ref = CheckpointRef(lineage="r/fit", attempt=1, global_step=5)

    assert len(QuarantineRecord(checkpoint=ref, reason="x" * 60_000, by="restore").reason) == 500


def test_checkpoints_may_lie_on_a_volume_and_in_no_other_bucket() -> None:
    spec = fit(checkpoints=CheckpointPolicy(store=f"s3://ml-runs/{OTHER}/tiphys"))
    pipeline = CompiledPipeline.from_manifest(workflow([spec]))

    with pytest.raises(UsageError, match=f"keeps its checkpoints in s3://ml-runs/{OTHER}/tiphys"):
        pipeline.checkpoint_volume_url("fit")
    volume = fit(checkpoints=CheckpointPolicy(store="file:///mnt/checkpoints"))
    assert CompiledPipeline.from_manifest(workflow([volume])).checkpoint_volume_url("fit") == "file:///mnt/checkpoints"


@pytest.mark.parametrize(
    "body",
    [
        b'{"run": ' + b"[" * 100_000,
        b'{"run": "digits-1", "workflow": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
        b'{"run": "digits-1", "submission": ' + b"9" * 5_000 + b"}",
        b'{"version": 1e400}',
        b"[]",
        b"\xff\xfe",
        b"",
    ],
    ids=["open", "deep", "digits", "float", "list", "bytes", "empty"],
)
def test_a_record_that_is_none_is_damage(body: bytes, store: MemoryStore) -> None:
    for key, kind in ((LAYOUT.run_record, RunRecord), (LAYOUT.submission(1), SubmissionClaim)):
        store.objects[key] = body

        with pytest.raises(IntegrityError, match=key):
            read_record(store, key, kind)


def test_a_program_reports_on_its_checkpoints_and_on_nothing_else(store: MemoryStore) -> None:
    events = [Event(name="run.resumed", message="forged"), Event(name="checkpoint.skipped", message="7 is corrupt")]
    append_events(store, RUN, PROGRAM_EVENT_SOURCE, events)
    append_events(store, RUN, "controller", [Event(name="run.resumed", message="submission 2")])

    assert [key for key in store.objects if key.startswith(LAYOUT.control)] == [f"{LAYOUT.events}000000001.json"]
    assert [event.message for event in read_events(store, RUN)] == ["submission 2", "7 is corrupt"]


def test_events_of_a_program_take_a_bounded_part_of_the_controllers_memory(store: MemoryStore) -> None:
    event = Event(name="checkpoint.skipped", message="x")
    for number in range(1, 1200):
        batch = EventBatch(run=RUN, source=PROGRAM_EVENT_SOURCE, events=(event,) * (300 if number == 1 else 1))
        store.objects[event_batch_key(LAYOUT.program_events, number)] = batch.to_bytes()
    log = RunLog(RUN)

    for _ in range(40):
        log.read(store)

    assert log.is_complete
    assert len(log.events) == 1000
    assert len(log.events[event_batch_key(LAYOUT.program_events, 1)]) == 20


KEYS = st.sampled_from([
    "runs/{run}/run.json", "runs/{run}/submissions/000000001.json", "runs/{run}/attempts/fit/000000001.json",
    "runs/{run}/incarnations/fit/000000001/000000001.crash.json",
    "runs/{run}/events/000000001.json", "runs/{run}/outputs/fit/000000001/x",
    "runs/{run}/progress/fit/000000001", "lineages/{run}/fit/manifests/999999998-999999999999989.json",
    "lineages/{run}/fit/quarantine/999999998-999999999999989.json", "alerts/aa/firing.json", "memo/k.json",
])  # fmt: skip
BODIES = st.one_of(
    st.binary(max_size=200),
    st.fixed_dictionaries(
        {"version": st.just(1), "run": st.sampled_from([RUN, "victim"])},
        optional={
            "namespace": st.sampled_from([OWN, OTHER, "kube-system"]),
            "submission": st.integers(0, 3),
            "workflow_name": st.sampled_from([RUN, "victim"]),
            "uid": st.sampled_from(["uid-1", "uid-of-victim"]),
            "events": st.just([{"name": "run.resumed", "message": "x", "data": {"submission": 1}}]),
            "outcome": st.sampled_from(["done", "failed"]),
        },
    ).map(encode_document),
)


@given(st.lists(st.tuples(KEYS, st.sampled_from([RUN, "victim"]), BODIES), max_size=12))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_record_written_by_a_program_changes_nothing_in_another_namespace(
    tmp_path_factory: pytest.TempPathFactory, written: list[tuple[str, str, bytes]]
) -> None:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    stores = {OWN: MemoryStore(namespace=OWN), OTHER: MemoryStore(namespace=OTHER)}
    start_run(stores[OWN], TenantSubmitter(cluster, OWN), asking(), RUN, namespace=OWN)
    start_run(stores[OTHER], TenantSubmitter(cluster, OTHER), asking(), "victim", namespace=OTHER)
    History(stores[OWN], RUN).failed("prep")
    cluster.end(RUN, namespace=OWN)
    for key, run, body in written:
        stores[OWN].objects[DATA + key.format(run=run)] = body
    before = {name for name in cluster.workflows() if name.startswith(OTHER)}
    victim_before = dict(stores[OTHER].objects)
    desk = AlertWorld(stores, cluster)

    for run in (RUN, "victim"):
        with contextlib.suppress(TiphysError):
            desk.handler.reconciler.reconcile((OWN, run))
    desk.work(OWN)
    desk.work(OTHER)

    assert {name for name in cluster.workflows() if name.startswith(OTHER)} == before
    assert cluster.stopped == []
    assert stores[OTHER].objects == victim_before
    assert all(one.claim.namespace == OWN for one in read_submissions(stores[OWN], RUN))
    assert find_record(stores[OWN], RunLayout("victim").run_record, RunRecord) is None
