"""Held and free GPUs by queue, cohort, GPU kind and node, now or at a later instant.

A queue owns its quota. In a cohort it may also use free GPUs of the other queues,
up to its borrowing limit and their lending limits (Kueue's nominalQuota,
borrowingLimit and lendingLimit). Existing GPUs are a further limit where an
inventory is declared; declared nodes must also have room for each pod.

The scheduler decides by these numbers, and its messages quote the same numbers.
The leases are summed, so a query does not take longer with more leases.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tiphys_plugin.quota.lease import Lease, LeaseRequest
from tiphys_plugin.quota.placement.inventory import ClusterFreeCapacity
from tiphys_plugin.quota.placement.model import Placement
from tiphys_plugin.quota.placement.place import (
    PlacementFailure,
    find_placement,
    find_placement_by_preference,
    has_placement,
)
from tiphys_plugin.quota.queue import ANY_TYPE, Queue
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler import pools
from tiphys_plugin.quota.scheduler.pool_options import PoolOption, ResourceLimit, get_pool_options


class HeldGpus(NamedTuple):
    """GPUs of a lease as the present queues count them: the quota that they use, and their kind."""

    gpus: int
    queue: str
    pool: str
    gpu_type: str | None
    cohort: str | None = None
    """Cohort whose shared quota the GPUs may use; None if only the own queue is affected."""
    guaranteed_quota: int = 0
    """Quota of this pool that the queue does not lend."""
    placement: Placement | None = None
    """Nodes of the GPUs; None where no nodes are declared."""
    lenders: tuple[tuple[str, str], ...] = ()
    """Cohorts that the queue has left since the grant, and their pools: they lent what is beyond its own quota."""
    own_quota: int = 0
    """Quota of the queue for GPUs with `lenders`."""

    @property
    def quota_key(self) -> tuple[str, str]:
        """Cohort (or queue) and pool. GPUs with other quota keys affect this one only through the inventory."""
        if self.cohort is None and self.lenders:
            return self.lenders[0]
        return self.cohort or self.queue, self.pool


class Capacity:
    """Sums of the GPUs of ``leases`` under the quotas and the inventory of ``queues``."""

    def __init__(self, queues: Queues, leases: Sequence[Lease] = ()) -> None:
        self.queues = queues
        # Plain dicts: a scheduling cycle makes dozens of copies, and to copy a Counter takes ten times as long.
        self._held: dict[tuple[str, str], int] = {}
        self._borrowed: dict[tuple[str, str], int] = {}
        self._held_of_lender: dict[tuple[str, str, tuple[str, str]], int] = {}
        self._held_by_kind: dict[str | None, int] = dict(queues.foreign_gpus.items())
        self._held_in_total = sum(self._held_by_kind.values())
        self._held_gpus_cache: dict[tuple[str, str | None, str, str | None], HeldGpus] = {}
        self._free_capacity = None if queues.node_inventory is None else ClusterFreeCapacity(queues.node_inventory)
        gpus_by_key: Counter[tuple[str, str | None, str, str | None]] = Counter()
        for lease in leases:
            request = lease.request
            gpus_by_key[request.queue, request.gpu_type, lease.pool, request.cohort] += request.gpus
        for key, gpus in gpus_by_key.items():
            self.add(self._build_held_gpus(gpus, *key))
        if self._free_capacity is not None:
            for lease in leases:
                self._free_capacity.allocate(self._placement_of_lease(lease))

    def copy(self) -> "Capacity":
        """An independent copy."""
        twin = Capacity.__new__(Capacity)
        twin.queues, twin._held_gpus_cache = self.queues, self._held_gpus_cache
        twin._held, twin._borrowed = self._held.copy(), self._borrowed.copy()
        twin._held_of_lender = self._held_of_lender.copy()
        twin._held_by_kind, twin._held_in_total = self._held_by_kind.copy(), self._held_in_total
        twin._free_capacity = None if self._free_capacity is None else self._free_capacity.copy()
        return twin

    def held_gpus_of_request(self, request: LeaseRequest, pool: str) -> HeldGpus:
        """The GPUs of ``pool`` that ``request`` holds or would hold, without a placement."""
        key = (request.queue, request.gpu_type, pool, request.cohort)
        if (cached := self._held_gpus_cache.get(key)) is None:
            cached = self._held_gpus_cache[key] = self._build_held_gpus(request.gpus, *key)
        return cached if cached.gpus == request.gpus else cached._replace(gpus=request.gpus)

    def held_gpus_of_lease(self, lease: Lease) -> HeldGpus:
        """The GPUs of a lease, with their placement."""
        held_gpus = self.held_gpus_of_request(lease.request, lease.pool)
        return (
            held_gpus if self._free_capacity is None else held_gpus._replace(placement=self._placement_of_lease(lease))
        )

    def held_gpus_if_placed(self, request: LeaseRequest, pool: str) -> HeldGpus:
        """The GPUs that the request would hold if it started now in ``pool``, one of `find_fitting_pools`."""
        held_gpus, placement = self.held_gpus_of_request(request, pool), self.find_placement(request, pool)
        return held_gpus if not isinstance(placement, Placement) else held_gpus._replace(placement=placement)

    def find_placement(self, request: LeaseRequest, pool: str) -> Placement | PlacementFailure | None:
        """The nodes for the request in ``pool``, or why there are none; None where no nodes are declared."""
        if self._free_capacity is None:
            return None
        gang, policy = pools.build_gang_request(self.queues, request, pool), self.queues.placement_policy
        if gang.pod.gpu_types:
            return find_placement_by_preference(self._free_capacity, gang, policy)
        return find_placement(self._free_capacity, gang, policy)

    def add(self, held_gpus: HeldGpus) -> None:
        """Count ``held_gpus`` as held."""
        self._count(held_gpus, held_gpus.gpus)
        if self._free_capacity is not None and held_gpus.placement is not None:
            self._free_capacity.allocate(held_gpus.placement)

    def remove(self, held_gpus: HeldGpus) -> None:
        """Undo `add`."""
        self._count(held_gpus, -held_gpus.gpus)
        if self._free_capacity is not None and held_gpus.placement is not None:
            self._free_capacity.release(held_gpus.placement)

    def free_gpus_on(self, node: str) -> int:
        """Free whole GPUs of a node; 0 for one that is not declared."""
        return 0 if self._free_capacity is None else self._free_capacity.free_gpus_on(node)

    def held_in_pool(self, queue: Queue, pool: str) -> int:
        return self._held.get((queue.name, pool), 0)

    def remaining_quota(self, queue: Queue, pool: str) -> int:
        """Unused GPUs of the queue's own quota; negative while it borrows, or after its quota was lowered."""
        return queue.gpus[pool] - self.held_in_pool(queue, pool)

    def available_gpus(self, queue: Queue, pool: str) -> int:
        """GPUs that the queue may take now by quotas alone, borrowed GPUs included."""
        held = self.held_in_pool(queue, pool)
        if queue.cohort is None:
            return queue.gpus[pool] - held
        guaranteed = max(0, queue.guaranteed_quota(pool) - held)
        in_cohort = self.available_in_cohort(queue.cohort, pool)
        return int(min(guaranteed + in_cohort, queue.max_with_borrowing(pool) - held))

    def available_in_cohort(self, cohort: str, pool: str) -> int:
        """Unused GPUs that the queues of a cohort lend each other; negative after a quota was lowered."""
        return self.queues.lendable_gpus[cohort, pool] - self._borrowed.get((cohort, pool), 0)

    def free_inventory(self, request: LeaseRequest, pool: str) -> float:
        """Free GPUs of the inventory that the request could use in ``pool``; infinite without an inventory."""
        return self._free_inventory(
            pools.gpu_kind_in_pool(request, pool), pools.count_existing_gpus(self.queues, request, pool)
        )

    def _free_inventory(self, gpu_kind: str | None, existing: float) -> float:
        """Free GPUs of a kind (None: of any kind) of which ``existing`` exist."""
        if self.queues.gpu_inventory is None:
            return math.inf
        held = (
            self._held_in_total
            if gpu_kind is None
            else self._held_by_kind.get(gpu_kind, 0) + self._count_unattributed(gpu_kind)
        )
        return min(existing - held, self.queues.total_gpus - self._held_in_total)

    def _count_unattributed(self, gpu_kind: str) -> int:
        """Held GPUs that may or may not be of a flavor, because theirs was removed, or declared after the grant."""
        if not self.queues.flavors:
            return 0
        flavor_set = self.queues.flavor_set
        declared_kinds = {*(self.queues.gpu_inventory or {}), *flavor_set.by_name}
        gpu_type = flavor_set.gpu_type_of(gpu_kind)
        return sum(
            gpus
            for kind, gpus in self._held_by_kind.items()
            if kind not in declared_kinds and (kind is None or flavor_set.is_unflavored(kind) or kind == gpu_type)
        )

    @property
    def exceeds_inventory(self) -> bool:
        """Whether more GPUs of a kind are held than exist, because the inventory was lowered."""
        inventory = self.queues.gpu_inventory or {}
        return any(
            self._held_by_kind.get(kind, 0) + self._count_unattributed(kind) > entry.count
            for kind, entry in inventory.items()
        )

    def find_fitting_pools(self, queue: Queue, request: LeaseRequest) -> list[str]:
        """Pools that could serve the request now, the best first.

        Pools within the queue's own quota come before borrowed ones, then the types that the request names, and
        flavors, in their order. Without either, the pool with the fewest available GPUs comes first, so that large
        requests keep room.
        """

        def rank(pool: str) -> tuple[bool, int, str]:
            return self.remaining_quota(queue, pool) < request.gpus, self.available_gpus(queue, pool), pool

        options = get_pool_options(self.queues, queue, request).options
        fitting = [option.pool for option in options if self._can_serve(queue, request.gpus, option)]
        if len(fitting) < 2:
            return fitting
        if self.queues.flavors or request.gpu_types:
            return sorted(fitting, key=lambda pool: self.remaining_quota(queue, pool) < request.gpus)
        return sorted(fitting, key=rank)

    def fits(self, queue: Queue, request: LeaseRequest) -> bool:
        """Whether one of its pools could serve the request now."""
        options = get_pool_options(self.queues, queue, request).options
        return any(self._can_serve(queue, request.gpus, option) for option in options)

    def find_missing_limits(self, queue: Queue, request: LeaseRequest) -> frozenset[ResourceLimit]:
        """The limits that the request lacks in any of its pools; empty if one pool could serve it."""
        missing_in_any: set[ResourceLimit] = set()
        for option in get_pool_options(self.queues, queue, request).options:
            missing = self._missing_limits(queue, request.gpus, option)
            if not missing:
                return frozenset()
            missing_in_any |= missing
        return frozenset(missing_in_any)

    def find_consumed_limits(self, queue: Queue, request: LeaseRequest, pool: str) -> frozenset[ResourceLimit]:
        """The limits that a lease of ``pool`` for the request would use up."""
        options = get_pool_options(self.queues, queue, request).options
        option = next(option for option in options if option.pool == pool)
        held_after = self.held_in_pool(queue, pool) + request.gpus
        borrows = queue.cohort is not None and held_after > queue.guaranteed_quota(pool)
        return option.borrowing_limits if borrows else option.own_limits

    def _can_serve(self, queue: Queue, gpus: int, option: PoolOption) -> bool:
        """Whether there are no `_missing_limits`; cheaper than these."""
        if (
            self.available_gpus(queue, option.pool) < gpus
            or self._free_inventory(option.gpu_kind, option.existing_gpus) < gpus
        ):
            return False
        return not self._cannot_be_placed(option)

    def _missing_limits(self, queue: Queue, gpus: int, option: PoolOption) -> set[ResourceLimit]:
        missing: set[ResourceLimit] = set()
        if gpus > queue.max_with_borrowing(option.pool) - self.held_in_pool(queue, option.pool):
            missing.add(ResourceLimit("queue", queue.name, option.pool))
        elif queue.cohort is not None and self.available_gpus(queue, option.pool) < gpus:
            missing.add(ResourceLimit("cohort", queue.cohort, option.pool))
            if self.held_in_pool(queue, option.pool) < queue.guaranteed_quota(option.pool):
                # Released GPUs of the guaranteed quota would also help.
                missing.add(ResourceLimit("queue", queue.name, option.pool))
        if self._free_inventory(option.gpu_kind, option.existing_gpus) < gpus or (
            not missing and self._cannot_be_placed(option)
        ):
            missing |= option.inventory_limits
        return missing

    def _cannot_be_placed(self, option: PoolOption) -> bool:
        return self._free_capacity is not None and not has_placement(
            self._free_capacity, option.gang, self.queues.placement_policy
        )

    def _build_held_gpus(
        self, gpus: int, queue_name: str, requested_type: str | None, pool: str, granted_cohort: str | None
    ) -> HeldGpus:
        current_pool = pools.find_pool(self.queues, queue_name, requested_type, pool)
        gpu_kind = pools.find_held_kind(self.queues, requested_type, pool)
        queue = self.queues.find(queue_name)
        held = HeldGpus(gpus, queue_name, current_pool, gpu_kind)
        own_quota = 0 if queue is None else queue.gpus.get(current_pool, 0)
        if queue is not None and queue.cohort is not None and current_pool in queue.gpus:
            held = held._replace(cohort=queue.cohort, guaranteed_quota=queue.guaranteed_quota(current_pool))
        if granted_cohort == "" or (held.cohort and granted_cohort in (None, held.cohort)):
            return held
        return held._replace(lenders=tuple(self._find_lenders(granted_cohort, gpu_kind)), own_quota=own_quota)

    def _find_lenders(self, cohort: str | None, gpu_kind: str | None) -> Iterator[tuple[str, str]]:
        """The cohort (None: each) with its pool for GPUs of this kind, if it lends such."""
        lendable = self.queues.lendable_gpus
        for lender in dict.fromkeys(name for name, _ in lendable if cohort in (None, name)):
            yield from [(lender, pool) for pool in (gpu_kind, ANY_TYPE) if pool and (lender, pool) in lendable][:1]

    def _count(self, held_gpus: HeldGpus, gpus: int) -> None:
        _, queue, pool, gpu_type, cohort, guaranteed, _, lenders, own_quota = held_gpus
        self._held_by_kind[gpu_type] = self._held_by_kind.get(gpu_type, 0) + gpus
        self._held_in_total += gpus
        before = self._held.get((queue, pool), 0)
        self._held[queue, pool] = before + gpus
        if cohort is not None:
            borrowed = max(0, before + gpus - guaranteed) - max(0, before - guaranteed)
            self._borrowed[cohort, pool] = self._borrowed.get((cohort, pool), 0) + borrowed
        for lender in lenders:
            before = self._held_of_lender.get((queue, pool, lender), 0)
            self._held_of_lender[queue, pool, lender] = before + gpus
            borrowed = max(0, before + gpus - own_quota) - max(0, before - own_quota)
            self._borrowed[lender] = self._borrowed.get(lender, 0) + borrowed

    def _placement_of_lease(self, lease: Lease) -> Placement:
        """The nodes of a lease; none for a lease that was granted before nodes were declared."""
        return Placement(pools.build_gang_request(self.queues, lease.request, lease.pool), lease.nodes)
