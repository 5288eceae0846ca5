"""Finds gang members that are slower than the rest of their gang, and turns them into hints against their nodes.

The ranks write their step times into the keys of their lineage, so one listing
for each gang is enough. A slow rank is one hint among others: its node is avoided
only if another source agrees, such as a monitor, a lost attempt, or the ranks of
another training.

The statistics are robust, so that a few slow members do not shift the measure
that they are compared with. A member is slow in a window if its robust z-score,
by the median absolute deviation, is high (B. Iglewicz, D. Hoaglin, "How to
Detect and Handle Outliers", 1993), and if it is slower than the median by a
noticeable fraction. A single window is noise: a verdict needs most of the last
few windows, and ends as soon as the newest one is normal again.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import NamedTuple

import structlog

from tiphys.errors import NotFoundError, StoreError, UsageError
from tiphys.protocol.step_spec import ATTEMPT_LABEL, RUN_LABEL
from tiphys.store import LineageLayout, lineage_name
from tiphys.store.layout import STEP_TIME_WINDOW_SECONDS, RankStepTime, parse_step_time
from tiphys.store.runs import read_concurrently
from tiphys_plugin.attempts.liveness import NamespaceStores
from tiphys_plugin.attempts.pods import hash_instance
from tiphys_plugin.cluster.interface import PodStatus
from tiphys_plugin.nodes.health import NodeEvidence
from tiphys_plugin.quota.lease import Lease, LeaseRequest

RECENT_WINDOWS = 4
"""The newest windows that count."""
MIN_SLOW_WINDOWS = 3
"""A member must be slow in at least this many of them, including the newest."""
_SLOW_Z_SCORE = 3.5
"""Threshold of the robust z-score that Iglewicz and Hoaglin recommend."""
_MIN_SLOWDOWN = 1.1
"""Least ratio to the median of a slow member, however similar the other members are."""
_MIN_RELATIVE_SPREAD = 0.02
"""Least deviation as a fraction of the median, so that a deviation of zero does not divide."""
_MIN_MEMBERS = 3
"""With two members it is undecidable which one is slow."""
_MAD_TO_STANDARD_DEVIATION = 1.4826
"""The median absolute deviation times this is the standard deviation of a normal distribution."""
_MAX_LISTED_STEP_TIMES = 100_000
"""Some windows of ten thousand ranks; a program may write as many keys as it likes."""
_log = structlog.get_logger()


class Straggler(NamedTuple):
    """A slow member of a gang of ``members``.

    ``slowdown`` is the ratio of its time for a step to the gang's median, at the
    median of the ``windows`` in which it was slow.
    """

    member: int
    slowdown: float
    windows: int
    members: int


def find_stragglers(rank_paces: Iterable[RankStepTime], current_window: int) -> list[Straggler]:
    """The slow members, by the windows before ``current_window``, which is not over yet."""
    by_window: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for pace in rank_paces:
        if current_window - RECENT_WINDOWS <= pace.window < current_window:
            # The slowest rank of a member counts, because all others wait for it.
            slowest = max(pace.own_seconds, by_window[pace.window].get(pace.member, 0.0))
            by_window[pace.window][pace.member] = slowest
    slow_windows: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for window, seconds_by_member in by_window.items():
        for member, slowdown in _slow_in_window(seconds_by_member).items():
            slow_windows[member][window] = slowdown
    # Ranks report within seconds of each other: a window that some members have not reported is incomplete.
    members = max(map(len, by_window.values()), default=0)
    newest = max((window for window, reported in by_window.items() if len(reported) == members), default=0)
    return [
        Straggler(member, statistics.median(slowdowns.values()), len(slowdowns), members)
        for member, slowdowns in sorted(slow_windows.items())
        if len(slowdowns) >= MIN_SLOW_WINDOWS and newest in slowdowns
    ]


def _slow_in_window(seconds_by_member: Mapping[int, float]) -> dict[int, float]:
    """Members that are slow in one window, each with the ratio of its step time to the median."""
    if len(seconds_by_member) < _MIN_MEMBERS:
        return {}
    median = statistics.median(seconds_by_member.values())
    if median <= 0:
        return {}
    spread = _MAD_TO_STANDARD_DEVIATION * statistics.median(
        abs(seconds - median) for seconds in seconds_by_member.values()
    )
    scale = max(spread, _MIN_RELATIVE_SPREAD * median)
    return {
        member: seconds / median
        for member, seconds in seconds_by_member.items()
        if seconds > _MIN_SLOWDOWN * median and (seconds - median) / scale > _SLOW_Z_SCORE
    }


def find_slow_gangs(
    stores: NamespaceStores, leases: Sequence[Lease], now: datetime
) -> list[tuple[Lease, list[Straggler]]]:
    """The gangs that hold GPUs and have slow members; a gang whose store does not answer is left out."""
    gangs = [lease for lease in leases if lease.request.members > 1 and stores.serves(lease.request.namespace)]
    stragglers = read_concurrently(lambda lease: _find_slow_members(stores, lease, now), gangs)
    return [(lease, slow) for lease, slow in zip(gangs, stragglers, strict=True) if slow]


def evidence_by_node(
    slow: Iterable[tuple[Lease, Sequence[Straggler]]], pods: Iterable[PodStatus]
) -> Mapping[str, tuple[NodeEvidence, ...]]:
    """Evidence of slow members, by Node object; a member whose live pod or node is unknown gives none."""
    alive = [pod for pod in pods if pod.host and not pod.finished]
    evidence: defaultdict[str, tuple[NodeEvidence, ...]] = defaultdict(tuple)
    for lease, members in slow:
        hosts = {pod.rank: pod.host for pod in alive if _is_pod_of(pod, lease.request)}
        for straggler in members:
            if host := hosts.get(straggler.member):
                # Programs write these times, so all trainings of one namespace are one source: alone it convicts none.
                source = f"step times in {lease.request.namespace}"
                message = f"{lease.request.run}/{lease.request.step_name}: {describe_straggler(straggler)}"
                evidence[host] = (*evidence[host], NodeEvidence(source, message, "hint"))
    return dict(evidence)


def describe_straggler(straggler: Straggler) -> str:
    """Describe a slow member with its numbers."""
    minutes = STEP_TIME_WINDOW_SECONDS // 60
    return (
        f"member {straggler.member} of {straggler.members} works {straggler.slowdown:.2f} times as long for a step as "
        f"their median, in {straggler.windows} of {RECENT_WINDOWS} windows of {minutes} min"
    )


def _find_slow_members(stores: NamespaceStores, lease: Lease, now: datetime) -> list[Straggler]:
    request = lease.request
    current_window = int(now.timestamp() // STEP_TIME_WINDOW_SECONDS)
    try:
        layout = LineageLayout(lineage_name(request.run, request.step))
        keys = stores.store(request.namespace).list(layout.step_times(request.attempt))
        step_times = (parse_step_time(info.key) for info in islice(keys, _MAX_LISTED_STEP_TIMES))
        return find_stragglers((step_time for step_time in step_times if step_time is not None), current_window)
    except (StoreError, NotFoundError, UsageError) as error:
        _log.warning("pace.unknown", run=request.run, step=request.step, error=str(error))
        return []


def _is_pod_of(pod: PodStatus, request: LeaseRequest) -> bool:
    pod_labels = (pod.labels.get(RUN_LABEL), pod.labels.get(ATTEMPT_LABEL))
    return (
        pod.namespace == request.namespace
        and pod.workflow_uid == request.uid
        and pod_labels == (request.run, str(request.attempt))
        and hash_instance(pod) == request.instance_hash
    )
