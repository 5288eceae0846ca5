"""Quota, held GPUs and pending GPUs of each queue, for tables and metrics."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tiphys_plugin.quota.lease import LeaseRequest, LedgerState
from tiphys_plugin.quota.queues import QueueRules, Queues
from tiphys_plugin.quota.scheduler import pools
from tiphys_plugin.quota.scheduler.pool_options import list_eligible_pools

_GpuSums = Counter[tuple[str, str]]
"""GPUs by queue and pool."""


@dataclass(frozen=True)
class QueueUsage:
    """GPUs of one pool of a queue: a flavor, a type, or all types that the queue does not name (``*``)."""

    queue: str
    gpu_type: str
    quota: int | None
    """None: the queue declares no quota of this pool."""
    held: int
    pending: int
    max_gpus: int | None = None
    """Most GPUs that the queue may hold if its cohort lends enough; None without a quota."""
    stopped: bool = False

    @property
    def borrowed(self) -> int:
        """GPUs that are held beyond the quota."""
        return max(0, self.held - (self.quota or 0))

    @property
    def is_over_limit(self) -> bool:
        """Whether more is held than allowed, because the quota was lowered; lasts until leases end."""
        return self.held > (self.max_gpus or 0)


def compute_queue_usage(ledger_state: LedgerState) -> list[QueueUsage]:
    """Usage of every declared quota in the order of the queue file, then of pools without a quota.

    `MisconfiguredQueues` count as no declared quotas.
    """
    rules = ledger_state.queues
    held = _sum_gpus(rules, [(lease.request, lease.pool) for lease in ledger_state.leases])
    requests = [pending.request for pending in ledger_state.pending]
    pending = _sum_gpus(rules, [(request, _first_eligible_pool(rules, request)) for request in requests])
    declared = list(_declared_usage(rules, held, pending)) if isinstance(rules, Queues) else []
    declared_pools = {(usage.queue, usage.gpu_type) for usage in declared}
    undeclared_pools = sorted((held.keys() | pending.keys()) - declared_pools)
    return [*declared, *(QueueUsage(*key, None, held[key], pending[key]) for key in undeclared_pools)]


def _declared_usage(rules: Queues, held: _GpuSums, pending: _GpuSums) -> Iterator[QueueUsage]:
    for queue in rules.queues:
        for pool, quota in queue.gpus.items():
            key = (queue.name, pool)
            max_gpus = rules.max_gpus(queue, pool)
            yield QueueUsage(*key, quota, held[key], pending[key], max_gpus, queue.stopped)


def _first_eligible_pool(rules: QueueRules, request: LeaseRequest) -> str | None:
    """The flavor that a request prefers; None without flavors, or if it has no eligible pool."""
    queue = rules.find(request.queue) if isinstance(rules, Queues) and rules.flavors else None
    if not isinstance(rules, Queues) or queue is None:
        return None
    return next(iter(list_eligible_pools(rules, queue, request)), None)


def _sum_gpus(rules: QueueRules, requests: list[tuple[LeaseRequest, str | None]]) -> _GpuSums:
    gpus: _GpuSums = Counter()
    for request, gpu_kind in requests:
        gpus[request.queue, pools.find_pool(rules, request.queue, request.gpu_type, gpu_kind)] += request.gpus
    return gpus
