"""What is held and what is free, by queue, cohort, kind of GPUs and node, at one instant or a later one.

A queue owns its quota. In a cohort it may also take what the others do not use,
up to its borrowing limit and to what they lend (Kueue's nominalQuota,
borrowingLimit and lendingLimit). Where an inventory is declared, GPUs that
exist are a further limit; where nodes are, they must have room for each pod.

Every number that decides and every number in a message comes from here. A
question costs no more where there are more leases, because they are summed.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from tiphys_plugin.quota.lease import Lease, LeaseRequest
from tiphys_plugin.quota.placement.inventory import Free
from tiphys_plugin.quota.placement.model import Placement
from tiphys_plugin.quota.placement.place import Unplaceable, place
from tiphys_plugin.quota.queues import Queue, Queues
from tiphys_plugin.quota.scheduler import pools
from tiphys_plugin.quota.scheduler.pools import Limit, Source, gang, terms_of


class Hold(NamedTuple):
    """GPUs as they are counted: against which quota and as which kind, by the queues of today."""

    gpus: int
    queue: str
    pool: str
    gpu_type: str | None
    cohort: str | None = None
    """The cohort that it borrows from or lends in; None if nobody else can be concerned."""
    keeps: int = 0
    """What its queue keeps for itself of this pool."""
    placement: Placement | None = None
    """Where its GPUs are; None where no nodes are declared."""

    @property
    def account(self) -> tuple[str, str]:
        """Who shares its quota: holds of other accounts may come and go without a change for it, but for inventory."""
        return self.cohort or self.queue, self.pool


class Capacity:
    """Sums over ``leases``, under the quotas and the inventory of ``queues``."""

    def __init__(self, queues: Queues, leases: Sequence[Lease] = ()) -> None:
        self.queues = queues
        self._held: Counter[tuple[str, str]] = Counter()
        self._borrowed: Counter[tuple[str, str]] = Counter()
        self._of_type: Counter[str | None] = Counter(queues.foreign)
        self._alike: dict[tuple[str, str | None, str], Hold] = {}
        self._free = None if queues.fleet is None else Free(queues.fleet)
        alike: Counter[tuple[str, str | None, str]] = Counter()
        for lease in leases:
            alike[lease.request.queue, lease.request.gpu_type, lease.pool] += lease.request.gpus
        for (queue, gpu_type, pool), gpus in alike.items():
            self.take(self._hold(gpus, queue, gpu_type, pool))
        if self._free is not None:
            for lease in leases:
                self._free.take(_placed(lease))

    def copy(self) -> "Capacity":
        """The same sums, to be changed without changing these."""
        twin = Capacity.__new__(Capacity)
        twin.queues, twin._alike = self.queues, self._alike
        twin._held, twin._borrowed = self._held.copy(), self._borrowed.copy()
        twin._of_type = self._of_type.copy()
        twin._free = None if self._free is None else self._free.copy()
        return twin

    def hold(self, request: LeaseRequest, pool: str) -> Hold:
        """How GPUs of ``pool`` are counted that ``request`` holds or would hold."""
        alike = (request.queue, request.gpu_type, pool)
        if (known := self._alike.get(alike)) is None:
            known = self._alike[alike] = self._hold(request.gpus, *alike)
        return known if known.gpus == request.gpus else known._replace(gpus=request.gpus)

    def hold_of(self, lease: Lease) -> Hold:
        """How a lease is counted."""
        hold = self.hold(lease.request, lease.pool)
        return hold if self._free is None else hold._replace(placement=_placed(lease))

    def placed(self, request: LeaseRequest, pool: str) -> Hold:
        """How the request would be counted if it started now on ``pool``, which is among the `fitting` ones."""
        hold, found = self.hold(request, pool), self.place(request, pool)
        return hold if not isinstance(found, Placement) else hold._replace(placement=found)

    def place(self, request: LeaseRequest, pool: str) -> Placement | Unplaceable | None:
        """The nodes for GPUs of ``pool``, or what is in the way; None where no nodes are declared."""
        return None if self._free is None else place(self._free, gang(request, pool), self.queues.placing)

    def take(self, hold: Hold) -> None:
        """Count more as held."""
        self._count(hold, hold.gpus)
        if self._free is not None and hold.placement is not None:
            self._free.take(hold.placement)

    def give_back(self, hold: Hold) -> None:
        """The opposite of `take`."""
        self._count(hold, -hold.gpus)
        if self._free is not None and hold.placement is not None:
            self._free.give_back(hold.placement)

    def held(self, queue: Queue, pool: str) -> int:
        return self._held[queue.name, pool]

    def left(self, queue: Queue, pool: str) -> int:
        """What is left of the queue's own quota; negative while it borrows, or if its quota was lowered."""
        return queue.gpus[pool] - self._held[queue.name, pool]

    def room(self, queue: Queue, pool: str) -> int:
        """GPUs that the queue may take now by quotas alone, those of others included."""
        held = self._held[queue.name, pool]
        if queue.cohort is None:
            return queue.gpus[pool] - held
        own = max(0, queue.keeps(pool) - held)
        return int(min(own + self.common(queue.cohort, pool), queue.ceiling(pool) - held))

    def common(self, cohort: str, pool: str) -> int:
        """What is free of all that the queues of a cohort lend to each other; negative where a quota was lowered."""
        return self.queues.lent[cohort, pool] - self._borrowed[cohort, pool]

    def unused(self, request: LeaseRequest, pool: str) -> float:
        """GPUs of the inventory that no lease holds and the request could get; infinite without an inventory."""
        return self._unused(pools.gpu_type(request, pool), pools.existing(self.queues, request, pool))

    def _unused(self, wanted: str | None, existing: float) -> float:
        """The same for GPUs of one kind, or any, of which so many exist."""
        if self.queues.stock is None:
            return math.inf
        everything = self._of_type.total()
        of_type = everything if wanted is None else self._of_type[wanted] + self._astray(wanted)
        return min(existing - of_type, self.queues.existing - everything)

    def _astray(self, kind: str) -> int:
        """GPUs that may be of a flavor or not: theirs is gone, or had not been declared when they were given."""
        if not self.queues.flavors:
            return 0
        known, kinds = {*(self.queues.stock or {}), *self.queues.kinds.by_name}, self.queues.kinds
        wanted = kinds.type_of(kind)
        return sum(
            gpus
            for held, gpus in self._of_type.items()
            if held not in known and (held is None or kinds.is_plain(held) or held == wanted)
        )

    @property
    def is_overdrawn(self) -> bool:
        """Whether more of a kind is held than exists: the inventory was lowered since."""
        stock = self.queues.stock or {}
        return any(self._of_type[kind] + self._astray(kind) > one.count for kind, one in stock.items())

    def fitting(self, queue: Queue, request: LeaseRequest) -> list[str]:
        """Pools that could serve the request now.

        The best comes first: rather one's own than borrowed GPUs, then flavors in
        their order; where there are none, the smallest hole that is large enough,
        so that large ones stay for large requests.
        """

        def rank(pool: str) -> tuple[bool, int, str]:
            return self.left(queue, pool) < request.gpus, self.room(queue, pool), pool

        sources = terms_of(self.queues, queue, request).sources
        found = [one.pool for one in sources if self._serves(queue, request.gpus, one)]
        if len(found) < 2:
            return found
        if self.queues.flavors:
            return sorted(found, key=lambda pool: self.left(queue, pool) < request.gpus)
        return sorted(found, key=rank)

    def fits(self, queue: Queue, request: LeaseRequest) -> bool:
        """Whether one of its pools could serve the request now."""
        sources = terms_of(self.queues, queue, request).sources
        return any(self._serves(queue, request.gpus, one) for one in sources)

    def short_of(self, queue: Queue, request: LeaseRequest) -> frozenset[Limit]:
        """The limits that keep the request from every one of its pools; empty if one of them serves it."""
        short: set[Limit] = set()
        for one in terms_of(self.queues, queue, request).sources:
            missing = self._missing(queue, request.gpus, one)
            if not missing:
                return frozenset()
            short |= missing
        return frozenset(short)

    def draws_on(self, queue: Queue, request: LeaseRequest, pool: str) -> frozenset[Limit]:
        """The limits that a lease of ``pool`` would bring nearer."""
        source = next(one for one in terms_of(self.queues, queue, request).sources if one.pool == pool)
        borrows = queue.cohort is not None and self.held(queue, pool) + request.gpus > queue.keeps(pool)
        return source.borrowed if borrows else source.own

    def _serves(self, queue: Queue, gpus: int, source: Source) -> bool:
        """Whether nothing is `_missing`."""
        if self.room(queue, source.pool) < gpus or self._unused(source.kind, source.existing) < gpus:
            return False
        return not self._has_no_place(source)

    def _missing(self, queue: Queue, gpus: int, source: Source) -> set[Limit]:
        missing: set[Limit] = set()
        if gpus > queue.ceiling(source.pool) - self.held(queue, source.pool):
            missing.add(Limit("queue", queue.name, source.pool))
        elif queue.cohort is not None and self.room(queue, source.pool) < gpus:
            missing.add(Limit("cohort", queue.cohort, source.pool))
            if self.held(queue, source.pool) < queue.keeps(source.pool):
                missing.add(Limit("queue", queue.name, source.pool))  # what is left of it would help, too
        if self._unused(source.kind, source.existing) < gpus or (not missing and self._has_no_place(source)):
            missing |= source.types
        return missing

    def _has_no_place(self, source: Source) -> bool:
        return self._free is not None and isinstance(place(self._free, source.gang, self.queues.placing), Unplaceable)

    def _hold(self, gpus: int, queue_name: str, asked_type: str | None, pool: str) -> Hold:
        pool_today = pools.pool_of(self.queues, queue_name, asked_type, pool)
        gpu_type = pools.kind_of(self.queues, asked_type, pool)
        queue = self.queues.find(queue_name)
        if queue is None or queue.cohort is None or pool_today not in queue.gpus:
            return Hold(gpus, queue_name, pool_today, gpu_type)
        return Hold(gpus, queue_name, pool_today, gpu_type, queue.cohort, queue.keeps(pool_today))

    def _count(self, hold: Hold, gpus: int) -> None:
        self._of_type[hold.gpu_type] += gpus
        before = self._held[hold.queue, hold.pool]
        self._held[hold.queue, hold.pool] = before + gpus
        if hold.cohort is not None:
            borrowed = max(0, before + gpus - hold.keeps) - max(0, before - hold.keeps)
            self._borrowed[hold.cohort, hold.pool] += borrowed


def _placed(lease: Lease) -> Placement:
    """Where its GPUs are; nowhere for a lease of a time when no nodes were declared."""
    return Placement(gang(lease.request, lease.pool), lease.nodes)
