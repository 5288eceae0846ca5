"""What is kept for a request that is next and does not fit: the core of a bounded wait.

If it is known when enough comes free, others may start before it as far as that
does not delay it. If not, nobody behind it may take what it lacks.
"""

from dataclasses import dataclass
from datetime import datetime

from tiphys_plugin.ledger.capacity import Capacity, Hold, Limit
from tiphys_plugin.ledger.model import Waiting
from tiphys_plugin.queues import Queue


@dataclass(frozen=True)
class Reservation:
    """What is kept for a request that is next and does not fit: ``short`` is what it lacks.

    ``start`` is when it will fit, and ``then`` what is held at that time; both
    are None if an end that matters is not known.
    """

    waiting: Waiting
    queue: Queue
    short: frozenset[Limit]
    start: datetime | None = None
    then: Capacity | None = None
    accounts: frozenset[tuple[str, str]] | None = None
    """Accounts (see `Hold`) that it counts in; None where an inventory makes everything count."""

    def is_delayed_by(self, hold: Hold, draws: frozenset[Limit], end: datetime | None) -> bool:
        """Whether a lease from now to ``end`` would keep the reserved request from starting when it is expected to."""
        if self.start is None or self.then is None:
            return bool(draws & self.short)
        if (end is not None and end <= self.start) or (self.accounts is not None and hold.account not in self.accounts):
            return False
        self.then.take(hold)
        delayed = not self.then.fitting(self.queue, self.waiting.request)
        self.then.give_back(hold)
        return delayed
