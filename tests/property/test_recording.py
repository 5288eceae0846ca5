"""However the nodes of a Workflow change, and wherever recorders die: each ended node has one claim and one end.

The model is a list of tasks with a fate for each of their instances. Two recorders, as those of the controller and of
the plugin, look at the nodes whenever they like. Each may die at any write, and a new one takes its place. In the end
the records are those of a recorder that has seen everything at once.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fakes.argo_workflow import RUN, ArgoWorkflow, attempt_keys, ungated
from support.fakes.memory_store import MemoryStore

from hera_pipelines.local.nodes import item_name
from tiphys import faults
from tiphys.lineage.run_history import RunHistory
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.step_spec import StepSpec
from tiphys.protocol.workflow_nodes import find_step_nodes
from tiphys.recording import WorkflowRecorder, recorder
from tiphys.recording.step_key import StepInputs, compute_step_key
from tiphys.records import AttemptClaim, AttemptEnd, Cause, MemoRecord
from tiphys.store import RunLayout, find_output_fault, find_record, list_outputs, memo_key
from tiphys.store.workflow_layout import output_origins

POINTS = (
    "record.before_claim",
    "record.after_claim",
    "record.before_end",
    "record.after_end",
    "conclude.after_projection",
)
OUTCOMES = {"done": "done", "failed": "failed", "stopped": "fenced", "missing": "failed", "unmade": "failed"}
"""Of an attempt, by the fate of its node; a skipped node has none."""


class Task(NamedTuple):
    """A task of the entry DAG."""

    needs: frozenset[int]
    items: tuple[str, ...] | None
    fates: tuple[str, ...]
    tries: int
    """Tries that fail before the last; 0 for a node without a retryStrategy."""
    has_artifact: bool


@st.composite
def task_lists(draw: st.DrawFn) -> list[Task]:
    tasks: list[Task] = []
    for number in range(draw(st.integers(1, 5))):
        items = draw(st.one_of(st.none(), st.lists(st.sampled_from("ab"), min_size=1, max_size=3).map(tuple)))
        count = 1 if items is None else len(items)
        fates = st.sampled_from(["done", "done", *OUTCOMES, "skipped"])
        tasks.append(
            Task(
                draw(st.frozensets(st.integers(0, number - 1), max_size=2)) if number else frozenset(),
                items,
                tuple(draw(st.lists(fates, min_size=count, max_size=count))),
                draw(st.integers(0, 2)),
                draw(st.booleans()),
            )
        )
    return tasks


class Look(NamedTuple):
    """A node changes, and then a recorder looks at all; with a point it dies there."""

    change: int
    recorder: int | None
    point: str
    passage: int


looks = st.builds(
    Look,
    st.integers(0, 20),
    st.sampled_from([None, 0, 0, 1]),
    st.sampled_from(("", *POINTS)),
    st.integers(1, 3),
)


def spec_of(number: int, task: Task) -> StepSpec:
    artifacts = ("data",) if task.has_artifact else ()
    return ungated(f"t{number}", parameters=(), artifacts=artifacts, fan_out=task.items is not None, share=True)


@dataclass
class Model:
    """A Workflow that goes through its tasks, and the recorders that look at it."""

    tasks: list[Task]
    flow: ArgoWorkflow
    recorders: dict[int, WorkflowRecorder] = field(default_factory=dict)
    lives: dict[str, Iterator[None]] = field(default_factory=dict)
    """What is still to happen to each instance, by its place."""
    fates: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, tuple[int, StepInputs]] = field(default_factory=dict)
    """Task and inputs of each instance that has started."""

    @classmethod
    def of(cls, tasks: list[Task], flow: ArgoWorkflow | None = None) -> "Model":
        specs = [spec_of(number, task) for number, task in enumerate(tasks)]
        ended = "({0}.Succeeded || {0}.Failed || {0}.Skipped || {0}.Errored)"
        depends = {
            f"t{number}": " && ".join(ended.format(f"t{before}") for before in sorted(task.needs))
            for number, task in enumerate(tasks)
            if task.needs
        }
        model = cls(tasks, flow or ArgoWorkflow(MemoryStore(), specs, depends))
        for number, task in enumerate(tasks):
            for index, fate in enumerate(task.fates):
                place = f"t{number}" if task.items is None else item_name(f"t{number}", index, task.items[index])
                item = "" if task.items is None else task.items[index]
                model.fates[place] = fate
                model.lives[place] = model._live(place, number, fate, item)
        return model

    def _live(self, place: str, number: int, fate: str, item: str) -> Iterator[None]:
        task, flow = self.tasks[number], self.flow
        if fate == "skipped":
            flow.write(place, "Skipped", "Skipped", message="when 'false' evaluated false")
            return
        artifacts = [self._taken(before) for before in sorted(task.needs) if self._has_result(before)]
        self.inputs[place] = number, StepInputs({}, artifacts, item)
        given = item if task.items is not None else None
        for attempt in range(task.tries):
            flow.start(place, attempt, item=given, artifacts=artifacts)
            yield
            flow.fail(f"{place}({attempt})", "pod deleted", phase="Error")
            yield
        pod = flow.start(place, task.tries or None, item=given, artifacts=artifacts)
        yield
        match fate:
            case "done":
                flow.finish(pod, artifacts={"data": self._data(number)} if task.has_artifact else {})
            case "missing":
                key = f"{flow.folder(pod)}data"
                flow.succeed(pod, {"artifacts": [{"name": "data", "s3": {"key": key}}]} if task.has_artifact else {})
            case "failed":
                flow.fail(pod, exit_code=1, retry_message="No more retries left")
            case "stopped":
                flow.fail(pod, "workflow shutdown with strategy:  Stop", retry_message="Stopped with strategy 'Stop'")
            case "unmade":
                flow.fail(pod, "pods is forbidden: exceeded quota", phase="Error", retry_message="")

    def _data(self, number: int) -> bytes:
        return b"%d" % number

    def _has_result(self, number: int) -> bool:
        """Whether a task has one artifact that another can take."""
        task = self.tasks[number]
        return task.items is None and task.has_artifact and task.fates == ("done",)

    def _taken(self, number: int) -> Manifest:
        pod = f"t{number}({self.tasks[number].tries})" if self.tasks[number].tries else f"t{number}"
        return {"name": f"from-t{number}", "s3": {"key": f"{self.flow.folder(pod)}data"}}

    def change(self, choice: int) -> bool:
        """Let something happen to a node whose task may run; False if all is over."""
        running = {place.partition("(")[0] for place in self.lives}
        ready = [
            place
            for place in self.lives
            if not {f"t{before}" for before in self.tasks[int(place.partition("(")[0][1:])].needs} & running
        ]
        if not ready:
            return False
        place = ready[choice % len(ready)]
        if next(self.lives[place], "over") == "over":
            del self.lives[place]
        return True

    def look(self, look: Look) -> None:
        if look.recorder is None:
            return
        if look.recorder not in self.recorders:
            self.recorders[look.recorder] = self.flow.recorder()
        plan = f"{look.point}=raise@{look.passage}" if look.point else ""
        with patch.dict(os.environ, {"TIPHYS_FAILPOINTS": plan}), patch.object(faults, "_calls", Counter()):
            try:
                recorded = self.flow.record(self.recorders[look.recorder])
                assert (recorded.faults, recorded.waiting) == ({}, ())
            except faults.InjectedFaultError:
                del self.recorders[look.recorder]

    def finish(self) -> None:
        """All nodes end, and a recorder looks once more."""
        while self.change(0):
            pass
        self.look(Look(0, 2, "", 1))

    def instance(self, place: str) -> str:
        return f"{self.flow.name}.{place}"


def check(model: Model) -> None:
    """The records are one claim and one end for each node that has started, and say what the nodes say."""
    store = model.flow.store
    attempts = RunHistory(store, RUN).attempts
    assert all(len(of_step) == 1 for of_step in attempts.values())
    records = {claim.instance: (claim, end) for ((claim, end),) in attempts.values()}
    assert len(attempt_keys(store)) == 2 * len(records)
    started = {place for place, fate in model.fates.items() if fate != "skipped"}
    assert records.keys() == {model.instance(place) for place in started}
    for place in started:
        claim, end = records[model.instance(place)]
        assert end is not None, place
        check_agreement(model, place, claim, end)
    listed = len(list(store.list(RunLayout(RUN).done_markers)))
    assert listed == sum(end is not None and end.outcome == "done" for _, end in records.values())
    before = dict(store.objects)
    recorded = model.flow.record()
    assert store.objects == before
    assert {end.step: end.outcome for end in recorded.ends.values()} == {
        claim.step: end.outcome for claim, end in records.values() if end is not None
    }


def check_agreement(model: Model, place: str, claim: AttemptClaim, end: AttemptEnd) -> None:
    """Claim and end of an instance agree with its node and with each other."""
    store, fate = model.flow.store, model.fates[place]
    number, inputs = model.inputs[place]
    task, spec = model.tasks[number], spec_of(number, model.tasks[number])
    is_missing = fate == "missing" and task.has_artifact
    expected = "done" if fate == "missing" and not is_missing else OUTCOMES[fate]
    assert end.outcome.value == expected, place
    assert end.stopped is (fate == "stopped")
    assert (end.cause is Cause.OUTPUT_MISSING) is is_missing
    node = model.flow.nodes[model.instance(place)]
    finished = datetime.fromisoformat(node["finishedAt"])
    assert end.ended_at == finished + timedelta(milliseconds=999), "Argo cuts off the fraction of a second"
    # The artifacts that it takes are known by their hashes, although no recorder had to see them first.
    assert claim.step_key == end.step_key == compute_step_key(store, spec, inputs).key
    for artifact in inputs.artifacts:
        assert artifact["s3"]["key"] not in str(claim), "a place"
    if expected == "done":
        assert [one.sha256 for output in end.outputs for one in output.objects] == (
            [hashlib.sha256(model._data(number)).hexdigest()] if task.has_artifact else []
        )
        assert find_output_fault(end, list_outputs(store, end)) is None
        assert find_record(store, memo_key(end.step_key), MemoRecord) is not None
    pod = f"{place}({task.tries})" if task.tries else place
    origins = [info.key.split("/", 4)[4] for info in store.list(output_origins(model.flow.uid, model.flow.pod(pod)))]
    is_result = expected == "done" and task.has_artifact
    assert origins == ([f"{RUN}/{claim.step}/{claim.attempt:09d}"] if is_result else [])


def tell(tasks: list[Task], history: list[Look]) -> Model:
    model = Model.of(tasks)
    for look in history:
        model.change(look.change)
        model.look(look)
    model.finish()
    return model


@given(tasks=task_lists(), history=st.lists(looks, max_size=25))
@settings(max_examples=120)
def test_a_node_has_one_claim_and_one_end_wherever_recorders_die(tasks: list[Task], history: list[Look]) -> None:
    check(tell(tasks, history))


@given(tasks=task_lists())
@settings(max_examples=30)
def test_workflow_that_is_seen_when_it_is_over_has_the_same_records(tasks: list[Task]) -> None:
    check(tell(tasks, []))


@given(tasks=task_lists(), history=st.lists(looks, max_size=25), resumed_at=st.integers(0, 25))
@settings(max_examples=80)
def test_later_submission_has_the_last_attempt_of_each_step_that_it_starts(
    tasks: list[Task], history: list[Look], resumed_at: int
) -> None:
    """The first Workflow goes on beside it, as one in a cluster that cannot be reached."""
    first = Model.of(tasks)
    first.flow.bind()
    models = [first]
    for position, look in enumerate(history):
        if position == resumed_at:
            models.append(Model.of(tasks, first.flow.resumed()))
            models[-1].look(Look(0, 0, "", 1))
        model = models[look.change % len(models)]
        model.change(look.change)
        model.look(look)
    for model in models:
        model.finish()
    last = models[-1]
    for step, attempts in RunHistory(last.flow.store, RUN).attempts.items():
        claims = [claim for claim, _ in attempts]
        assert [claim.attempt for claim in claims] == list(range(1, len(claims) + 1))
        submissions = [claim.submission for claim in claims]
        assert submissions == sorted(set(submissions)), step
        assert all(end is not None for _, end in attempts), step
        fate = last.fates[claims[-1].instance.removeprefix(f"{last.flow.name}.")] if len(models) == 2 else ""
        if fate:
            assert claims[-1].uid == last.flow.uid, step
    instances = {
        claim.instance for of_step in RunHistory(last.flow.store, RUN).attempts.values() for claim, _ in of_step
    }
    assert {last.instance(place) for place, fate in last.fates.items() if fate != "skipped"} <= instances


def is_noticed() -> bool:
    """Whether the check fails for a story with all that it looks at."""
    tasks = [
        Task(frozenset(), None, ("done",), 1, True),
        Task(frozenset({0}), None, ("done",), 0, False),
        Task(frozenset({1}), ("a", "a"), ("failed", "missing"), 0, True),
    ]
    history = [Look(0, number % 2, point, 1) for number, point in enumerate(POINTS * 3)]
    with suppress(AssertionError):
        check(tell(tasks, history))
        check(tell(tasks, []))
        return False
    return True


def test_story_of_the_planted_bugs_is_right_without_them() -> None:
    assert not is_noticed()


def claim_of_each_recorder(build: Callable[..., AttemptClaim]) -> Callable[..., AttemptClaim]:
    """Claims that no other recorder knows as those of the same Workflow."""

    def build_claim(recorder: WorkflowRecorder, *inputs: object) -> AttemptClaim:
        return build(recorder, *inputs).model_copy(update={"uid": f"uid-{id(recorder)}"})

    return build_claim


@pytest.mark.parametrize(
    ("owner", "name", "bug"),
    [
        (WorkflowRecorder, "_in_order", lambda _, nodes: iter([list(reversed(nodes))])),
        (WorkflowRecorder, "_in_order", lambda _, nodes: iter([[node] for node in reversed(nodes)])),
        (WorkflowRecorder, "_in_order", lambda _, nodes: iter([])),
        (WorkflowRecorder, "_build_claim", claim_of_each_recorder(WorkflowRecorder._build_claim)),
        (recorder, "write_output_origin", lambda *_: None),
        (recorder, "write_derived_records", lambda *_: None),
        (recorder, "find_step_nodes", lambda *given: list(find_step_nodes(*given))[1:]),
    ],
    ids=["all-at-once", "backwards", "nothing", "foreign", "no-origin", "nothing-derived", "no-first-node"],
)
def test_planted_bug_is_noticed(owner: object, name: str, bug: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, bug)
    assert is_noticed()
