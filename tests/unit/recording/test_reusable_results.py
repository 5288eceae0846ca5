"""Which finished results a step may take over, and in what order they are offered.

| result                                        | offered                             |
|-----------------------------------------------|-------------------------------------|
| done in the run under the same key            | the newest first                    |
| failed, fenced, open, or under another key    | no                                  |
| of an ancestor                                | after those of the run              |
| shared by another run                         | last, if the author shares the step |
| any, of a step that was to run again          | of the run since then               |
| any, with ``cache=False``                     | of the same submission              |
"""

from typing import Any

import pytest
from support.fakes.memory_store import MemoryStore
from support.processes.failpoints import dying_at

from tiphys.lineage.fork_history import AncestorRun
from tiphys.protocol.step_spec import StepKind, StepSpec
from tiphys.recording.reusable_results import (
    ResultSource,
    describe_reuse,
    iter_reusable_results,
    record_reuse,
    write_reuse_projection,
)
from tiphys.records import AttemptClaim, AttemptEnd, AttemptEndOutcome, MemoRecord, ReuseRecord
from tiphys.store import DamagedRecord, RunLayout, claim_record, memo_key, read_record, read_step_attempts

KEY, OTHER = "a" * 64, "b" * 64
RUN = "digits"


def attempt(
    store: MemoryStore, number: int, outcome: str | None = "done", run: str = RUN, key: str = KEY, submission: int = 1
) -> AttemptEnd | None:
    """Record an attempt of ``prep``; None for the outcome leaves it open."""
    fields: dict[str, Any] = {"run": run, "step": "prep", "attempt": number, "submission": submission}
    claim = AttemptClaim(**fields, uid=f"uid-{submission}", node="wf.prep", instance="wf.prep", step_key=key)
    claim_record(store, RunLayout(run).attempt("prep", number), claim)
    if outcome is None:
        return None
    end = AttemptEnd(**fields, outcome=AttemptEndOutcome(outcome), step_key=key)
    claim_record(store, RunLayout(run).attempt_end("prep", number), end)
    return end


def offered(
    store: MemoryStore,
    spec: StepSpec | None = None,
    damaged: list[DamagedRecord] | None = None,
    **source: Any,
) -> list[str]:
    step = spec or StepSpec(name="prep", kind=StepKind.STEP, template="t")
    given = ResultSource(**{"run": RUN, "submission": 5, **source})
    attempts = read_step_attempts(store, RUN, "prep")
    found = iter_reusable_results(store, step, "prep", KEY, attempts, given, damaged if damaged is not None else [])
    return [f"{name} ({end.run} {end.attempt})" for end, name in found]


def spec(**fields: Any) -> StepSpec:
    return StepSpec(name="prep", kind=StepKind.STEP, template="t", **fields)


def share(store: MemoryStore, run: str, number: int = 1) -> None:
    claim_record(store, memo_key(KEY), MemoRecord(run=run, step="prep", attempt=number))


def test_done_results_under_the_same_key_are_offered_the_newest_first(store):
    for number, (outcome, key) in enumerate(
        [("done", KEY), ("failed", KEY), ("done", OTHER), ("done", KEY), ("fenced", KEY), (None, KEY)], 1
    ):
        attempt(store, number, outcome, key=key)
    assert offered(store) == [
        "the result of attempt 4 (digits 4)",
        "the result of attempt 1 (digits 1)",
    ]


def test_results_of_ancestors_follow_those_of_the_run(store):
    for run in (RUN, "parent", "grandparent"):
        attempt(store, 1, run=run)
    ancestors = (AncestorRun("parent", {}), AncestorRun("grandparent", {}), AncestorRun("gone", {}))
    assert offered(store, ancestors=ancestors) == [
        "the result of attempt 1 (digits 1)",
        "the result of attempt 1 of run parent (parent 1)",
        "the result of attempt 1 of run grandparent (grandparent 1)",
    ]


def test_step_that_an_ancestor_ran_again_has_no_older_results(store):
    attempt(store, 1, run="parent", submission=1)
    attempt(store, 2, run="parent", submission=2)
    attempt(store, 1, run="grandparent")
    ancestors = (AncestorRun("parent", {"prep": 2}), AncestorRun("grandparent", {}))
    assert offered(store, ancestors=ancestors) == ["the result of attempt 2 of run parent (parent 2)"]


def test_step_that_was_to_run_again_has_the_results_since_then(store):
    for number in (1, 2, 3):
        attempt(store, number, submission=number)
    attempt(store, 1, run="parent")
    attempt(store, 1, run="another")
    share(store, "another")
    given = {"rerun_since": 2, "ancestors": (AncestorRun("parent", {}),)}
    assert offered(store, spec(share=True), **given) == [
        "the result of attempt 3 (digits 3)",
        "the result of attempt 2 (digits 2)",
    ]


def test_step_without_a_cache_has_the_results_of_the_same_submission(store):
    attempt(store, 1, submission=4)
    attempt(store, 2, submission=5)
    attempt(store, 1, run="parent", submission=9)
    attempt(store, 1, run="another")
    share(store, "another")
    given = {"ancestors": (AncestorRun("parent", {}),)}
    assert offered(store, spec(cache=False, share=True), **given) == ["the result of attempt 2 (digits 2)"]


def test_shared_result_is_last_and_for_steps_that_share(store):
    attempt(store, 1)
    attempt(store, 3, run="another")
    share(store, "another", 3)
    assert offered(store) == ["the result of attempt 1 (digits 1)"]
    assert offered(store, spec(share=True)) == [
        "the result of attempt 1 (digits 1)",
        "the shared result of run another (another 3)",
    ]


def test_shared_result_of_the_run_itself_is_offered_once(store):
    attempt(store, 1)
    share(store, RUN)
    assert offered(store, spec(share=True)) == ["the result of attempt 1 (digits 1)"]


@pytest.mark.parametrize(("outcome", "key"), [(None, KEY), ("failed", KEY), ("fenced", KEY), ("done", OTHER)])
def test_shared_result_that_is_none_is_not_offered(store, outcome, key):
    attempt(store, 1, outcome, run="another", key=key)
    share(store, "another")
    damaged: list[DamagedRecord] = []
    assert offered(store, spec(share=True), damaged) == []
    assert damaged == []


def test_damaged_record_of_another_run_is_named_and_does_not_count(store):
    attempt(store, 1, None, run="parent")
    attempt(store, 2, run="parent")
    attempt(store, 1, None, run="another")
    for run in ("parent", "another"):
        store.create(RunLayout(run).attempt_end("prep", 1), b"{}")
    share(store, "another")
    damaged: list[DamagedRecord] = []
    given = {"ancestors": (AncestorRun("parent", {}),)}
    assert offered(store, spec(share=True), damaged, **given) == ["the result of attempt 2 of run parent (parent 2)"]
    assert sorted(one.key for one in damaged) == [
        RunLayout(run).attempt_end("prep", 1) for run in ("another", "parent")
    ]


def reuse(store: MemoryStore, run: str = RUN, number: int = 3) -> tuple[AttemptEnd, str]:
    end = attempt(store, number, run=run)
    assert end is not None
    return end, RunLayout(RUN).reused(2, "prep")


def test_reuse_of_an_attempt_of_the_run_is_also_a_key(store):
    end, key = reuse(store)
    assert record_reuse(store, RUN, 2, "prep", end).is_ours
    record = read_record(store, key, ReuseRecord)
    assert (record.source_run, record.source_attempt, record.step_key) == (RUN, 3, KEY)
    assert describe_reuse(record) == "adopted from attempt 3"
    assert [info.key for info in store.list(RunLayout(RUN).all_reused)] == [
        RunLayout(RUN).reused_attempt(2, "prep", 3),
        key,
    ]


def test_reuse_of_another_run_has_no_key_of_its_attempt(store):
    end, key = reuse(store, "parent")
    record_reuse(store, RUN, 2, "prep", end)
    assert [info.key for info in store.list(RunLayout(RUN).all_reused)] == [key]
    assert describe_reuse(read_record(store, key, ReuseRecord)) == "adopted from run parent, step prep, attempt 3"


def test_first_reuse_of_a_step_stands(store):
    first, _ = reuse(store)
    second = attempt(store, 4)
    assert second is not None
    record_reuse(store, RUN, 2, "prep", first)
    again = record_reuse(store, RUN, 2, "prep", second)
    assert (again.is_ours, again.record.source_attempt) == (False, 3)
    assert not list(store.list(RunLayout(RUN).reused_attempt(2, "prep", 4)))


@pytest.mark.parametrize("point", ["adopt.before_record", "adopt.after_record", "adopt.after_projection"])
def test_reuse_that_was_cut_off_is_completed_by_the_next_call(store, point):
    end, key = reuse(store)
    with dying_at(point):
        record_reuse(store, RUN, 2, "prep", end)
    stored = record_reuse(store, RUN, 2, "prep", end)
    write_reuse_projection(store, stored.record)
    assert len(list(store.list(RunLayout(RUN).all_reused))) == 2
    assert read_record(store, key, ReuseRecord) == stored.record
