"""The queues of the campaign, and its oracle, which adds up by hand."""

from collections import Counter
from collections.abc import Iterable

from support.builders.ledger import queues
from tiphys_plugin.quota.lease import Lease

QUOTAS = {"one": {"A100": 8}, "two": {"A100": 4, "*": 4}}
STOCK = {"A100": 10, "T4": 3}
RULES = queues({name: {"count": count} for name, count in STOCK.items()}, **QUOTAS)


def within_limits(leases: Iterable[Lease]) -> bool:
    """No quota and no stock exceeded, and nobody there twice."""
    by_pool: Counter[tuple[str, str]] = Counter()
    by_type: Counter[str] = Counter()
    keys: Counter[tuple[str, str, str]] = Counter()
    for lease in leases:
        request = lease.request
        kind = str(request.gpu_type)
        by_pool[request.queue, kind if kind in QUOTAS[request.queue] else "*"] += request.gpus
        by_type[kind] += request.gpus
        keys[request.key] += 1
    return (
        all(gpus <= QUOTAS[queue].get(pool, 0) for (queue, pool), gpus in by_pool.items())
        and all(gpus <= STOCK[kind] for kind, gpus in by_type.items())
        and all(times == 1 for times in keys.values())
    )
