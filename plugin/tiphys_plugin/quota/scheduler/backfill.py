"""EASY backfill: a reservation for the first request that does not fit bounds its wait.

If the ends of leases give the time at which the request will fit, later requests
may start as far as they do not delay it. Without such a time no later request may
take the resources that it lacks, unless the backfill of its queue allows it. See
`tiphys_plugin.quota.scheduler.cycle` for the rules and their source.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import count, groupby, islice
from typing import NamedTuple

from tiphys_plugin.quota.lease import LeaseRequest, PendingRequest
from tiphys_plugin.quota.queue import ANY_TYPE, Queue
from tiphys_plugin.quota.scheduler.capacity import Capacity, HeldGpus
from tiphys_plugin.quota.scheduler.pool_options import ResourceLimit

LeaseEnd = tuple[datetime, HeldGpus]
"""End of a lease, and the GPUs that it releases."""


def end_time(end: LeaseEnd) -> datetime:
    return end[0]


@dataclass(frozen=True)
class ReservationScope:
    """The leases that can affect a request: those with its ``quota_keys`` (see `HeldGpus`), or with GPUs it could use.

    ``gpu_kinds`` are the GPU kinds that the request could use; empty without an inventory.
    """

    quota_keys: frozenset[tuple[str, str]]
    gpu_kinds: frozenset[str] = frozenset()

    def includes(self, held_gpus: HeldGpus) -> bool:
        return held_gpus.quota_key in self.quota_keys or (
            held_gpus.gpu_type in self.gpu_kinds if held_gpus.gpu_type else bool(self.gpu_kinds)
        )

    def may_include_account(self, quota_key: tuple[str, str]) -> bool:
        """Whether leases with this quota key may be in the scope."""
        _, pool = quota_key
        return quota_key in self.quota_keys or (pool in self.gpu_kinds if pool != ANY_TYPE else bool(self.gpu_kinds))


def find_first_fit(
    capacity: Capacity, ends: Iterable[LeaseEnd], queue: Queue, request: LeaseRequest
) -> datetime | None:
    """The first time at which the request fits, given the ordered ``ends`` of leases; None if it never fits.

    ``capacity`` is changed to that time. Released GPUs never make a fit worse, so the search releases ends in strides
    of doubling length, then bisects the last stride, instead of testing every end.
    """
    instants = (list(group) for _, group in groupby(ends, key=end_time))
    for length in (2**power for power in count()):
        stride = list(islice(instants, length))
        for ended in stride:
            _release_ends(capacity, ended)
        if not stride:
            return None
        if capacity.fits(queue, request):
            return _find_last_needed_end(capacity, stride, queue, request)
    raise AssertionError("the strides came to an end before the ends did")


def _find_last_needed_end(
    capacity: Capacity, stride: list[list[LeaseEnd]], queue: Queue, request: LeaseRequest
) -> datetime:
    """The first instant of ``stride`` after which the request fits.

    The request fits after the whole stride, which ``capacity`` has released, and did not fit before it.
    """
    sufficient, released = len(stride), len(stride)
    insufficient = 0
    while sufficient - insufficient > 1:
        middle = (insufficient + sufficient) // 2
        _move_to_instant(capacity, stride, released, middle)
        released = middle
        if capacity.fits(queue, request):
            sufficient = middle
        else:
            insufficient = middle
    _move_to_instant(capacity, stride, released, sufficient)
    return stride[sufficient - 1][0][0]


def _move_to_instant(capacity: Capacity, stride: list[list[LeaseEnd]], released: int, target: int) -> None:
    """Change ``capacity`` from ``released`` to ``target`` released instants of the stride."""
    for ended in stride[released:target]:
        _release_ends(capacity, ended)
    for ended in stride[target:released]:
        for _, held_gpus in ended:
            capacity.add(held_gpus)


def _release_ends(capacity: Capacity, ended: list[LeaseEnd]) -> None:
    for _, held_gpus in ended:
        capacity.remove(held_gpus)


class StartedRequest(NamedTuple):
    """GPUs of a request that the scheduling cycle starts, and its declared end; None: unknown."""

    held_gpus: HeldGpus
    end: datetime | None


class ReservedStart(NamedTuple):
    """When a request with a reservation is expected to start, and the held GPUs at that time.

    Both are None if no known ends of leases make the request fit.
    """

    expected_start: datetime | None = None
    capacity_at_start: Capacity | None = None
    is_open: bool = False
    """Whether other requests of its queue may start on what it lacks, if no known ends of leases make it fit: any of
    them with preemptible backfill, and those of its priority until ``closes_at`` with bounded backfill."""
    closes_at: datetime | None = None
    """None without bounded backfill."""


class Reservation:
    """A reservation for a pending request that does not fit; ``missing_limits`` are the limits that it lacks.

    Most reservations of a cycle affect no request that fits, so the expected start is computed when it is first asked
    for. It is that as of the reservation: ``find_start`` gets the starts of the cycle before it.

    ``scope`` are the leases that can affect it, and ``starts`` those of the cycle, to which the cycle appends. With
    ``is_promised`` the request is promised GPUs of victims; then other promised requests may also count on them.
    """

    def __init__(
        self,
        pending: PendingRequest,
        queue: Queue,
        missing_limits: frozenset[ResourceLimit],
        scope: ReservationScope,
        starts: Sequence[StartedRequest],
        find_start: Callable[["Reservation", Sequence[StartedRequest]], ReservedStart],
        *,
        is_promised: bool,
    ) -> None:
        self.pending = pending
        self.queue = queue
        self.missing_limits = missing_limits
        self.scope = scope
        self.is_promised = is_promised
        self._starts = starts
        self._starts_before = self._counted_starts = len(starts)
        self._find_start = find_start

    @cached_property
    def start(self) -> ReservedStart:
        return self._find_start(self, self._starts[: self._starts_before])

    def may_be_delayed_by(self, held_gpus: HeldGpus, consumed_limits: frozenset[ResourceLimit]) -> bool:
        """Whether `is_delayed_by` may be true for a lease, whenever it ends; does not compute the expected start."""
        return not self.missing_limits.isdisjoint(consumed_limits) or self.scope.includes(held_gpus)

    def is_delayed_by(
        self,
        request: LeaseRequest,
        held_gpus: HeldGpus,
        consumed_limits: frozenset[ResourceLimit],
        end: datetime | None,
        *,
        is_promised: bool,
    ) -> bool:
        """Whether a lease from now to ``end`` would delay the expected start of the reserved request.

        The lease holds ``held_gpus``, and uses up ``consumed_limits``; ``end`` None: its end is unknown.
        ``is_promised``: its request is promised GPUs of victims, too.
        """
        expected_start, capacity_at_start, _, _ = self.start
        if expected_start is None or capacity_at_start is None:
            may_overtake = self._may_be_overtaken_by(request) and (is_promised or not self.is_promised)
            return not may_overtake and bool(consumed_limits & self.missing_limits)
        if (end is not None and end <= expected_start) or not self.scope.includes(held_gpus):
            return False
        if self.is_promised and not is_promised and consumed_limits & self.missing_limits:
            return True
        for started in self._starts[self._counted_starts :]:
            if started.end is None or started.end > expected_start:
                capacity_at_start.add(started.held_gpus)
        self._counted_starts = len(self._starts)
        capacity_at_start.add(held_gpus)
        delayed = not capacity_at_start.fits(self.queue, self.pending.request)
        capacity_at_start.remove(held_gpus)
        return delayed

    def _may_be_overtaken_by(self, request: LeaseRequest) -> bool:
        if not self.start.is_open or request.queue != self.queue.name:
            return False
        return self.queue.is_backfill_preemptible or request.priority == self.pending.request.priority
