"""Judges the health of a node: a pure function from evidence to a verdict, so that tests can search all its cases.

The statement of a monitor of the cluster is believed. A hint, such as a failed
attempt on the node, may have another cause: hints make a node suspect only if
they come from several sources, or from times that are far apart. Hints expire,
so every verdict ends with its evidence, and none has to be revoked.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Literal

EvidenceMeaning = Literal["cordon", "fault", "notice", "hint"]
MIN_HINT_SEPARATION = timedelta(minutes=10)
"""Hints of one source count twice if they are this far apart; hints at one time are likely to have one cause."""


class NodeHealth(StrEnum):
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    UNHEALTHY = "unhealthy"


@dataclass(frozen=True)
class NodeEvidence:
    """A piece of evidence against a node."""

    source: str
    """Origin of the evidence, such as ``condition GpuMemWatch`` or ``attempts of digits/fit``."""
    message: str
    means: EvidenceMeaning
    at: datetime | None = None
    """When it happened; None for a current state."""


@dataclass(frozen=True)
class NodeHealthVerdict:
    """Verdict on a node; ``evidence`` is all current evidence against it, even if it is not enough."""

    state: NodeHealth = NodeHealth.HEALTHY
    evidence: tuple[NodeEvidence, ...] = ()
    valid_until: datetime | None = None
    """When the next piece of evidence expires; None if none does."""

    @property
    def is_broken(self) -> bool:
        """Whether a monitor reports a fault, so that trainings should continue on another node."""
        return any(item.means == "fault" for item in self.evidence)

    @property
    def is_departing(self) -> bool:
        """Whether the node will be removed, so that trainings must leave it before."""
        return any(item.means == "notice" for item in self.evidence)

    @property
    def message(self) -> str:
        """The evidence in one line."""
        return "; ".join(f"{item.source}: {item.message}" if item.message else item.source for item in self.evidence)


def judge_node_health(evidence: Iterable[NodeEvidence], now: datetime, hint_lifetime: timedelta) -> NodeHealthVerdict:
    """Judge a node at ``now``; evidence with a time expires after ``hint_lifetime``."""
    current = tuple(item for item in evidence if item.at is None or now - item.at < hint_lifetime)
    hints = [item for item in current if item.means == "hint"]
    state = (
        NodeHealth.UNHEALTHY
        if len(hints) < len(current)
        else NodeHealth.SUSPECT
        if _hints_agree(hints)
        else NodeHealth.HEALTHY
    )
    return NodeHealthVerdict(
        state, current, min((item.at + hint_lifetime for item in current if item.at), default=None)
    )


def _hints_agree(hints: Sequence[NodeEvidence]) -> bool:
    """Whether the hints come from several sources, or from times that are far apart."""
    times = [hint.at for hint in hints if hint.at is not None]
    return len({hint.source for hint in hints}) > 1 or (bool(times) and max(times) - min(times) >= MIN_HINT_SEPARATION)
