"""Records that are damaged, lie, or were written for another place: a typed error, and nothing is written.

| record | outcome |
|---|---|
| not JSON, cut off, without a field | refused, its key named |
| of another schema version | refused, the version named |
| run.json or a claim of another run or submission | refused, both named |
| run.json whose Workflow was changed | refused before anything is written |
| an end that cannot be read, was changed, or is that of another step | refused; `--force`, `--from` and a fork go on |
| an end that names bytes which it did not write, or that are gone | not done: the step runs |
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from support.builders.compiled_workflows import History, gated, pipeline_of
from support.fakes.memory_store import MemoryStore
from support.fakes.submitter import FakeSubmitter
from tiphys_controller import fork_run, plan_run, resume_run, start_run

from tiphys.errors import IntegrityError, TiphysError, UsageError
from tiphys.records import AttemptEnd, AttemptEndOutcome, Output, OutputKind
from tiphys.store import RunLayout, read_attempt_end, read_events, read_step_attempts

RUN = "digits-1"
LAYOUT = RunLayout(RUN)
PIPELINE = pipeline_of(gated("prep"), gated("fit", depends="prep"))
FIT = LAYOUT.attempt_end("fit", 1)
Damage = Callable[[dict[str, Any]], None]


@pytest.fixture
def store(submitter: FakeSubmitter) -> MemoryStore:
    """A run whose training failed, beside another run."""
    store = MemoryStore()
    for run in (RUN, "other"):
        start_run(store, submitter, PIPELINE, run)
        history = History(store, run)
        history.done("prep", parameters={"n": "5"}, projection=False)
        history.failed("fit")
        submitter.end(run)
    return store


def refused(
    store: MemoryStore,
    submitter: FakeSubmitter,
    kind: type[TiphysError],
    match: str,
    commands: Sequence[Callable[..., object]] = (resume_run, fork_run),
) -> None:
    """Each command meets the error and leaves everything as it is."""
    before = dict(store.objects)
    for go_on in commands:
        with pytest.raises(kind, match=match):
            go_on(store, submitter, RUN)
    assert store.objects == before
    assert submitter.names() == [RUN, "other"]


def edit(store: MemoryStore, key: str, damage: Damage) -> None:
    document = json.loads(store.objects[key])
    damage(document)
    store.objects[key] = json.dumps(document).encode()


@pytest.mark.parametrize("key", [LAYOUT.run_record, LAYOUT.submission(1)])
@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b'{"run": "digits-1"}'])
def test_a_damaged_record_is_refused(store: MemoryStore, submitter: FakeSubmitter, key: str, data: bytes) -> None:
    store.objects[key] = data

    refused(store, submitter, IntegrityError, f"{key} is not a valid ")


@pytest.mark.parametrize("key", [LAYOUT.run_record, LAYOUT.submission(1), LAYOUT.submission_binding(1)])
def test_a_foreign_schema_version_is_named(store: MemoryStore, submitter: FakeSubmitter, key: str) -> None:
    edit(store, key, lambda document: document.update(version=7))

    refused(store, submitter, IntegrityError, f"{key} was written by another version .*schema version 7.* reads 1")


@pytest.mark.parametrize("name", ["run_record", "submission"])
def test_the_record_of_another_run_is_refused(store: MemoryStore, submitter: FakeSubmitter, name: str) -> None:
    arguments = {"run_record": (), "submission": (1,)}[name]
    own, other = (getattr(RunLayout(run), name) for run in (RUN, "other"))
    here, there = (own, other) if name == "run_record" else (own(*arguments), other(*arguments))
    store.objects[here] = store.objects[there]

    refused(store, submitter, IntegrityError, f"{here} holds a record of run other, .* another key")


def test_a_workflow_that_was_changed_since_is_not_submitted(store: MemoryStore, submitter: FakeSubmitter) -> None:
    def hijack(document: dict[str, Any]) -> None:
        [run] = [one for one in document["workflow"]["spec"]["templates"] if one["name"] == "fit-run"]
        run["container"]["image"] = "evil"

    edit(store, LAYOUT.run_record, hijack)

    refused(store, submitter, IntegrityError, r"run\.json of run digits-1 was changed .* digest does not match")


def flip_bit(store: MemoryStore, key: str) -> None:
    data = bytearray(store.objects[key])
    data[data.index(b"1")] ^= 1
    store.objects[key] = bytes(data)


class TestDamagedEnds:
    """The end record of ``fit`` is damaged; its checkpoints and the outputs of ``prep`` are sound."""

    @pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b'{"run": "digits-1"}'])
    def test_a_damaged_end_stops_a_resume(self, store: MemoryStore, submitter: FakeSubmitter, data: bytes) -> None:
        store.objects[FIT] = data

        refused(store, submitter, IntegrityError, f"{FIT} is not a valid .*`tiphys resume --force`", [resume_run])

    def test_a_foreign_schema_version_is_named(self, store: MemoryStore, submitter: FakeSubmitter) -> None:
        edit(store, FIT, lambda document: document.update(version=7))

        refused(store, submitter, IntegrityError, f"{FIT} was written by another version", [resume_run])

    def test_a_changed_end_stops_a_resume(self, store: MemoryStore, submitter: FakeSubmitter) -> None:
        edit(store, FIT, lambda document: document.update(outcome="done"))

        refused(store, submitter, IntegrityError, "its seal does not match", [resume_run])

    def test_the_end_of_another_run_stops_a_resume(self, store: MemoryStore, submitter: FakeSubmitter) -> None:
        store.objects[FIT] = store.objects[RunLayout("other").attempt_end("fit", 1)]

        refused(store, submitter, IntegrityError, f"{FIT} holds a record of run other", [resume_run])

    def test_a_single_damaged_end_is_reported_without_others(
        self, store: MemoryStore, submitter: FakeSubmitter
    ) -> None:
        store.objects[FIT] = b"{"

        with pytest.raises(IntegrityError) as caught:
            resume_run(store, submitter, RUN)

        assert "more in" not in str(caught.value)

    def test_several_are_counted(self, store: MemoryStore, submitter: FakeSubmitter) -> None:
        store.objects[FIT] = store.objects[LAYOUT.attempt_end("prep", 1)] = b"{"

        refused(store, submitter, IntegrityError, f"{FIT} .*1 more in `tiphys verify {RUN}`", [resume_run])

    def test_a_plan_names_it_and_runs_the_step(self, store: MemoryStore) -> None:
        flip_bit(store, FIT)

        prep, fit = plan_run(store, RUN).steps

        assert (prep.decision, fit.decision) == ("skip", "run")
        assert re.match(f"damaged: .*{FIT} is not a valid AttemptEnd: .*`tiphys resume --force`", fit.reason)

    def test_a_done_step_that_another_step_needs_is_not_done(self, store: MemoryStore) -> None:
        key = LAYOUT.attempt_end("prep", 1)
        flip_bit(store, key)

        prep, _ = plan_run(store, RUN).steps

        assert prep.decision == "run"
        assert key in prep.reason

    @pytest.mark.parametrize(
        ("options", "command"),
        [({"force": True}, "`tiphys resume --force`"), ({"rerun": ["fit"]}, "`tiphys resume --from fit`")],
    )
    def test_a_damaged_end_is_passed_over_on_request_and_that_is_recorded(
        self, store: MemoryStore, submitter: FakeSubmitter, options: dict[str, Any], command: str
    ) -> None:
        flip_bit(store, FIT)
        damaged = store.objects[FIT]

        resumed = resume_run(store, submitter, RUN, **options)

        assert (resumed.submission, resumed.plan.running, resumed.passed_over) == (2, ("fit",), (FIT,))
        assert store.objects[FIT] == damaged
        end = read_attempt_end(store, RUN, "fit", 1)
        assert end.outcome is AttemptEndOutcome.FENCED
        assert f"{command} passed it over" in end.message
        [event] = read_events(store, RUN)
        assert event.message.endswith(f"damaged records passed over: {FIT}")
        submitter.end(resumed.workflow_name)
        assert resume_run(store, submitter, RUN).submission == 3

    def test_a_rerun_of_another_step_does_not_pass_it_over(self, store: MemoryStore, submitter: FakeSubmitter) -> None:
        start_run(store, submitter, pipeline_of(gated("left"), gated("right")), "two")
        History(store, "two").done("left")
        History(store, "two").failed("right")
        submitter.end("two")
        flip_bit(store, RunLayout("two").attempt_end("right", 1))

        with pytest.raises(IntegrityError, match="right"):
            resume_run(store, submitter, "two", rerun=["left"])

    def test_a_rerun_of_an_item_passes_over_its_record_and_no_other(
        self, store: MemoryStore, submitter: FakeSubmitter
    ) -> None:
        start_run(store, submitter, pipeline_of(gated("sweep", withItems=["a", "b"])), "two")
        first, second = (item.step for item in plan_run(store, "two").steps[0].items)
        for step in (first, second):
            History(store, "two").failed(step)
        submitter.end("two")
        flip_bit(store, RunLayout("two").attempt_end(second, 1))

        with pytest.raises(IntegrityError, match=second):
            resume_run(store, submitter, "two", rerun=[first])
        resumed = resume_run(store, submitter, "two", rerun=[second])

        assert resumed.passed_over == (RunLayout("two").attempt_end(second, 1),)

    def test_force_passes_over_every_attempt_of_the_step(self, store: MemoryStore, submitter: FakeSubmitter) -> None:
        History(store, RUN).failed("fit", 2)
        flip_bit(store, FIT)

        resumed = resume_run(store, submitter, RUN, force=True)

        assert resumed.passed_over == (FIT,)
        assert [attempt.end is not None for attempt in read_step_attempts(store, RUN, "fit")] == [True, True]

    def test_a_restored_record_counts_again(self, store: MemoryStore, submitter: FakeSubmitter) -> None:
        sound = store.objects[FIT]
        flip_bit(store, FIT)
        resume_run(store, submitter, RUN, force=True)

        store.objects[FIT] = sound

        assert read_attempt_end(store, RUN, "fit", 1).outcome is AttemptEndOutcome.FAILED

    def test_a_fork_goes_on_and_records_it(self, store: MemoryStore, submitter: FakeSubmitter) -> None:
        flip_bit(store, FIT)

        fork_run(store, submitter, RUN, "fork")

        [event] = read_events(store, "fork")
        assert event.name == "record.passed_over"
        assert FIT in event.message
        assert read_events(store, RUN) == []


@pytest.mark.parametrize(
    "where", ["data/runs/other/outputs/prep/000000001/parameters/n", "control/memo/secret", "outputs/n"]
)
def test_a_done_record_that_names_what_it_did_not_write_is_not_done(store: MemoryStore, where: str) -> None:
    output = Output(name="n", kind=OutputKind.ARTIFACT, key=where)
    lie = AttemptEnd(run=RUN, step="fit", attempt=1, submission=1, outcome=AttemptEndOutcome.DONE, outputs=(output,))
    store.objects[FIT] = lie.to_bytes()

    [fit] = [step for step in plan_run(store, RUN).steps if step.name == "fit"]

    assert (fit.decision, fit.reason) == (
        "run",
        f"damaged: its record names {where}, which this attempt did not write",
    )


@pytest.mark.parametrize("name", ["../digits-1", "digits-1/..", "DIGITS", "digits 1", "", "a" * 64])
def test_a_name_that_is_no_place_in_the_store_is_refused(
    store: MemoryStore, submitter: FakeSubmitter, name: str
) -> None:
    before = dict(store.objects)

    for go_on in (resume_run, fork_run):
        with pytest.raises(UsageError, match="run name"):
            go_on(store, submitter, name)

    assert store.objects == before
