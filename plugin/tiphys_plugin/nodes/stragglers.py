"""What speaks against a node on which a rank of a training works longer than the others of its gang.

Looked up where the ranks tell it, by one listing for each gang. It is one hint
among others: a node gets nothing new by it only if another source speaks against
it, too, such as a monitor's hint, a lost attempt, or another training's ranks.

Which members of a gang are slow: a pure function of what their ranks tell of their own work.

Robust, since a few slow ones must not move the measure that they are held
against: a member is slow in a window if it is far above the median of its gang
by the median absolute deviation (B. Iglewicz, D. Hoaglin, "How to Detect and
Handle Outliers", 1993), and noticeably so. One window says nothing: a verdict
takes most of the last few, and ends as soon as the newest is well again.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import structlog

from tiphys.errors import NotFoundError, StoreError, UsageError
from tiphys.protocol.step_spec import ATTEMPT_LABEL, RUN_LABEL
from tiphys.store import LineageLayout, lineage_of
from tiphys.store.layout import PACE_WINDOW_SECONDS, RankPace, parse_pace
from tiphys.store.runs import concurrently
from tiphys_plugin.attempts.liveness import Stores
from tiphys_plugin.attempts.pods import is_of_instance
from tiphys_plugin.cluster.interface import PodStatus
from tiphys_plugin.nodes.health import Evidence
from tiphys_plugin.quota.lease import Lease, LeaseRequest

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


_log = structlog.get_logger()


def slow_in(stores: Stores, leases: Sequence[Lease], now: datetime) -> list[tuple[Lease, list[Slow]]]:
    """The gangs that hold GPUs and have slow members. One whose store does not answer tells nothing."""
    gangs = [one for one in leases if one.request.members > 1 and stores.serves(one.request.namespace)]
    found = concurrently(lambda lease: _slow_members(stores, lease, now), gangs)
    return [(lease, slow) for lease, slow in zip(gangs, found, strict=True) if slow]


def evidence_by_node(
    slow: Iterable[tuple[Lease, Sequence[Slow]]], pods: Iterable[PodStatus]
) -> Mapping[str, tuple[Evidence, ...]]:
    """What slow members point at, by Node object. A member without a pod that has a node points at nothing."""
    alive = [pod for pod in pods if pod.host and not pod.finished]
    found: defaultdict[str, tuple[Evidence, ...]] = defaultdict(tuple)
    for lease, members in slow:
        hosts = {pod.rank: pod.host for pod in alive if _is_of(pod, lease.request)}
        for one in members:
            if host := hosts.get(one.member):
                source = f"pace of {lease.request.run}/{lease.request.step}"
                found[host] = (*found[host], Evidence(source, in_words(one), "hint"))
    return dict(found)


def in_words(one: Slow) -> str:
    """A slow member, with its numbers."""
    minutes = PACE_WINDOW_SECONDS // 60
    return (
        f"member {one.member} of {one.members} works {one.times:.2f} times as long for a step as their median, "
        f"in {one.windows} of {LOOKED_AT} windows of {minutes} min"
    )


def _slow_members(stores: Stores, lease: Lease, now: datetime) -> list[Slow]:
    held = lease.request
    newest = int(now.timestamp() // PACE_WINDOW_SECONDS)
    try:
        layout = LineageLayout(lineage_of(held.run, held.step))
        listed = stores.store(held.namespace).list(layout.paces(held.attempt))
        return slow_members([told for info in listed if (told := parse_pace(info.key)) is not None], newest)
    except (StoreError, NotFoundError, UsageError) as error:
        _log.warning("pace.unknown", run=held.run, step=held.step, error=str(error))
        return []


def _is_of(pod: PodStatus, held: LeaseRequest) -> bool:
    told = (pod.labels.get(RUN_LABEL), pod.labels.get(ATTEMPT_LABEL))
    return told == (held.run, str(held.attempt)) and is_of_instance(pod, held.instance)
