"""Start checkpoints of forks: candidates from the fork's own lineage, then from the lineages of its ancestors.

A fork has its own lineage. Its first attempt started from a checkpoint of
another lineage, so an attempt that finds no valid checkpoint in its own lineage
continues the search there. The module also reads the ancestors of a fork and
which of their results still count.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tiphys.errors import NotFoundError
from tiphys.lineage.select import (
    START_FROM_BEGINNING,
    CheckpointChoice,
    StartCheckpoints,
    choose_checkpoint,
    choose_first_valid,
    iter_candidates,
    iter_commits,
    starts_from_claims,
)
from tiphys.records import CheckpointRef, RunRecord, task_name
from tiphys.store import Attempt, Store, lineage_name, read_last_claim, read_run, read_step_attempts


class AncestorRun(NamedTuple):
    """A direct or indirect parent of a fork.

    ``rerun_since`` holds, by step or by item of a fan-out, the first submission of this run whose results
    count. Such a step was run again there, so results of older runs do not count.
    """

    run: str
    rerun_since: Mapping[str, int]


def find_rerun_submission(rerun_since: Mapping[str, int], step: str) -> int:
    """First submission whose results of ``step`` count, by its own entry or by that of its fan-out; 0 for all."""
    return max(rerun_since.get(step, 0), rerun_since.get(task_name(step), 0))


def read_ancestors(store: Store, record: RunRecord) -> tuple[AncestorRun, ...]:
    """The ancestors of a run, the nearest first, up to the first that no longer exists.

    Costs two reads and a listing for each ancestor.

    Raises:
        IntegrityError: a record of an ancestor is damaged.
    """
    ancestors: list[AncestorRun] = []
    while record.parent and record.parent not in [ancestor.run for ancestor in ancestors]:
        try:
            record = read_run(store, record.parent)
        except NotFoundError:
            break
        ancestors.append(AncestorRun(record.run, (read_last_claim(store, record.run) or record).rerun_since))
    return tuple(ancestors)


def iter_start_candidates(
    run_store: Store, store: Store, lineage: str, starts_from: StartCheckpoints
) -> Iterator[CheckpointRef]:
    """Candidates of a lineage as by `tiphys.lineage.select.order_candidates`, then those of its ancestors."""
    yield from iter_candidates(iter_commits(store, lineage), lineage, starts_from)
    if (origin := find_fork_origin(lineage, starts_from)) is not None:
        yield from iter_fork_history(run_store, store, origin)


def iter_fork_history(run_store: Store, store: Store, origin: CheckpointRef) -> Iterator[CheckpointRef]:
    """``origin`` and its older candidates, in its lineage and in the lineages of its ancestors."""
    visited: set[str] = set()
    current: CheckpointRef | None = origin
    while current is not None and current.lineage not in visited:
        lineage = current.lineage
        visited.add(lineage)
        run, _, step = lineage.partition("/")
        ancestor_starts = starts_from_claims(read_step_attempts(run_store, run, step, []))
        # As if a further attempt of the ancestor had started from this checkpoint.
        starts = {**ancestor_starts, max([*ancestor_starts, current.attempt]) + 1: current}
        yield from iter_candidates(iter_commits(store, lineage), lineage, starts)
        current = find_fork_origin(lineage, starts)


def find_fork_origin(lineage: str, starts_from: StartCheckpoints) -> CheckpointRef | None:
    """The checkpoint of another lineage from which the newest attempt derives; None if there is none."""
    attempt = max(starts_from, default=0)
    while (start := starts_from.get(attempt)) is not None and start.lineage == lineage and start.attempt < attempt:
        attempt = start.attempt
    return start if start is not None and start.lineage != lineage else None


def choose_start_checkpoint(
    store: Store,
    run: str,
    step: str,
    attempts: Sequence[Attempt],
    *,
    rerun_since: int = 0,
    ancestors: Iterable[AncestorRun] = (),
) -> CheckpointChoice:
    """The newest valid checkpoint for the start of the next attempt, possibly one of an ancestor.

    ``rerun_since`` is the submission that runs the step again from the beginning, 0 for none. The nearest of
    ``ancestors`` is the first.
    """
    lineage = lineage_name(run, step)
    if rerun_since and not any(attempt.claim.submission >= rerun_since for attempt in attempts):
        return START_FROM_BEGINNING
    if attempts:
        own = choose_checkpoint(store, lineage, attempts)
        if own.checkpoint is not None or find_fork_origin(lineage, starts_from_claims(attempts)) is None:
            return own
        return choose_first_valid(store, iter_start_candidates(store, store, lineage, starts_from_claims(attempts)))
    return _choose_inherited_checkpoint(store, step, ancestors)


def _choose_inherited_checkpoint(store: Store, step: str, ancestors: Iterable[AncestorRun]) -> CheckpointChoice:
    """The start checkpoint from the nearest ancestor that has attempts of the step."""
    for ancestor in ancestors:
        since = find_rerun_submission(ancestor.rerun_since, step)
        attempts = read_step_attempts(store, ancestor.run, step, [])
        if any(attempt.claim.submission >= since for attempt in attempts):
            lineage = lineage_name(ancestor.run, step)
            return choose_first_valid(store, iter_start_candidates(store, store, lineage, starts_from_claims(attempts)))
        if since:
            break
    return START_FROM_BEGINNING
