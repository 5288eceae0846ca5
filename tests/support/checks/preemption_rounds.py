"""A cluster in which nothing ever ends by itself: trainings wait, start, are asked to leave, go and wait again.

Only the book moves, by the same transitions that the ledgers store, so a search
can afford thousands of preemptions.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import count

from tiphys_plugin.quota.lease import Admitted, Lease, LeaseRequest, LedgerState, PendingRequest, hash_node_name
from tiphys_plugin.quota.ledger.transitions import admit_or_queue, find_preemptor, mark_victims, release
from tiphys_plugin.quota.preemption.victims import NoVictims, VictimSelection, select_victims
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler.cache import SchedulerCache

from support.builders.ledger import NOW

GRACE_SECONDS = 30.0
_PATIENCE = timedelta(days=1)


@dataclass(frozen=True)
class Mark:
    """What was decided, and the book that it was decided by."""

    before: LedgerState
    mine: PendingRequest
    victims: tuple[Lease, ...]
    now: datetime


class Arena:
    """``lost`` says what each attempt would lose, by uid; others lose one GPU-second for each GPU."""

    def __init__(self, rules: Queues, lost: Mapping[str, float] | None = None) -> None:
        self.book = LedgerState(queues=rules)
        self.cache = SchedulerCache(forget_after=_PATIENCE)
        self.now = NOW
        self.marks: list[Mark] = []
        self._lost = lost or {}
        self._names = (f"lease-{number}" for number in count())

    @property
    def rules(self) -> Queues:
        """The rules that the book goes by; tests may change them."""
        assert isinstance(self.book.queues, Queues)
        return self.book.queues

    @rules.setter
    def rules(self, rules: Queues) -> None:
        self.book = replace(self.book, queues=rules)

    def ask(self, request: LeaseRequest) -> object:
        """One that waits asks, or one that comes."""
        self.now += timedelta(seconds=1)
        self.book, answer = admit_or_queue(self.book, request, self.now, next(self._names), self.cache)
        return answer

    def all_ask(self) -> bool:
        """Everybody who waits asks, in the order of arrival; whether anybody started."""
        answers = [self.ask(one.request) for one in self.book.pending]
        return any(isinstance(answer, Admitted) for answer in answers)

    def choose(self, uid: str) -> VictimSelection | NoVictims | None:
        found = find_preemptor(self.book, (uid, "fit"), self.now, self.cache)
        return select_victims(*found, self.losses, self.now, cache=self.cache) if found is not None else None

    def losses(self, leases: Sequence[Lease]) -> dict[str, float]:
        return {one.id: self._lost.get(one.request.uid, float(one.request.gpus)) for one in leases}

    def look(self, most: int | None = None) -> int:
        """As the job of a service does it, or for so many of those who wait; how many were asked to leave."""
        asked = 0
        for one in sorted(self.book.pending, key=lambda one: (-one.request.priority, one.arrival)):
            chosen = self.choose(one.request.uid) if most is None or len(self.marks) < most else None
            if isinstance(chosen, VictimSelection):
                asked += len(self.mark(one.request.uid, chosen.leases))
        return asked

    def mark(self, uid: str, victims: Sequence[Lease]) -> tuple[Lease, ...]:
        before = self.book
        graces = {one.id: GRACE_SECONDS for one in victims}
        self.book, marked = mark_victims(before, (uid, "fit"), graces, self.now, self.cache)
        if marked:
            mine = next(one for one in before.pending if one.request.uid == uid)
            self.marks.append(Mark(before, mine, tuple(victims), self.now))
        return marked

    def leave(self, only: Container[str] | None = None) -> list[LeaseRequest]:
        """Those who were asked, or ``only`` these leases, are gone; their next attempts, which have not asked yet."""
        asked = [one for one in self.book.leases if one.preemption is not None]
        gone = [one for one in asked if only is None or one.id in only]
        self.now += timedelta(seconds=1)
        for one in gone:
            self.book = release(self.book, one.id, self.now, self.cache)
        return [_next(one.request) for one in gone]


def _next(request: LeaseRequest) -> LeaseRequest:
    attempt = request.attempt + 1
    node = f"{request.uid}.fit({attempt - 1}).admit"
    return replace(request, attempt=attempt, node_hash=hash_node_name(node))
