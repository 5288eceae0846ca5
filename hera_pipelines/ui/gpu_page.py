"""What the pages of queues and nodes show, and how often it is read.

The pages render what ``tiphys queues``, ``tiphys why`` and ``tiphys nodes`` print.
Whoever serves them reads the ledger, because the store does not hold it.
"""

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Protocol, TypeVar

from cachetools import TTLCache, cached

MAX_REQUESTS = 50
"""Most requests that wait, and most that hold GPUs, on a page."""
_SHARED_SECONDS = 3.0


@dataclass(frozen=True)
class QueueRow:
    """GPUs of one type or flavor of a queue; ``*`` are all types that the queue does not name."""

    queue: str
    gpu_type: str
    quota: int | None
    """None if the queue declares none."""
    most: int | None
    """Most GPUs that it may hold if its cohort lends enough; None if unknown."""
    held: int
    borrowed: int
    waiting: int
    is_over_limit: bool
    policies: str


@dataclass(frozen=True)
class RequestRow:
    """A request for GPUs, and since when it holds them or waits."""

    gpus: str
    queue: str
    namespace: str
    run: str
    step: str
    attempt: int
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
        for row in self.queues:
            known[row.queue] = known.get(row.queue, 0) + (row.quota or 0)
        unknown = {row.queue for row in self.queues if row.quota is None}
        return {queue: gpus for queue, gpus in known.items() if queue not in unknown}

    def only(self, queue: str) -> "QueuesView":
        """The requests of one queue; all for an empty name."""
        if not queue:
            return self
        holders = tuple(holder for holder in self.holders if holder.queue == queue)
        return replace(self, holders=holders, waiting=tuple(row for row in self.waiting if row.queue == queue))


@dataclass(frozen=True)
class NodeRow:
    """A node with GPUs."""

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
    """The nodes at one moment."""

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
