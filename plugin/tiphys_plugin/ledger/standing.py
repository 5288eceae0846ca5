"""What follows from leases and the past alone: the same for everybody who asks until one of them changes.

Thousands wait and ask again every few seconds, while leases come and go far
more rarely. So this is worked out once and remembered for as long as the leases
are the very same objects.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any

from tiphys_plugin.ledger.capacity import Capacity, Hold
from tiphys_plugin.ledger.model import Lease, LeaseRequest
from tiphys_plugin.ledger.shares import Consumed, Means
from tiphys_plugin.queues import Queues

End = tuple[datetime, Hold]


class Standing:
    """``held`` is what leases hold, ``means`` what queues have used lately. Read it, and copy before a change."""

    def __init__(self, queues: Queues, leases: Sequence[Lease], history: Sequence[Consumed]) -> None:
        self.held = Capacity(queues, leases)
        self.means = Means(queues, leases, history)
        self._ends: defaultdict[tuple[str, str], list[End]] = defaultdict(list)
        for lease in leases:
            end = end_of(lease.request, lease.granted_at)
            if end is not None:
                hold = self.held.hold(lease.request, lease.pool)
                self._ends[hold.account].append((end, hold))
        for ends in self._ends.values():
            ends.sort(key=end_time)

    @property
    def accounts(self) -> list[tuple[str, str]]:
        """Accounts (see `Hold`) in which ends are known."""
        return list(self._ends)

    def ends(self, account: tuple[str, str], now: datetime) -> Sequence[End]:
        """Known ends of an account, in order. One that should be over and is not may end at any time: not known."""
        known = self._ends.get(account, [])
        return known[bisect_right(known, now, key=end_time) :]


def standing(queues: Queues, leases: Sequence[Lease], history: Sequence[Consumed]) -> Standing:
    """Where these leases stand; remembered for the last few."""
    return _standing(_Same(queues, leases, history))


def end_of(request: LeaseRequest, since: datetime) -> datetime | None:
    """When a lease that began at ``since`` ends at the latest; None if nobody said."""
    return since + timedelta(seconds=request.seconds) if request.seconds is not None else None


def end_time(end: End) -> datetime:
    return end[0]


class _Same:
    """Arguments that are equal if they hold the very same objects, which takes no look at their content."""

    def __init__(self, queues: Queues, leases: Sequence[Lease], history: Sequence[Consumed]) -> None:
        self.arguments = (queues, leases, history)
        self._identities = (id(queues), tuple(map(id, leases)), tuple(map(id, history)))

    def __hash__(self) -> int:
        return hash(self._identities)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Same) and self._identities == other._identities


@lru_cache(maxsize=8)
def _standing(same: _Same) -> Standing:
    # The key keeps what it is made of alive, so no other object can come to have one of its identities.
    return Standing(*same.arguments)
