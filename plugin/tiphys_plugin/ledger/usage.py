"""What each queue may hold, holds and waits for: the numbers that people look at."""

from collections import Counter
from dataclasses import dataclass

from tiphys_plugin.ledger import pools
from tiphys_plugin.ledger.book import Book
from tiphys_plugin.ledger.model import LeaseRequest
from tiphys_plugin.queues import QueueRules, Queues


@dataclass(frozen=True)
class Usage:
    """GPUs of one type, or of all types that the queue does not name (``*``)."""

    queue: str
    gpu_type: str
    quota: int | None
    """None: no such quota is declared."""
    held: int
    waiting: int

    @property
    def exceeded(self) -> bool:
        """More is held than may be; so it stays until leases end."""
        return self.held > (self.quota or 0)


def usage(rules: QueueRules, book: Book) -> list[Usage]:
    """Every declared quota, in the order of the queue file, and whatever else is held or waited for.

    Under rules that cannot be read no quota is known, as if none were declared.
    """
    quotas = _quotas(rules)
    held, waiting = _held(rules, book), _waiting(rules, book)
    rest = sorted((held.keys() | waiting.keys()) - quotas.keys())
    return [Usage(*place, quotas.get(place), held[place], waiting[place]) for place in [*quotas, *rest]]


def _quotas(rules: QueueRules) -> dict[tuple[str, str], int]:
    declared = rules.queues if isinstance(rules, Queues) else ()
    return {(queue.name, pool): quota for queue in declared for pool, quota in queue.gpus.items()}


def _held(rules: QueueRules, book: Book) -> Counter[tuple[str, str]]:
    return _sum(rules, [(lease.request, lease.pool) for lease in book.leases])


def _waiting(rules: QueueRules, book: Book) -> Counter[tuple[str, str]]:
    return _sum(rules, [(one.request, None) for one in book.waiting])


def _sum(rules: QueueRules, requests: list[tuple[LeaseRequest, str | None]]) -> Counter[tuple[str, str]]:
    gpus: Counter[tuple[str, str]] = Counter()
    for request, chosen in requests:
        gpus[request.queue, pools.counted_against(rules, request, chosen)] += request.gpus
    return gpus
