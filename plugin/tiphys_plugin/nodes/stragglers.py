"""Which members of a gang are slow: a pure function of what their ranks tell of their own work.

Robust, since a few slow ones must not move the measure that they are held
against: a member is slow in a window if it is far above the median of its gang
by the median absolute deviation (B. Iglewicz, D. Hoaglin, "How to Detect and
Handle Outliers", 1993), and noticeably so. One window says nothing: a verdict
takes most of the last few, and ends as soon as the newest is well again.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tiphys.store.layout import RankPace

LOOKED_AT = 4
"""The newest windows that count."""
SLOW_WINDOWS = 3
"""In so many of them a member has to be slow, the newest among them."""
_FAR = 3.5
"""Robust z-score, as Iglewicz and Hoaglin recommend."""
_NOTICEABLE = 1.1
"""Less than a tenth above the median is not worth a word, however even the others are."""
_EVENNESS = 0.02
"""Members that differ by less are taken to differ by so much of the median: a deviation of zero divides nothing."""
_FEWEST_MEMBERS = 3
"""Of two nobody can say which one is the slow one."""
_NORMAL = 1.4826
"""The median absolute deviation times this is the standard deviation of a normal distribution."""


class Slow(NamedTuple):
    """A member of a gang of ``members`` and how many times as long as the median it worked for a step, at the median
    of the windows in which it was slow.
    """

    member: int
    times: float
    windows: int
    members: int


def slow_members(told: Iterable[RankPace], newest: int) -> list[Slow]:
    """Those that are slow by the windows before ``newest``, which is not over yet."""
    by_window: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for one in told:
        if newest - LOOKED_AT <= one.window < newest:
            # All others wait for the slowest rank of a member.
            by_window[one.window][one.member] = max(one.own_seconds, by_window[one.window].get(one.member, 0.0))
    found: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for window, own in by_window.items():
        for member, times in _slow_now(own).items():
            found[member][window] = times
    # Ranks tell within seconds of each other: a window of which some have told has not been told yet.
    whole = max(map(len, by_window.values()), default=0)
    last = max((window for window, own in by_window.items() if len(own) == whole), default=0)
    return [
        Slow(member, statistics.median(times.values()), len(times), whole)
        for member, times in sorted(found.items())
        if len(times) >= SLOW_WINDOWS and last in times
    ]


def _slow_now(own: Mapping[int, float]) -> dict[int, float]:
    """Members that are slow in one window, and how many times as long as the median they take."""
    if len(own) < _FEWEST_MEMBERS:
        return {}
    median = statistics.median(own.values())
    if median <= 0:
        return {}
    spread = _NORMAL * statistics.median(abs(seconds - median) for seconds in own.values())
    scale = max(spread, _EVENNESS * median)
    return {
        member: seconds / median
        for member, seconds in own.items()
        if seconds > _NOTICEABLE * median and (seconds - median) / scale > _FAR
    }
