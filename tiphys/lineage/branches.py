"""Where a training starts that may come from another run: back through its own checkpoints, then those of its parents.

A fork has a lineage of its own, whose first attempt started from a checkpoint of
another one. Whoever goes back beyond it goes on there.
"""

from collections.abc import Iterable, Iterator, Sequence

from tiphys.lineage.choose import (
    BEGINNING,
    Choice,
    StartsFrom,
    chain,
    choose,
    commits_of,
    fault_of,
    starts_of,
)
from tiphys.lineage.family import Ancestor
from tiphys.lineage.quarantine import quarantine_reason, quarantined
from tiphys.records import CheckpointRef, Skipped
from tiphys.store import Attempt, Store, lineage_of, step_attempts


def going_back(run_store: Store, store: Store, lineage: str, starts_from: StartsFrom) -> Iterator[CheckpointRef]:
    """Like `tiphys.lineage.choose.chain`, and on through the lineages from which this one comes.

    Args:
        run_store: The store that holds the claims of attempts.
        store: The store that holds the checkpoints.
        lineage: Where to begin.
        starts_from: What its attempts started from.
    """
    yield from chain(commits_of(store, lineage), lineage, starts_from)
    if (origin := origin_of(lineage, starts_from)) is not None:
        yield from before(run_store, store, origin)


def before(run_store: Store, store: Store, origin: CheckpointRef) -> Iterator[CheckpointRef]:
    """``origin``, and what it goes back to in turn, in its lineage and those from which that one comes."""
    seen: set[str] = set()
    following: CheckpointRef | None = origin
    while following is not None and following.lineage not in seen:
        lineage = following.lineage
        seen.add(lineage)
        run, _, step = lineage.partition("/")
        theirs = starts_of(step_attempts(run_store, run, step))
        starts = {**theirs, max([*theirs, following.attempt]) + 1: following}
        yield from chain(commits_of(store, lineage), lineage, starts)
        following = origin_of(lineage, starts)


def origin_of(lineage: str, starts_from: StartsFrom) -> CheckpointRef | None:
    """The checkpoint of another lineage that the newest attempt goes back to; None if it began at the beginning."""
    attempt = max(starts_from, default=0)
    while (start := starts_from.get(attempt)) is not None and start.lineage == lineage and start.attempt < attempt:
        attempt = start.attempt
    return start if start is not None and start.lineage != lineage else None


def where_to_start(
    store: Store,
    run: str,
    step: str,
    attempts: Sequence[Attempt],
    *,
    fresh_since: int = 0,
    family: Iterable[Ancestor] = (),
) -> Choice:
    """The newest valid checkpoint that the attempt after ``attempts`` may start from, be it one of a parent.

    Args:
        store: The store that holds claims and checkpoints.
        run: The run.
        step: The step id.
        attempts: Its attempts so far.
        fresh_since: Where the step was asked to run again: the submission whose
            attempts begin at the beginning; 0 for none.
        family: The runs that this one is a fork of, the nearest first.
    """
    lineage = lineage_of(run, step)
    if fresh_since and not any(attempt.claim.submission >= fresh_since for attempt in attempts):
        return BEGINNING
    if attempts:
        own = choose(store, lineage, attempts)
        if own.checkpoint is not None or origin_of(lineage, starts_of(attempts)) is None:
            return own
        return _first_valid(store, going_back(store, store, lineage, starts_of(attempts)))
    return _inherited(store, step, family)


def _inherited(store: Store, step: str, family: Iterable[Ancestor]) -> Choice:
    """What the nearest run starts a fork with that has ever tried the step."""
    for ancestor in family:
        since = ancestor.fresh_since.get(step.partition(".")[0], 0)
        attempts = step_attempts(store, ancestor.run, step)
        if any(attempt.claim.submission >= since for attempt in attempts):
            lineage = lineage_of(ancestor.run, step)
            return _first_valid(store, going_back(store, store, lineage, starts_of(attempts)))
        if since:
            break
    return BEGINNING


def _first_valid(store: Store, refs: Iterable[CheckpointRef]) -> Choice:
    barred: dict[str, set[CheckpointRef]] = {}
    skipped: list[Skipped] = []
    for ref in refs:
        if ref.lineage not in barred:
            barred[ref.lineage] = quarantined(store, ref.lineage)
        fault = quarantine_reason(store, ref) if ref in barred[ref.lineage] else fault_of(store, ref)
        if fault is None:
            return Choice(ref, (ref,), tuple(skipped))
        skipped.append(Skipped(checkpoint=ref, reason=fault))
    return Choice(None, (), tuple(skipped))
