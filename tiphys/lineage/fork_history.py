"""Where a training starts that may come from another run: back through its own checkpoints, then those of its parents.

A fork has a lineage of its own, whose first attempt started from a checkpoint of
another one. Whoever goes back beyond it goes on there.

The runs that a fork comes from, and which of their results still count.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tiphys.errors import NotFoundError
from tiphys.lineage.quarantine import quarantine_reason, quarantined
from tiphys.lineage.select import BEGINNING, Choice, StartsFrom, chain, choose, commits_of, fault_of, starts_of
from tiphys.records import CheckpointRef, RunRecord, Skipped
from tiphys.store import Attempt, Store, last_claim, lineage_of, read_run, step_attempts


class Ancestor(NamedTuple):
    """A run that another one is a fork of, or a fork of a fork.

    ``fresh_since`` says by step from which submission of it on its results
    count; such a step was to be made anew there, so no older run has it.
    """

    run: str
    fresh_since: Mapping[str, int]


def ancestors(store: Store, record: RunRecord) -> tuple[Ancestor, ...]:
    """The runs that ``record`` comes from, the nearest first, as far as they are still there.

    Costs two reads and a listing for each.

    Raises:
        IntegrityError: one of their records is damaged.
    """
    found: list[Ancestor] = []
    while record.parent and record.parent not in [one.run for one in found]:
        try:
            record = read_run(store, record.parent)
        except NotFoundError:
            break
        found.append(Ancestor(record.run, _fresh_since(store, record)))
    return tuple(found)


def _fresh_since(store: Store, record: RunRecord) -> Mapping[str, int]:
    last = last_claim(store, record.run)
    return last.fresh_since if last else dict.fromkeys(record.fresh, 1)


def going_back(run_store: Store, store: Store, lineage: str, starts_from: StartsFrom) -> Iterator[CheckpointRef]:
    """Like `tiphys.lineage.select.chain`, and on through the lineages from which this one comes.

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
