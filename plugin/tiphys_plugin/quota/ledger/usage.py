"""What each queue may hold, holds and waits for: the numbers that people look at."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tiphys_plugin.quota.lease import LeaseRequest
from tiphys_plugin.quota.ledger.state import Book
from tiphys_plugin.quota.queues import QueueRules, Queues
from tiphys_plugin.quota.scheduler import pools

_Sums = Counter[tuple[str, str]]
"""GPUs by queue and pool."""


@dataclass(frozen=True)
class Usage:
    """GPUs of one flavor or type, or of all types that the queue does not name (``*``)."""

    queue: str
    gpu_type: str
    quota: int | None
    """None: no such quota is declared."""
    held: int
    waiting: int
    most: int | None = None
    """What may be held if the cohort lends it; None without a quota."""
    stopped: bool = False

    @property
    def borrowed(self) -> int:
        """What is held beyond the quota."""
        return max(0, self.held - (self.quota or 0))

    @property
    def exceeded(self) -> bool:
        """More is held than may be; so it stays until leases end."""
        return self.held > (self.most or 0)


def usage(rules: QueueRules, book: Book) -> list[Usage]:
    """Every declared quota, in the order of the queue file, and whatever else is held or waited for.

    Under rules that cannot be read no quota is known, as if none were declared.
    """
    held, waiting = _held(rules, book), _waiting(rules, book)
    declared = list(_declared(rules, held, waiting)) if isinstance(rules, Queues) else []
    known = {(one.queue, one.gpu_type) for one in declared}
    rest = sorted((held.keys() | waiting.keys()) - known)
    return [*declared, *(Usage(*place, None, held[place], waiting[place]) for place in rest)]


def _declared(rules: Queues, held: _Sums, waiting: _Sums) -> Iterator[Usage]:
    for queue in rules.queues:
        for pool, quota in queue.gpus.items():
            place = (queue.name, pool)
            most = rules.most(queue, pool)
            yield Usage(*place, quota, held[place], waiting[place], most, queue.stopped)


def _held(rules: QueueRules, book: Book) -> _Sums:
    return _sum(rules, [(lease.request, lease.pool) for lease in book.leases])


def _waiting(rules: QueueRules, book: Book) -> _Sums:
    return _sum(rules, [(one.request, _first_choice(rules, one.request)) for one in book.waiting])


def _first_choice(rules: QueueRules, request: LeaseRequest) -> str | None:
    """The flavor that a request would rather have than the others; None where it draws from none by name."""
    queue = rules.find(request.queue) if isinstance(rules, Queues) and rules.flavors else None
    if not isinstance(rules, Queues) or queue is None:
        return None
    return next(iter(pools.of(rules, queue, request)), None)


def _sum(rules: QueueRules, requests: list[tuple[LeaseRequest, str | None]]) -> _Sums:
    gpus: _Sums = Counter()
    for request, chosen in requests:
        gpus[request.queue, pools.counted_against(rules, request, chosen)] += request.gpus
    return gpus
