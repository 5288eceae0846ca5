"""What speaks against a node on which a rank of a training works longer than the others of its gang.

Looked up where the ranks tell it, by one listing for each gang. It is one hint
among others: a node gets nothing new by it only if another source speaks against
it, too, such as a monitor's hint, a lost attempt, or another training's ranks.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

import structlog

from tiphys.errors import NotFoundError, StoreError, UsageError
from tiphys.protocol.policy import ATTEMPT_LABEL, RUN_LABEL
from tiphys.store import LineageLayout, lineage_of
from tiphys.store.layout import PACE_WINDOW_SECONDS, parse_pace
from tiphys.store.runs import concurrently
from tiphys_plugin.cluster import PodStatus
from tiphys_plugin.ledger.model import Lease, LeaseRequest
from tiphys_plugin.nodes.health import Evidence
from tiphys_plugin.nodes.stragglers import LOOKED_AT, Slow, slow_members
from tiphys_plugin.pods import is_of_instance
from tiphys_plugin.workflows import Stores

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
