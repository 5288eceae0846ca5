"""Is a node sound? A pure function from evidence to a verdict, so that its laws can be proved by search.

What a monitor of the cluster says of a node is believed. What merely points at
it, such as attempts that failed there, may as well have another cause: hints
make a node suspect only if they come from more than one source, or from times
that lie apart, and they are forgotten. So every verdict ends when its evidence
does, and nobody has to take it back.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Literal

Means = Literal["cordon", "fault", "notice", "hint"]
APART = timedelta(minutes=10)
"""Hints of one source count twice if they lie so far apart: what happens at one time has one cause."""


class State(StrEnum):
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    UNHEALTHY = "unhealthy"


@dataclass(frozen=True)
class Evidence:
    """Something that speaks against a node."""

    source: str
    """Who says it, such as ``condition GpuMemWatch`` or ``attempts of digits/fit``."""
    message: str
    means: Means
    at: datetime | None = None
    """When it happened; None for what is so now."""


@dataclass(frozen=True)
class Verdict:
    """``evidence`` is all that speaks against the node now, also where that is not enough."""

    state: State = State.HEALTHY
    evidence: tuple[Evidence, ...] = ()
    until: datetime | None = None
    """When the next piece of evidence is forgotten; None if none is."""

    @property
    def broken(self) -> bool:
        """Whether what runs there should go on elsewhere."""
        return any(one.means == "fault" for one in self.evidence)

    @property
    def going(self) -> bool:
        """Whether the node will go, so that what runs there has to go before."""
        return any(one.means == "notice" for one in self.evidence)

    @property
    def why(self) -> str:
        """The evidence in one line."""
        return "; ".join(f"{one.source}: {one.message}" if one.message else one.source for one in self.evidence)


def judge(evidence: Iterable[Evidence], now: datetime, forget_after: timedelta) -> Verdict:
    """The verdict at ``now``; hints count for ``forget_after``."""
    known = tuple(one for one in evidence if one.at is None or now - one.at < forget_after)
    hints = [one for one in known if one.means == "hint"]
    state = State.UNHEALTHY if len(hints) < len(known) else State.SUSPECT if _agree(hints) else State.HEALTHY
    return Verdict(state, known, min((one.at + forget_after for one in known if one.at), default=None))


def _agree(hints: Sequence[Evidence]) -> bool:
    """Whether more than one source says it, or one at times that lie apart."""
    times = [one.at for one in hints if one.at is not None]
    return len({one.source for one in hints}) > 1 or (bool(times) and max(times) - min(times) >= APART)
