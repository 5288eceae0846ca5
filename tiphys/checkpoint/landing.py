"""What to do with the seconds between SIGTERM and SIGKILL. Pure.

A save that does not land is worth nothing, and may cost the one before it that
was still on its way. So what is tried is what the measured bandwidth says will
arrive; where nobody has measured yet, the newest state is tried.
"""

from enum import StrEnum
from typing import NamedTuple

_CAUTION = 1.25
"""Bandwidth is shared, and a node that empties itself is busy."""
_HOPELESS = 3
"""A save under way is given up only if it would take so many times what is left: to wait for it costs nothing else."""
_COMMIT_SECONDS = 0.5
"""The fence, the manifest, and what the program does until it is gone."""


class Choice(StrEnum):
    """What is done after SIGTERM."""

    SAVE = "save"
    """Let the save under way finish, then save the newest state."""
    REPLACE = "replace"
    """Give up the save under way; the newest state lands, both would not."""
    FINISH = "finish"
    """Let the save under way finish, and no more."""
    LEAVE = "leave"
    """Nothing would land: leave at once with what is committed."""


class Approach(NamedTuple):
    """What is known when the choice is made. None means unknown."""

    seconds_left: float | None
    bytes_per_second: float | None
    state_bytes: int
    running_bytes: int
    """What the save under way has still to send; 0 if there is none."""


def land(seen: Approach) -> Choice:
    """The most that is expected to be committed in time."""
    if seen.seconds_left is None or not seen.bytes_per_second:
        return Choice.SAVE
    both = _seconds(seen.running_bytes + seen.state_bytes, seen.bytes_per_second)
    newest = _seconds(seen.state_bytes, seen.bytes_per_second)
    running = _seconds(seen.running_bytes, seen.bytes_per_second)
    if both <= seen.seconds_left:
        return Choice.SAVE
    if newest <= seen.seconds_left:
        return Choice.REPLACE
    if seen.running_bytes:
        return Choice.FINISH if running <= _HOPELESS * seen.seconds_left else Choice.LEAVE
    # Estimates err; what has a chance is tried, since there is nothing to lose.
    return Choice.SAVE if newest <= _CAUTION * seen.seconds_left else Choice.LEAVE


def _seconds(size_bytes: int, bytes_per_second: float) -> float:
    return _CAUTION * size_bytes / bytes_per_second + _COMMIT_SECONDS
