"""The book of the ledger: who holds GPUs and who waits, and what may happen to it.

Every rule about leases that is not the decision itself stands here and in
`admission`, as a function from one book to the next. Time and new names are
given. The backends only load a book, apply one transition, and store the
difference in one step; a transition that changes nothing gives an equal book.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from tiphys_plugin.quota.lease import Lease, LeaseRequest, Snapshot, Waiting
from tiphys_plugin.quota.queues import QueueRules
from tiphys_plugin.quota.scheduler import pools
from tiphys_plugin.quota.scheduler.fair_share import Consumed, ended


@dataclass(frozen=True)
class Book:
    """``waiting`` is in order of arrival. Nobody has two leases for one node, or two places for one step.

    ``history`` is what leases that are over have left in the means of their queues.
    """

    leases: tuple[Lease, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    history: tuple[Consumed, ...] = ()

    @property
    def next_arrival(self) -> int:
        """Number of whoever comes next. Numbers order those who wait, so one that nobody has may come again."""
        return self.waiting[-1].arrival + 1 if self.waiting else 1

    def snapshot(self, rules: QueueRules) -> Snapshot:
        return Snapshot(self.leases, self.waiting, rules, self.history)

    def restore(
        self,
        lease: str,
        request: LeaseRequest,
        gpu_type: str | None,
        nodes: tuple[str, ...],
        rules: QueueRules,
        now: datetime,
    ) -> "Book":
        """Record a lease that was given before, whether or not it fits; the same book if it is recorded."""
        if any(known.id == lease or known.request.key == request.key for known in self.leases):
            return self
        pool = gpu_type or pools.counted_against(rules, request, None)
        restored = Lease(lease, request, pool, granted_at=now, check_at=now, nodes=nodes)
        return replace(self, leases=(*self.leases, restored))

    def withdraw(self, uid: str) -> "Book":
        """Take the requests of a workflow out of the line."""
        return replace(self, waiting=tuple(one for one in self.waiting if one.request.uid != uid))

    def release(self, lease: str, rules: QueueRules, now: datetime) -> "Book":
        """Give the GPUs of a lease back."""
        return self._without([one for one in self.leases if one.id == lease], rules, now)

    def shrink(self, lease: str, members: int, nodes: tuple[str, ...], rules: QueueRules, now: datetime) -> "Book":
        """Give back what a lease holds for more than ``members``, which are left on ``nodes``."""
        held = next((one for one in self.leases if one.id == lease), None)
        if held is None or not 0 < members < held.request.members:
            return self
        if held.nodes and (len(nodes) != members or Counter(nodes) - Counter(held.nodes)):
            return self
        done = held.leaving is not None and held.leaving.keeps is not None and members <= held.leaving.keeps
        left = replace(
            held,
            request=held.request.of(members),
            nodes=nodes if held.nodes else (),
            leaving=None if done else held.leaving,
        )
        over = replace(held, request=held.request.of(held.request.members - members))
        leases = tuple(left if one is held else one for one in self.leases)
        return replace(self._promising([over], now), leases=leases, history=ended(self.history, [over], rules, now))

    def release_workflow(self, uid: str, now: datetime) -> "Book":
        """Withdraw a workflow and have its leases checked at once."""
        leases = tuple(replace(one, check_at=now) if one.request.uid == uid else one for one in self.leases)
        return replace(self.withdraw(uid), leases=leases)

    def due(self, now: datetime, check_every: timedelta) -> list[Lease]:
        """Leases to look at. A check further away than any that is ever set: the clock was put back since."""
        return [one for one in self.leases if one.check_at <= now or one.check_at > now + check_every]

    def checked(
        self, due: Collection[Lease], gone: Sequence[Lease], check_at: datetime, rules: QueueRules, now: datetime
    ) -> "Book":
        """Drop the leases that were found gone, and look at the others of ``due`` again at ``check_at``."""
        looked_at = {one.id for one in due}
        # One that serves another attempt by now is not the one that was looked at.
        over = {one.id: one.request for one in gone}
        kept = self._without([one for one in self.leases if over.get(one.id) == one.request], rules, now)
        leases = tuple(replace(one, check_at=check_at) if one.id in looked_at else one for one in kept.leases)
        return replace(kept, leases=leases)

    def asked_again(self, seen_at: Mapping[tuple[str, str, str], datetime]) -> "Book":
        """Those who wait, as seen at these times, by key, where that is later."""

        def latest(one: Waiting) -> Waiting:
            seen = seen_at.get(one.request.key, one.seen_at)
            return replace(one, seen_at=seen) if seen > one.seen_at else one

        return replace(self, waiting=tuple(map(latest, self.waiting)))

    def _without(self, over: Sequence[Lease], rules: QueueRules, now: datetime) -> "Book":
        if not over:
            return self
        gone = {one.id for one in over}
        leases = tuple(one for one in self.leases if one.id not in gone)
        return replace(self._promising(over, now), leases=leases, history=ended(self.history, over, rules, now))

    def _promising(self, over: Sequence[Lease], now: datetime) -> "Book":
        """With what comes free kept for those for whom others were asked to leave, who ask only every few seconds."""
        heirs = {(one.leaving.uid, one.leaving.step) for one in over if one.leaving is not None}
        if not heirs:
            return self

        def kept(one: Waiting) -> Waiting:
            return replace(one, promised_at=now) if (one.request.uid, one.request.step) in heirs else one

        return replace(self, waiting=tuple(map(kept, self.waiting)))

    def differs(self, earlier: "Book", patience: timedelta) -> bool:
        """Whether there is more to store than signs of life that are younger by less than ``patience``."""
        if self.leases != earlier.leases or len(self.waiting) != len(earlier.waiting):
            return True
        return any(
            replace(one, seen_at=other.seen_at) != other or abs(one.seen_at - other.seen_at) >= patience
            for one, other in zip(self.waiting, earlier.waiting, strict=True)
            if one is not other
        )
