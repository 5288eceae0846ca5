"""What the pages of queues and nodes show, and how often it is read.

The pages render what ``tiphys queues``, ``tiphys why`` and ``tiphys nodes`` print.
Whoever serves them reads the ledger, because the store does not hold it.
"""

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import NamedTuple, Protocol, TypeVar

from cachetools import TTLCache, cached
from tiphys_plugin.quota.lease import LeaseRequest
from tiphys_plugin.quota.ledger.usage import QueueUsage

MAX_REQUESTS = 50
"""Most requests that wait, and most that hold GPUs, on a page."""
_SHARED_SECONDS = 3.0


class QueueRow(NamedTuple):
    """GPUs of one type or flavor of a queue, and the rules of the queue in words."""

    usage: QueueUsage
    policies: str


@dataclass(frozen=True)
class RequestRow:
    """A request for GPUs, how many of which type, and since when it holds them or waits."""

    request: LeaseRequest
    gpus: str
    since: datetime


@dataclass(frozen=True)
class HolderRow(RequestRow):
    """A request that holds GPUs."""

    nodes: tuple[str, ...]
    eviction: str
    """What is said about its preemption; empty if it is not preempted."""


@dataclass(frozen=True)
class WaitingRow(RequestRow):
    """A request that waits for GPUs, with what the ledger would answer it now."""

    position: int | None
    """Its place in the line; None if it is not deferred, or not known."""
    reasons: tuple[tuple[str, str], ...]
    """Each a name and a sentence."""
    expected_start: datetime | None
    preemption: tuple[str, ...]
    """What would be preempted for it, or why nothing would."""


@dataclass(frozen=True)
class QueuesView:
    """The ledger at one moment."""

    place: str
    """Which ledger this is, in words."""
    queues: tuple[QueueRow, ...]
    holders: tuple[HolderRow, ...]
    waiting: tuple[WaitingRow, ...]
    hidden_holders: int
    hidden_waiting: int
    notes: tuple[str, ...]

    @property
    def quotas(self) -> dict[str, int]:
        """GPUs by queue, all types together; without the queues whose quota is not known for each type."""
        known: dict[str, int] = {}
        for usage, _ in self.queues:
            known[usage.queue] = known.get(usage.queue, 0) + (usage.quota or 0)
        unknown = {usage.queue for usage, _ in self.queues if usage.quota is None}
        return {queue: gpus for queue, gpus in known.items() if queue not in unknown}

    def only(self, queue: str) -> "QueuesView":
        """The requests of one queue; all for an empty name."""
        if not queue:
            return self
        holders = tuple(holder for holder in self.holders if holder.request.queue == queue)
        return replace(self, holders=holders, waiting=tuple(row for row in self.waiting if row.request.queue == queue))


@dataclass(frozen=True)
class NodeRow:
    name: str
    gpu_type: str
    gpus: int
    held: int
    others: int
    """GPUs that pods without a lease use."""
    free: int
    topology: str
    status: str
    evidence: tuple[tuple[str, str, datetime | None], ...]
    """Source, sentence and time of each piece of evidence against it."""


@dataclass(frozen=True)
class NodesView:
    place: str
    nodes: tuple[NodeRow, ...]
    notes: tuple[str, ...]


class GpuSource(Protocol):
    """Reads the ledger, and the nodes where there are any. The readers raise `TiphysError`."""

    @property
    def has_nodes(self) -> bool:
        """Whether `read_nodes` can answer."""

    def read_queues(self) -> QueuesView:
        """The ledger now."""

    def read_nodes(self) -> NodesView:
        """The nodes now."""


_View = TypeVar("_View")


def share_reads(read: Callable[[], _View], monotonic: Callable[[], float] = time.monotonic) -> Callable[[], _View]:
    """``read``, which is called at most every `_SHARED_SECONDS`, however many visitors look. Thread-safe."""
    newest: TTLCache[Hashable, _View] = TTLCache(1, _SHARED_SECONDS, timer=monotonic)
    return cached(newest, condition=threading.Condition())(read)
