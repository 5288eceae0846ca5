"""Which checkpoints of a lineage stay, and why: the one rule of trainer and command.

A checkpoint counts as kept only if it is valid, since a rule that counts
damaged ones deletes the last good one. Whatever else refers to a checkpoint
holds it, valid or not. Pure.

Checkpoints that somebody wants to stay: a release, a baseline, the start of a fork.

Whoever goes on from a checkpoint in another lineage pins it here, so that
retention never has to look through the claims of other runs.
"""

import contextlib
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from tiphys.errors import ConflictError, NotFoundError, ObjectExistsError, UsageError
from tiphys.protocol.step_spec import Best, Keep
from tiphys.records import CheckpointRef, PinRecord
from tiphys.store import LineageLayout, Store
from tiphys.store.layout import PIN_NAME

Metrics = Mapping[str, float]


class Observed(NamedTuple):
    """What storage says of one lineage."""

    commits: Collection[CheckpointRef]
    """Everything that has a manifest, late and quarantined ones included."""
    usable: Sequence[CheckpointRef]
    """What the newest attempt may go on from, best first, without quarantined ones."""
    valid: Mapping[CheckpointRef, Metrics]
    """Those of ``usable`` that are known to be valid."""
    held: Mapping[CheckpointRef, Sequence[str]]
    """What must stay whatever the policy says, and why."""


class Verdict(NamedTuple):
    """Every commit is in one of the two. ``kept`` says why; ``expired`` begins with the oldest."""

    kept: Mapping[CheckpointRef, tuple[str, ...]]
    expired: tuple[CheckpointRef, ...]


def judge(keep: Keep | None, seen: Observed) -> Verdict:
    """Divide the commits of ``seen``.

    Nothing expires unless ``keep.last`` valid ones stay, and only what is older
    than all of those: late and damaged ones go once they have become so.
    """
    reasons: dict[CheckpointRef, list[str]] = {ref: list(seen.held.get(ref, ())) for ref in seen.commits}
    for ref, reason in _wanted(keep, seen):
        if ref in reasons:
            reasons[ref].append(reason)
    expired = sorted((ref for ref in _old(keep, seen) if not reasons[ref]), key=age)
    gone = set(expired)
    kept = {ref: tuple(why) or (_spared(keep),) for ref, why in reasons.items() if ref not in gone}
    return Verdict(kept, tuple(expired))


def newest(keep: Keep, seen: Observed) -> list[CheckpointRef]:
    """The newest valid ones, at most ``keep.last``."""
    return [ref for ref in seen.usable if ref in seen.valid][: keep.last]


def age(ref: CheckpointRef) -> tuple[int, int]:
    """Sorts checkpoints by age, the oldest first; no clock has a say in it."""
    return ref.attempt, ref.global_step


def _old(keep: Keep | None, seen: Observed) -> list[CheckpointRef]:
    """Commits older than all of the newest valid ones; none while there are too few of those."""
    if keep is None or len(recent := newest(keep, seen)) < keep.last:
        return []
    oldest = min(map(age, recent))
    return [ref for ref in seen.commits if age(ref) < oldest]


def _wanted(keep: Keep | None, seen: Observed) -> Iterator[tuple[CheckpointRef, str]]:
    if keep is None:
        return
    valid = [ref for ref in seen.usable if ref in seen.valid]
    yield from ((ref, f"newest {keep.last}") for ref in newest(keep, seen))
    if keep.every_steps:
        yield from ((ref, f"every {keep.every_steps:,} steps") for ref in _anchors(keep.every_steps, valid))
    if keep.best:
        yield from ((ref, f"best {keep.best.metric}") for ref in _best(keep.best, valid, seen.valid))


def _anchors(every_steps: int, valid: Sequence[CheckpointRef]) -> Iterator[CheckpointRef]:
    """The first checkpoint from each multiple on, which no later one can displace."""
    first: dict[int, CheckpointRef] = {}
    for ref in sorted(valid, key=lambda ref: (ref.global_step, ref.attempt)):
        first.setdefault(ref.global_step // every_steps, ref)
    first.pop(0, None)
    yield from first.values()


def _best(best: Best, valid: Sequence[CheckpointRef], metrics: Mapping[CheckpointRef, Metrics]) -> list[CheckpointRef]:
    """Of equal ones the newer; without a finite number a checkpoint is never best."""
    sign = 1 if best.order == "min" else -1
    scores = {ref: metrics[ref].get(best.metric, math.nan) for ref in valid}
    finite = [ref for ref in valid if math.isfinite(scores[ref])]
    return sorted(finite, key=lambda ref: sign * scores[ref])[: best.count]


def _spared(keep: Keep | None) -> str:
    return "all are kept" if keep is None else f"not older than the newest {keep.last} valid"


def pin(store: Store, ref: CheckpointRef, name: str, by: str = "") -> None:
    """Keep ``ref`` until `unpin`; nothing new if it has this pin.

    Costs a write, two listings and nothing else. Whoever deletes announces it
    and looks for pins only then, so that of the two at least one sees the other.

    Raises:
        UsageError: ``name`` cannot be the name of a pin.
        NotFoundError: there is no such checkpoint (any more); no pin is left.
        ConflictError: somebody began to delete it; the pin may have come too late.
    """
    if not re.fullmatch(PIN_NAME, name):
        raise UsageError(f"pin {name!r} is not valid: use letters, digits, '-', '_' and '.', at most 100")
    layout = LineageLayout(ref.lineage)
    key = layout.pin(ref.attempt, ref.global_step, name)
    with contextlib.suppress(ObjectExistsError):
        store.create(key, PinRecord(checkpoint=ref, name=name, by=by).to_bytes())
    announced = [info.key for info in store.list(layout.expiries(ref.attempt, ref.global_step))]
    if not _committed(store, ref):
        store.delete(key)
        raise NotFoundError(
            f"{store.url}: lineage {ref.lineage} has no checkpoint {ref}; `tiphys lineage` shows those it has"
        )
    if any(found and found[1] for found in map(layout.parse_expired, announced)):
        raise ConflictError(
            f"{store.url}: somebody was about to delete checkpoint {ref} of {ref.lineage} when it was pinned; the pin "
            "stands, and `tiphys gc --dry-run` shows whether it came in time"
        )


def unpin(store: Store, ref: CheckpointRef, name: str) -> None:
    """Take a pin away; what the policy says holds again.

    Raises:
        NotFoundError: the checkpoint has no such pin; the message names those it has.
    """
    names = pins_of(store, ref.lineage).get(ref, ())
    if name not in names:
        have = f"its pins are: {', '.join(names)}" if names else "it has none"
        raise NotFoundError(f"checkpoint {ref} of {ref.lineage} has no pin {name!r}; {have}")
    store.delete(LineageLayout(ref.lineage).pin(ref.attempt, ref.global_step, name))


def pins_of(store: Store, lineage: str) -> Mapping[CheckpointRef, tuple[str, ...]]:
    """Names of the pins of each pinned checkpoint; costs one listing."""
    layout = LineageLayout(lineage)
    found: dict[CheckpointRef, tuple[str, ...]] = {}
    for info in store.list(layout.all_pins):
        if (place := layout.parse_pin(info.key)) is not None:
            ref, name = place
            found[ref] = (*found.get(ref, ()), name)
    return found


def _committed(store: Store, ref: CheckpointRef) -> bool:
    return any(store.list(LineageLayout(ref.lineage).manifest(ref.attempt, ref.global_step)))
