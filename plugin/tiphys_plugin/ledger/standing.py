"""What follows from leases and the past alone: the same for everybody who asks until one of them changes.

Thousands wait and ask again every few seconds, while leases come and go far
more rarely, and only few of them at once. So this is worked out once, remembered
for as long as the leases are the same, and brought up to date by the few that
are not.
"""

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime, timedelta

from tiphys_plugin.ledger.capacity import Capacity, Hold
from tiphys_plugin.ledger.latest import Latest
from tiphys_plugin.ledger.model import Lease, LeaseRequest
from tiphys_plugin.ledger.shares import Consumed, Means
from tiphys_plugin.queues import Queues

End = tuple[datetime, Hold]


class Standing:
    """``held`` is what leases hold, ``means`` what queues have used lately. Read it, and copy before a change."""

    def __init__(self, queues: Queues, leases: Sequence[Lease] = (), history: Sequence[Consumed] = ()) -> None:
        self.queues = queues
        self.leases = tuple(leases)
        self.history = tuple(history)
        self.held = Capacity(queues, leases)
        self.means = Means(queues, leases, history)
        self._ends: defaultdict[tuple[str, str], list[End]] = defaultdict(list)
        self._promised = _promised(leases)
        for lease in leases:
            if (end := lease_end(lease)) is not None:
                hold = self.held.hold_of(lease)
                self._ends[hold.account].append((end, hold))
        for ends in self._ends.values():
            ends.sort(key=end_time)

    def is_of(self, queues: Queues, leases: Sequence[Lease], history: Sequence[Consumed]) -> bool:
        """Whether it follows from these."""
        return self.queues is queues and self.leases == tuple(leases) and self.history == tuple(history)

    def after(self, leases: Sequence[Lease], history: Sequence[Consumed]) -> "Standing | None":
        """The same, once these are the leases; None if too much is different for that to be worth while."""
        now, before = set(map(id, leases)), set(map(id, self.leases))
        come = [one for one in leases if id(one) not in before]
        gone = [one for one in self.leases if id(one) not in now]
        if 4 * (len(come) + len(gone)) > len(self.leases):
            return None
        twin = Standing.__new__(Standing)
        twin.queues, twin.leases, twin.history = self.queues, tuple(leases), tuple(history)
        anybody_leaves = self._promised or any(one.leaving for one in come)
        twin._promised = _promised(leases) if anybody_leaves else self._promised
        twin.held, twin.means = self.held.copy(), self.means.after(come, gone, history)
        twin._ends = defaultdict(list, {account: ends.copy() for account, ends in self._ends.items()})
        for lease in gone:
            twin._forget(lease)
        for lease in come:
            twin._add(lease)
        return twin

    @property
    def accounts(self) -> list[tuple[str, str]]:
        """Accounts (see `Hold`) in which ends are known."""
        return list(self._ends)

    def ends(self, account: tuple[str, str], now: datetime) -> Sequence[End]:
        """Known ends of an account, in order. One that should be over and is not may end at any time: not known."""
        known = self._ends.get(account, [])
        return known[bisect_right(known, now, key=end_time) :]

    @property
    def promises(self) -> bool:
        """Whether somebody was asked to leave for anybody."""
        return bool(self._promised)

    def is_promised(self, request: LeaseRequest) -> bool:
        """Whether somebody was asked to leave for it."""
        return bool(self._promised) and (request.uid, request.step) in self._promised

    def _add(self, lease: Lease) -> None:
        hold = self.held.hold_of(lease)
        self.held.take(hold)
        if (end := lease_end(lease)) is not None:
            insort(self._ends[hold.account], (end, hold), key=end_time)

    def _forget(self, lease: Lease) -> None:
        hold = self.held.hold_of(lease)
        self.held.give_back(hold)
        if (end := lease_end(lease)) is not None:
            ends = self._ends[hold.account]
            first = bisect_left(ends, end, key=end_time)
            del ends[ends.index((end, hold), first)]


def standing(queues: Queues, leases: Sequence[Lease], history: Sequence[Consumed]) -> Standing:
    """Where these leases stand; remembered for the last few."""
    known = _latest_states.find(lambda one: one.is_of(queues, leases, history))
    if known is None:
        last = _latest_states.newest
        known = last.after(leases, history) if last is not None and last.queues is queues else None
        known = _latest_states.remember(known or Standing(queues, leases, history))
    return known


def end_of(request: LeaseRequest, since: datetime) -> datetime | None:
    """When a lease that began at ``since`` ends at the latest; None if nobody said."""
    return since + timedelta(seconds=request.seconds) if request.seconds is not None else None


def lease_end(lease: Lease) -> datetime | None:
    """When a lease ends at the latest, by what was declared or because it was asked to leave; None: not known."""
    declared = end_of(lease.request, lease.granted_at)
    if lease.leaving is None or lease.leaving.keeps is not None:
        return declared
    return lease.leaving.deadline if declared is None else min(declared, lease.leaving.deadline)


def end_time(end: End) -> datetime:
    return end[0]


_latest_states: Latest[Standing] = Latest(8)


def _promised(leases: Sequence[Lease]) -> frozenset[tuple[str, str]]:
    return frozenset((one.leaving.uid, one.leaving.step) for one in leases if one.leaving is not None)
