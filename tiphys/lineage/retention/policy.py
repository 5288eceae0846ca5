"""The retention rule of training programs and `tiphys gc`, and pins.

Only valid checkpoints count towards the number to keep, because a rule that
counts damaged ones deletes the last valid one. A referenced checkpoint is kept,
valid or not. `evaluate_retention` is pure.

A pin keeps a checkpoint, such as a release or a baseline. A fork pins its start
checkpoint in the parent's lineage, so that retention need not read the claims of
other runs.
"""

import contextlib
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from tiphys.errors import ConflictError, NotFoundError, ObjectExistsError, UsageError
from tiphys.protocol.step_spec import BestCheckpoints, RetentionPolicy
from tiphys.records import CheckpointRef, PinRecord
from tiphys.store import LineageLayout, Store
from tiphys.store.layout import PIN_NAME

Metrics = Mapping[str, float]


class LineageSnapshot(NamedTuple):
    """The checkpoints of one lineage, as read from storage."""

    commits: Collection[CheckpointRef]
    """All checkpoints with a manifest, including late and quarantined ones."""
    usable: Sequence[CheckpointRef]
    """Candidates for the start of the next attempt, best first, without quarantined ones."""
    valid: Mapping[CheckpointRef, Metrics]
    """The valid ones of ``usable``, with their metrics."""
    protected: Mapping[CheckpointRef, Sequence[str]]
    """Checkpoints that stay regardless of the policy, with the reasons."""


class RetentionVerdict(NamedTuple):
    """A division of all commits: ``kept`` with the reasons, and ``expired``, the oldest first."""

    kept: Mapping[CheckpointRef, tuple[str, ...]]
    expired: tuple[CheckpointRef, ...]


def evaluate_retention(keep: RetentionPolicy | None, snapshot: LineageSnapshot) -> RetentionVerdict:
    """Divide the commits of ``snapshot`` into kept and expired ones. Pure.

    Only checkpoints older than the ``keep.last`` newest valid ones expire, and
    none while there are fewer valid ones. This applies to late and damaged
    checkpoints, too.
    """
    reasons: dict[CheckpointRef, list[str]] = {ref: list(snapshot.protected.get(ref, ())) for ref in snapshot.commits}
    for ref, reason in _kept_by_policy(keep, snapshot):
        if ref in reasons:
            reasons[ref].append(reason)
    expired = sorted((ref for ref in _select_expirable(keep, snapshot) if not reasons[ref]), key=age_key)
    gone = set(expired)
    kept = {ref: tuple(why) or (_default_reason(keep),) for ref, why in reasons.items() if ref not in gone}
    return RetentionVerdict(kept, tuple(expired))


def select_newest_valid(keep: RetentionPolicy, snapshot: LineageSnapshot) -> list[CheckpointRef]:
    """The newest valid checkpoints, at most ``keep.last``."""
    return [ref for ref in snapshot.usable if ref in snapshot.valid][: keep.last]


def age_key(ref: CheckpointRef) -> tuple[int, int]:
    """Sort key that orders checkpoints by age, the oldest first, without clocks."""
    return ref.attempt, ref.global_step


def _select_expirable(keep: RetentionPolicy | None, snapshot: LineageSnapshot) -> list[CheckpointRef]:
    """Commits older than all of the newest valid ones; none while there are fewer than ``keep.last`` of these."""
    if keep is None or len(recent := select_newest_valid(keep, snapshot)) < keep.last:
        return []
    oldest = min(map(age_key, recent))
    return [ref for ref in snapshot.commits if age_key(ref) < oldest]


def _kept_by_policy(keep: RetentionPolicy | None, snapshot: LineageSnapshot) -> Iterator[tuple[CheckpointRef, str]]:
    if keep is None:
        return
    valid = [ref for ref in snapshot.usable if ref in snapshot.valid]
    yield from ((ref, f"newest {keep.last}") for ref in select_newest_valid(keep, snapshot))
    if keep.every_steps:
        yield from ((ref, f"every {keep.every_steps:,} steps") for ref in _select_anchors(keep.every_steps, valid))
    if keep.best:
        yield from ((ref, f"best {keep.best.metric}") for ref in _select_best(keep.best, valid, snapshot.valid))


def _select_anchors(every_steps: int, valid: Sequence[CheckpointRef]) -> Iterator[CheckpointRef]:
    """The first checkpoint at or after each multiple of ``every_steps``; later commits do not change the choice."""
    first: dict[int, CheckpointRef] = {}
    for ref in sorted(valid, key=lambda ref: (ref.global_step, ref.attempt)):
        first.setdefault(ref.global_step // every_steps, ref)
    first.pop(0, None)
    yield from first.values()


def _select_best(
    best: BestCheckpoints, valid: Sequence[CheckpointRef], metrics: Mapping[CheckpointRef, Metrics]
) -> list[CheckpointRef]:
    """The best checkpoints; of equal ones the newer, and none without a finite value of the metric."""
    sign = 1 if best.order == "min" else -1
    scores = {ref: metrics[ref].get(best.metric, math.nan) for ref in valid}
    finite = [ref for ref in valid if math.isfinite(scores[ref])]
    return sorted(finite, key=lambda ref: sign * scores[ref])[: best.count]


def _default_reason(keep: RetentionPolicy | None) -> str:
    return "all are kept" if keep is None else f"not older than the newest {keep.last} valid"


def pin_checkpoint(store: Store, ref: CheckpointRef, name: str, by: str = "") -> None:
    """Keep ``ref`` until `unpin_checkpoint`; no change if this pin exists.

    Costs a write and two listings. A deleting process writes its announcement
    before it reads the pins, so at least one of the two processes detects the
    other.

    Raises:
        UsageError: ``name`` is not valid.
        NotFoundError: the checkpoint does not exist; the pin is removed again.
        ConflictError: a process is about to delete the checkpoint; the pin may be too late.
    """
    if not re.fullmatch(PIN_NAME, name):
        raise UsageError(f"pin {name!r} is not valid: use letters, digits, '-', '_' and '.', at most 100")
    layout = LineageLayout(ref.lineage)
    key = layout.pin(ref.attempt, ref.global_step, name)
    with contextlib.suppress(ObjectExistsError):
        store.create(key, PinRecord(checkpoint=ref, name=name, by=by).to_bytes())
    announced = [info.key for info in store.list(layout.tombstones(ref.attempt, ref.global_step))]
    if not _is_committed(store, ref):
        store.delete(key)
        raise NotFoundError(
            f"{store.url}: lineage {ref.lineage} has no checkpoint {ref}; `tiphys lineage` shows those it has"
        )
    if any(parsed and parsed[1] for parsed in map(layout.parse_tombstone, announced)):
        raise ConflictError(
            f"{store.url}: another process was about to delete checkpoint {ref} of {ref.lineage} when it was pinned; "
            "the pin counts if `tiphys gc --dry-run` still shows the checkpoint, and is removed with it otherwise"
        )


def unpin_checkpoint(store: Store, ref: CheckpointRef, name: str) -> None:
    """Remove a pin, so that only the policy decides about the checkpoint.

    Raises:
        NotFoundError: the checkpoint has no such pin; the message names those it has.
    """
    names = list_pins(store, ref.lineage).get(ref, ())
    if name not in names:
        hint = f"its pins are: {', '.join(names)}" if names else "it has none"
        raise NotFoundError(f"checkpoint {ref} of {ref.lineage} has no pin {name!r}; {hint}")
    store.delete(LineageLayout(ref.lineage).pin(ref.attempt, ref.global_step, name))


def list_pins(store: Store, lineage: str) -> Mapping[CheckpointRef, tuple[str, ...]]:
    """Names of the pins of each pinned checkpoint; costs one listing."""
    layout = LineageLayout(lineage)
    pins: dict[CheckpointRef, tuple[str, ...]] = {}
    for info in store.list(layout.all_pins):
        if (parsed := layout.parse_pin(info.key)) is not None:
            ref, name = parsed
            pins[ref] = (*pins.get(ref, ()), name)
    return pins


def _is_committed(store: Store, ref: CheckpointRef) -> bool:
    return any(store.list(LineageLayout(ref.lineage).manifest(ref.attempt, ref.global_step)))
