"""Where SIGTERM meets a training program, and whether the grace period is long enough at all. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

MIB = 1 << 20
GRACES_SECONDS = (5, 15, 30)
STATES_MIB = (64, 256, 1024)
NETWORKS = (50.0, 100.0, None)
"""Megabytes per second; None for all that the machine has."""

_CAUTION = 1.25
_OTHER_SECONDS = 1.5
"""The fence, the manifest, and what the program needs to be gone."""


class Situation(StrEnum):
    NO_SAVE = "before the first save"
    FIRST_SAVE = "during the first save"
    SAVED = "between saves"
    LATER_SAVE = "during a later save"

    @property
    def saves(self) -> bool:
        return self is not Situation.NO_SAVE

    @property
    def is_uploading(self) -> bool:
        return self in (Situation.FIRST_SAVE, Situation.LATER_SAVE)


@dataclass(frozen=True)
class Cell:
    grace_seconds: int
    state_mib: int
    network: float | None

    @property
    def upload_seconds(self) -> float:
        """What the network alone takes for the state; a free one counts as 500 MB/s."""
        return self.state_mib * MIB / ((self.network or 500.0) * 1e6)

    @property
    def allows_landing(self) -> bool:
        return _CAUTION * self.upload_seconds + _OTHER_SECONDS <= self.grace_seconds

    @property
    def trials(self) -> int:
        """Many where a trial takes seconds, few where it takes a minute; together more than 300."""
        if not self.allows_landing:
            return 1
        by_size = {64: 25, 256: 7, 1024: 4}
        return by_size[self.state_mib]

    def __str__(self) -> str:
        network = f"{self.network:g} MB/s" if self.network else "free"
        return f"{self.state_mib} MiB, {network}, {self.grace_seconds} s of grace"


def cells() -> Iterator[Cell]:
    """By network, since that is what takes a process to change."""
    for network, mib, grace in product(NETWORKS, STATES_MIB, GRACES_SECONDS):
        yield Cell(grace, mib, network)
