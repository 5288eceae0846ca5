"""Finds the finished results that a step may take over: of its run, of the runs it was forked from, or shared ones.

A result counts if its end record says done under the same step key. Whether its outputs are intact is for the caller
to see, because that can take long.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tiphys.errors import IntegrityError, ObjectExistsError
from tiphys.faults import failpoint
from tiphys.lineage.fork_history import AncestorRun, find_rerun_submission
from tiphys.protocol.step_spec import StepSpec
from tiphys.records import AttemptEnd, AttemptEndOutcome, MemoRecord, ReuseRecord, task_name
from tiphys.store import (
    Attempt,
    ClaimResult,
    DamagedRecord,
    RunLayout,
    Store,
    claim_record,
    find_attempt_end,
    find_record,
    memo_key,
    read_step_attempts,
)


class ResultSource(NamedTuple):
    """Where results of a step may come from."""

    run: str
    submission: int
    """The submission that would take over a result."""
    rerun_since: int = 0
    """First submission whose results count, because the step was to run again; 0 for all."""
    ancestors: tuple[AncestorRun, ...] = ()
    """The runs it was forked from, the nearest first."""


def iter_reusable_results(
    store: Store,
    spec: StepSpec,
    step: str,
    key: str,
    attempts: Sequence[Attempt],
    source: ResultSource,
    damaged: list[DamagedRecord],
) -> Iterator[tuple[AttemptEnd, str]]:
    """Each result that may be taken over, with its name in messages, the newest of the run first.

    A damaged record of another run is added to ``damaged``, and its result does not count.
    """
    # cache=False means: run once in every submission.
    own_since = source.rerun_since if spec.cache else source.submission
    for end in _done_attempts(attempts, key, own_since):
        yield end, f"the result of attempt {end.attempt}"
    if source.rerun_since or not spec.cache:
        return
    for ancestor in source.ancestors:
        since = find_rerun_submission(ancestor.rerun_since, step)
        for end in _done_attempts(read_step_attempts(store, ancestor.run, step, damaged), key, since):
            yield end, f"the result of attempt {end.attempt} of run {end.run}"
        if since:
            break
    if spec.share and (shared := _find_shared_result(store, key, source.run, damaged)) is not None:
        yield shared, f"the shared result of run {shared.run}"


def record_reuse(store: Store, run: str, submission: int, step: str, end: AttemptEnd) -> ClaimResult[ReuseRecord]:
    """Record that a submission takes over ``end`` for a step; the record that holds may be another's.

    An attempt of the same step is also named by a key alone, so that a plan of thousands of steps lists keys and reads
    no records.
    """
    layout = RunLayout(run)
    record = ReuseRecord(
        run=run,
        submission=submission,
        step=step,
        step_key=end.step_key,
        source_run=end.run,
        source_step=end.step,
        source_attempt=end.attempt,
    )
    failpoint("adopt.before_record")
    stored = claim_record(store, layout.reused(submission, step), record)
    failpoint("adopt.after_record")
    write_reuse_projection(store, stored.record)
    return stored


def write_reuse_projection(store: Store, record: ReuseRecord) -> None:
    """Write the key that names the reused attempt, if it is one of the same step and the key is missing."""
    if (record.source_run, record.source_step) == (record.run, record.step):
        key = RunLayout(record.run).reused_attempt(record.submission, record.step, record.source_attempt)
        with contextlib.suppress(ObjectExistsError):
            store.create(key, b"")
        failpoint("adopt.after_projection")


def describe_reuse(record: ReuseRecord) -> str:
    if record.source_run == record.run:
        return f"adopted from attempt {record.source_attempt}"
    step = task_name(record.source_step)
    return f"adopted from run {record.source_run}, step {step}, attempt {record.source_attempt}"


def _done_attempts(attempts: Sequence[Attempt], key: str, since: int) -> Iterator[AttemptEnd]:
    for _, end in reversed(attempts):
        if (
            end is not None
            and end.outcome is AttemptEndOutcome.DONE
            and end.step_key == key
            and end.submission >= since
        ):
            yield end


def _find_shared_result(store: Store, key: str, run: str, damaged: list[DamagedRecord]) -> AttemptEnd | None:
    memo = find_record(store, memo_key(key), MemoRecord)
    if memo is None or memo.run == run:
        return None
    try:
        end = find_attempt_end(store, memo.run, memo.step, memo.attempt)
    except IntegrityError as error:
        damaged.append(DamagedRecord(RunLayout(memo.run).attempt_end(memo.step, memo.attempt), str(error)))
        return None
    return end if end is not None and end.outcome is AttemptEndOutcome.DONE and end.step_key == key else None
