"""Which checkpoints of a lineage stay, and why: the one rule of trainer and command.

A checkpoint counts as kept only if it is valid, since a rule that counts
damaged ones deletes the last good one. Whatever else refers to a checkpoint
holds it, valid or not. Pure.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from tiphys.protocol.keep import Best, Keep
from tiphys.records import CheckpointRef

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
