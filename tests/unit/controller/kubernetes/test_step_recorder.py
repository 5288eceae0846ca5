"""Recording the steps without a gate of all Workflows, from the states that the watch reports.

| state of a Workflow that is noted | outcome |
|---|---|
| its nodes show a step that started or ended | claim and end; the run is bound first, if it is not |
| the same, and a newer one before its turn | the newest alone |
| all of its steps have a gate; none of Tiphys; no status yet | nothing, and no request |
| its WorkflowTemplate is not merged yet | looked at again when it changes |
| ended more than an hour ago, or gone | nothing |
| refused: malformed, another's submission, another store, nodes in a database | said once; others go on |
| its store or the API server is out of reach | again after a pause |
"""

import copy
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

import pytest
from cachetools import LRUCache
from structlog.testing import capture_logs
from support.fakes.argo_workflow import START, ArgoWorkflow, bare, ungated
from support.fakes.counting_store import CountingStore
from support.fakes.memory_store import MemoryStore
from support.processes.polling import until
from tiphys_controller.kubernetes import step_recorder
from tiphys_controller.kubernetes.metrics import ControllerMetrics
from tiphys_controller.kubernetes.step_recorder import StepRecorder

from tiphys.errors import StoreError
from tiphys.kube import Object
from tiphys.protocol.step_spec import STEP_ANNOTATION, StepKind, StepSpec
from tiphys.records import AttemptClaim, AttemptEndOutcome, SubmissionBinding
from tiphys.store import RunLayout, Store, find_attempt_end, find_record, list_runs, read_record, read_run

BARE = {"tiphys-run": "", "tiphys-submission": ""}
"""Parameters of a Workflow that no run was recorded for, as after `argo submit`."""


class Desk:
    """A controller's recorder over one store for all namespaces, and a cluster with the Workflows in ``live``."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.live: dict[str, Object] = {}
        self.moment = 0.0
        self.now: datetime = START
        self.reads = 0
        self.stores: list[str] = []
        self.metrics = ControllerMetrics()
        self.reported: list[tuple[str, str]] = []
        self.recorder = StepRecorder(
            self._read, lambda: "west", self._store_of, self.metrics, lambda: self.now, self._tell, lambda: self.moment
        )

    def _tell(self, workflow: Object, why: str) -> None:
        self.reported.append((workflow["metadata"]["name"], why))

    def _read(self, namespace: str, name: str) -> Object | None:
        self.reads += 1
        return self.live.get(name)

    def _store_of(self, namespace: str) -> Store:
        self.stores.append(namespace)
        return self.store

    def note(self, workflow: ArgoWorkflow | Object) -> None:
        manifest = workflow.manifest if isinstance(workflow, ArgoWorkflow) else workflow
        self.live[manifest["metadata"]["name"]] = manifest
        self.recorder.note(manifest)

    def record(self, *workflows: ArgoWorkflow | Object) -> None:
        """Note the states of these Workflows, and record all that waits."""
        for workflow in workflows:
            self.note(workflow)
        self.recorder.record_waiting()

    def failures(self) -> float:
        return self.metrics.registry.get_sample_value("tiphys_controller_failures_total", {"what": "record"}) or 0.0

    def recorded(self) -> float:
        return self.metrics.registry.get_sample_value("tiphys_controller_recorded_steps_total") or 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """The recorder works in its threads."""
        stop = threading.Event()
        worker = threading.Thread(target=self.recorder.run, args=(stop,))
        worker.start()
        try:
            yield
        finally:
            stop.set()
            worker.join(60)
            assert not worker.is_alive()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def desk(store: MemoryStore) -> Desk:
    return Desk(store)


def numbered(store: Store, number: int, namespace: str = "ml") -> Object:
    """A Workflow of its own run, whose step has succeeded."""
    name = f"digits-{number}"
    flow = ArgoWorkflow(store, [bare()], name=name, uid=f"uid-{number}", parameters={**BARE, "tiphys-run": name})
    flow.start()
    flow.finish()
    manifest = flow.manifest
    manifest["metadata"]["namespace"] = namespace
    return manifest


def outcome(store: Store, run: str, step: str = "prep") -> AttemptEndOutcome | None:
    end = find_attempt_end(store, run, step, 1)
    return end.outcome if end else None


def test_a_step_is_claimed_and_ended_as_the_noted_states_show_it(store: MemoryStore, desk: Desk) -> None:
    flow = ArgoWorkflow(store, [ungated()])
    desk.record(flow)
    assert (flow.claim(), desk.recorded()) == (None, 0)
    flow.start()
    desk.record(flow)
    assert flow.claim() is not None
    assert flow.end() is None
    flow.finish(parameters={"rows": "3"}, artifacts={"data": b"1,2,3"})
    desk.record(flow)
    end = flow.end()
    assert end is not None
    assert [output.name for output in end.outputs] == ["rows", "data"]
    assert (desk.recorded(), desk.failures(), desk.reads) == (1, 0, 0)


def test_a_bare_workflow_becomes_a_run_of_its_name(store: MemoryStore, desk: Desk) -> None:
    flow = ArgoWorkflow(store, [bare()], parameters=BARE)
    flow.start()
    desk.record(flow)
    record = read_run(store, "digits-abc")
    assert record.pipeline == "digits"
    assert "status" not in record.workflow
    binding = read_record(store, RunLayout("digits-abc").submission_binding(1), SubmissionBinding)
    assert (binding.uid, binding.cluster, binding.namespace) == ("uid-1", "west", "ml")
    assert find_record(store, RunLayout("digits-abc").attempt("prep", 1), AttemptClaim) is not None


def test_the_newest_state_is_recorded_alone(store: MemoryStore, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    record = step_recorder.WorkflowRecorder.record
    monkeypatch.setattr(
        step_recorder.WorkflowRecorder, "record", lambda self, *state: calls.append(state) or record(self, *state)
    )
    flow = ArgoWorkflow(store, [bare()])
    flow.start()
    desk.note(flow)
    flow.finish()
    desk.record(flow)
    assert len(calls) == 1
    assert outcome(store, "digits") is AttemptEndOutcome.DONE


def test_a_state_that_comes_while_another_is_recorded_is_recorded_after_it(store: MemoryStore, desk: Desk) -> None:
    flow = ArgoWorkflow(store, [bare()])
    flow.start()
    desk.note(flow)
    first = flow.manifest
    flow.finish()
    answered = desk.recorder.cluster

    def overtaken() -> str:
        desk.recorder.cluster = answered
        desk.recorder.note(flow.manifest)
        desk.recorder.note(first | {"status": flow.manifest["status"]})
        return answered()

    desk.recorder.cluster = overtaken
    desk.recorder.record_waiting()
    assert outcome(store, "digits") is AttemptEndOutcome.DONE


MALFORMED: dict[str, Any] = {
    "no spec": lambda manifest: manifest.pop("spec"),
    "a status that is a text": lambda manifest: manifest.update(status="Running"),
    "a status without sense": lambda manifest: manifest["status"].update(phase={}, finishedAt=[], nodes=7),
    "nodes that are a list": lambda manifest: manifest["status"].update(nodes=[1]),
    "nodes without names": lambda manifest: manifest["status"].update(nodes={"a": {}}),
    "templates that are a text": lambda manifest: manifest["spec"].update(templates="all"),
    "a damaged setting": lambda manifest: manifest["spec"]["templates"][1]["metadata"].update(
        annotations={STEP_ANNOTATION: "{"}
    ),
    "compressed nodes that are none": lambda manifest: manifest["status"].update(compressedNodes="AAAA"),
    "a submission that is no number": lambda manifest: manifest["spec"]["arguments"].update(
        parameters=[{"name": "tiphys-run", "value": "x"}, {"name": "tiphys-submission", "value": "one"}]
    ),
    "parameters without a name": lambda manifest: manifest["spec"]["arguments"].update(parameters=[{"value": 1}]),
}


@pytest.mark.parametrize("damage", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_workflow_ends_nothing_for_others(store: MemoryStore, desk: Desk, damage: Any) -> None:
    malformed = copy.deepcopy(numbered(store, 1))
    damage(malformed)
    with capture_logs():
        desk.record(malformed, numbered(store, 2))
        desk.record(numbered(store, 3))
    assert [outcome(store, f"digits-{number}") for number in (2, 3)] == [AttemptEndOutcome.DONE] * 2
    assert desk.failures() == 1


def test_a_workflow_of_anothers_submission_is_refused_once(store: MemoryStore, desk: Desk) -> None:
    desk.record(numbered(store, 1))
    copied = copy.deepcopy(numbered(store, 1))
    copied["metadata"] |= {"name": "digits-1-copy", "uid": "uid-copy"}
    with capture_logs() as logs:
        for _ in range(3):
            desk.record(copied, numbered(store, 2))
    assert [(one["event"], one["workflow"]) for one in logs] == [("steps.failed", "digits-1-copy")]
    assert "use `tiphys resume digits-1`" in logs[0]["error"]
    assert read_record(store, RunLayout("digits-1").submission_binding(1), SubmissionBinding).uid == "uid-1"
    assert outcome(store, "digits-2") is AttemptEndOutcome.DONE


def test_a_workflow_that_was_compiled_for_another_store_is_refused_and_writes_nothing(desk: Desk) -> None:
    other = MemoryStore(url="memory://other")
    with capture_logs() as logs:
        desk.record(numbered(other, 1))
    assert "compile it with `tiphys compile --store memory://`" in logs[0]["error"]
    assert list(desk.store.list("")) == []


def test_nodes_in_a_database_are_said_once(store: MemoryStore, desk: Desk) -> None:
    flow = ArgoWorkflow(store, [bare()])
    manifest = flow.manifest
    manifest["status"] = {"phase": "Running", "offloadNodeStatusVersion": "fnv:1"}
    with capture_logs() as logs:
        for _ in range(3):
            desk.record(manifest)
    assert [one["event"] for one in logs] == ["steps.failed"]
    assert "give them gate=True, or switch node status offloading off" in logs[0]["error"]
    assert desk.reported == [("digits-abc", logs[0]["error"])]


def test_a_step_that_cannot_be_recorded_is_reported_once_and_the_others_are_recorded(
    store: MemoryStore, desk: Desk
) -> None:
    flow = ArgoWorkflow(store, [bare(), bare("sweep", fan_out=True)])
    flow.start_item("sweep", 0, "[" * 100_000, "deep")
    flow.start("prep")
    for _ in range(3):
        desk.record(flow)
    assert [name for name, _ in desk.reported] == ["digits-abc"]
    assert "step sweep(0:deep) cannot be recorded: the fan-out item is nested too deeply" in desk.reported[0][1]
    assert flow.claim() is not None


def test_an_event_that_cannot_be_posted_holds_up_no_record(store: MemoryStore, desk: Desk) -> None:
    def refuse(*_: object) -> None:
        raise StoreError("the API server is away")

    desk.recorder.warn = refuse
    manifest = ArgoWorkflow(store, [bare()]).manifest
    manifest["status"] = {"phase": "Running", "offloadNodeStatusVersion": "fnv:1"}
    with capture_logs() as logs:
        desk.record(manifest, numbered(store, 2))
    assert [one["event"] for one in logs] == ["steps.failed", "steps.untold"]
    assert outcome(store, "digits-2") is AttemptEndOutcome.DONE


def test_a_workflow_whose_steps_all_have_a_gate_costs_nothing(store: MemoryStore) -> None:
    counting = CountingStore(store)
    desk = Desk(counting)
    train = StepSpec(name="fit", kind=StepKind.TRAIN, template="t-fit")
    flow = ArgoWorkflow(store, [ungated(gate=True), train])
    flow.start()
    with capture_logs() as logs:
        for phase in ("Running", "Succeeded"):
            manifest = flow.manifest
            manifest["status"] |= {"phase": phase, "offloadNodeStatusVersion": "fnv:1"}
            desk.record(manifest)
    assert (counting.requests.total(), desk.stores, desk.reads, logs) == (0, [], 0, [])
    assert not desk.recorder._waiting


@pytest.mark.parametrize("field", ["annotations", "status"])
def test_a_workflow_of_others_or_that_argo_has_not_begun_is_passed_over(
    store: MemoryStore, desk: Desk, field: str
) -> None:
    manifest = numbered(store, 1)
    (manifest["metadata"] if field == "annotations" else manifest)[field] = {}
    desk.record(manifest)
    assert (desk.stores, desk.reads, desk.failures()) == ([], 0, 0)


def test_a_workflow_of_a_template_is_recorded_once_argo_has_merged_it(store: MemoryStore, desk: Desk) -> None:
    complete = numbered(store, 1)
    spec, parameters = complete["spec"], complete["spec"]["arguments"]
    referring = {"workflowTemplateRef": {"name": "digits"}, "arguments": parameters}
    desk.record({**complete, "spec": referring, "status": {"startedAt": None}})
    assert list(list_runs(store)) == []
    desk.record({**complete, "spec": referring, "status": {**complete["status"], "storedWorkflowTemplateSpec": spec}})
    assert outcome(store, "digits-1") is AttemptEndOutcome.DONE


def test_a_store_out_of_reach_is_tried_again_after_a_pause(store: MemoryStore, desk: Desk) -> None:
    workflow = numbered(store, 1)
    store.refuses = lambda operation, key: True
    with capture_logs() as logs:
        desk.record(workflow)
        desk.record(workflow)
    assert [one["event"] for one in logs] == ["steps.failed"], "the second time is within the pause"
    store.refuses = lambda operation, key: False
    desk.recorder.record_waiting()
    assert outcome(store, "digits-1") is None
    desk.moment += 10
    desk.recorder.record_waiting()
    assert outcome(store, "digits-1") is AttemptEndOutcome.DONE


def test_recorder_that_tries_again_takes_the_newest_state_of_the_workflow(store: MemoryStore, desk: Desk) -> None:
    flow = ArgoWorkflow(store, [bare()])
    flow.start()
    store.refuses = lambda operation, key: True
    with capture_logs():
        desk.record(flow)
    store.refuses = lambda operation, key: False
    flow.finish()
    desk.live["digits-abc"] = flow.manifest
    desk.moment += 10
    desk.recorder.record_waiting()
    assert (outcome(store, "digits"), desk.reads) == (AttemptEndOutcome.DONE, 1)


def test_an_api_server_out_of_reach_holds_up_no_workflow_that_is_known(store: MemoryStore, desk: Desk) -> None:
    identify = desk.recorder.cluster

    def refuse() -> str:
        raise StoreError("the API server does not answer")

    desk.recorder.cluster = refuse
    with capture_logs():
        desk.record(numbered(store, 1))
    assert outcome(store, "digits-1") is None
    desk.recorder.cluster = identify
    desk.record(numbered(store, 2))
    assert outcome(store, "digits-2") is AttemptEndOutcome.DONE
    desk.moment += 10
    desk.recorder.record_waiting()
    assert outcome(store, "digits-1") is AttemptEndOutcome.DONE


def test_a_workflow_that_ended_more_than_an_hour_ago_has_had_its_turn(store: MemoryStore, desk: Desk) -> None:
    workflow = numbered(store, 1)
    workflow["status"] |= {"phase": "Succeeded", "finishedAt": START.isoformat()}
    desk.now = START + timedelta(hours=2)
    desk.note(workflow)
    assert not desk.recorder._waiting
    desk.now = START
    desk.note(workflow)
    desk.now = START + timedelta(hours=2)
    desk.recorder.record_waiting()
    assert (list(store.list("control/")), desk.reads) == ([], 0)
    desk.now = START + timedelta(minutes=59)
    desk.record(workflow)
    assert outcome(store, "digits-1") is AttemptEndOutcome.DONE


@pytest.mark.parametrize("successor", [None, "uid-2"])
def test_a_workflow_that_is_gone_or_replaced_is_not_recorded_from_another(
    store: MemoryStore, desk: Desk, monkeypatch: pytest.MonkeyPatch, successor: str | None
) -> None:
    monkeypatch.setattr(step_recorder, "_MAX_KEPT_DOCUMENTS", 0)
    desk.note(numbered(store, 1))
    if successor is None:
        desk.live.clear()
    else:
        desk.live["digits-1"]["metadata"]["uid"] = successor
    desk.recorder.record_waiting()
    assert (desk.reads, list(list_runs(store)), desk.failures()) == (1, [], 0)


def test_a_workflow_that_is_deleted_is_forgotten(store: MemoryStore, desk: Desk) -> None:
    desk.note(numbered(store, 1))
    desk.recorder.forget("uid-1")
    desk.record(numbered(store, 2))
    desk.recorder.forget("uid-2")
    assert list(list_runs(store)) == ["digits-2"]
    assert not desk.recorder._recorders
    assert not desk.recorder._waiting


def test_a_bounded_number_of_documents_waits(store: MemoryStore, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_recorder, "_MAX_KEPT_DOCUMENTS", 3)
    for _ in range(2):  # the second state of a Workflow takes no more room than the first
        for number in range(5):
            desk.note(numbered(store, number) if f"digits-{number}" not in desk.live else desk.live[f"digits-{number}"])
    assert sum(one.document is not None for one in desk.recorder._waiting.values()) == 3
    desk.recorder.record_waiting()
    assert [outcome(store, f"digits-{number}") for number in range(5)] == [AttemptEndOutcome.DONE] * 5
    assert desk.reads == 2


def test_a_bounded_number_of_recorders_is_kept(store: MemoryStore, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk.recorder, "_recorders", LRUCache(2))
    desk.record(*(numbered(store, number) for number in range(4)))
    assert list(desk.recorder._recorders) == ["uid-2", "uid-3"]


def test_a_namespace_has_at_most_four_threads_and_holds_up_no_other(store: MemoryStore, desk: Desk) -> None:
    released, lock = threading.Event(), threading.Lock()
    active: Counter[str] = Counter()
    most: Counter[str] = Counter()
    answer = desk.recorder.stores

    def stuck(namespace: str) -> Store:
        with lock:
            active[namespace] += 1
            most[namespace] = max(most[namespace], active[namespace])
        if namespace == "ml":
            assert released.wait(60)
        with lock:
            active[namespace] -= 1
        return answer(namespace)

    desk.recorder.stores = stuck
    for number in range(12):
        desk.note(numbered(store, number))
    with desk.running():
        until(lambda: active["ml"] == 4)
        desk.note(numbered(store, 20, "vision"))
        until(lambda: outcome(store, "digits-20") is AttemptEndOutcome.DONE)
        assert (active["ml"], most["ml"]) == (4, 4)
        released.set()
        until(lambda: desk.recorded() == 13)
    assert most == {"ml": 4, "vision": 1}


def test_a_workflow_is_recorded_by_one_thread_at_a_time(store: MemoryStore, desk: Desk) -> None:
    released, entered = threading.Event(), threading.Semaphore(0)
    answer = desk.recorder.stores

    def stuck(namespace: str) -> Store:
        entered.release()
        assert released.wait(60)
        return answer(namespace)

    desk.recorder.stores = stuck
    flow = ArgoWorkflow(store, [bare()])
    flow.start()
    with desk.running():
        desk.note(flow)
        assert entered.acquire(timeout=60)
        flow.finish()
        desk.note(flow)
        assert not entered.acquire(timeout=0.2)
        released.set()
        until(lambda: outcome(store, "digits") is AttemptEndOutcome.DONE)
    assert desk.stores == ["ml"]


@pytest.mark.parametrize("bound", [True, False], ids=["bound", "bare"])
def test_recorders_at_the_same_time_write_one_claim_and_one_end(store: MemoryStore, bound: bool) -> None:
    items = 20
    specs = [ungated(), bare("sweep", fan_out=True)]
    flow = ArgoWorkflow(store, specs, parameters={} if bound else BARE)
    flow.start()
    flow.finish(parameters={"rows": "3"}, artifacts={"data": b"1,2,3"})
    for index in range(items):
        flow.start_item("sweep", index, "same")
        flow.finish(f"sweep({index}:same)")
    desks = [Desk(store), Desk(store)]
    for desk in desks:
        desk.note(flow)
    workers = [threading.Thread(target=desk.recorder.record_waiting) for desk in desks]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert sum(desk.recorded() for desk in desks) == items + 1
    assert [desk.failures() for desk in desks] == [0, 0]
    run = "digits" if bound else "digits-abc"
    assert list(list_runs(store)) == [run]
    attempts = [info.key.removeprefix(RunLayout(run).attempts) for info in store.list(RunLayout(run).attempts)]
    assert len(attempts) == 2 * (items + 1)
    assert {key.partition("/")[2] for key in attempts} == {"000000001.json", "000000001.end.json"}


def test_the_run_of_a_controller_that_took_over_goes_on_where_it_was(store: MemoryStore, desk: Desk) -> None:
    flow = ArgoWorkflow(store, [bare(), bare("check")], parameters=BARE)
    flow.start()
    desk.record(flow)
    flow.finish()
    flow.start("check")
    successor = Desk(store)
    successor.record(flow)
    assert successor.recorded() == 1
    assert find_record(store, RunLayout("digits-abc").attempt("check", 1), AttemptClaim) is not None
    assert find_record(store, RunLayout("digits-abc").attempt("prep", 2), AttemptClaim) is None
