"""A request meets the book: take over what was left, or queue up, decide and record.

Split from `decide` because this is about who asks (again), and that about who
may have how many.

Marking those who leave: one step of the book, which goes by what the book says at that instant.

Between a choice and its mark others start, end and go. So the laws are asked
again of the newest book, and nobody is marked unless they hold there as well.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta

from tiphys_plugin.quota.lease import Admission, Admitted, Deferred, Lease, LeaseRequest, Waiting
from tiphys_plugin.quota.ledger.state import Book
from tiphys_plugin.quota.preemption.victims import asked, is_part, objection, whole, with_parts
from tiphys_plugin.quota.queues import QueueRules, Queues
from tiphys_plugin.quota.scheduler.decide import State, decide
from tiphys_plugin.quota.scheduler.fair_share import as_it_counts

FORGET_AFTER = timedelta(minutes=2)
"""Who waits and has not asked for so long stands in nobody's way."""


def admit(
    book: Book, rules: QueueRules, request: LeaseRequest, now: datetime, lease: str, forget_after: timedelta
) -> tuple[Book, Admission]:
    """Decide on ``request``; the book with the decision in it. ``lease`` is the name of the lease if one is given.

    A waiting request that has not asked for ``forget_after`` stands in nobody's
    way; it keeps its place in case it comes back.
    """
    after, answer = _answer(book, rules, request, now, lease, forget_after)
    if isinstance(answer, Admitted) and isinstance(rules, Queues):
        answer = replace(answer, flavor=rules.kinds.by_name.get(answer.pool))
    return after, answer


def _answer(
    book: Book, rules: QueueRules, request: LeaseRequest, now: datetime, lease: str, forget_after: timedelta
) -> tuple[Book, Admission]:
    request = as_it_counts(rules, request)
    if (held := _left_for(book, request)) is not None:
        return _hand_over(book, held, request), _given(held)
    mine = _place(book, request, now)
    others = tuple(one for one in book.waiting if _step(one.request) != _step(request))
    alive = in_line(others, now, forget_after)
    taken, answer = _as_many_as_fit(State(rules, book.leases, alive, book.history), mine, now)
    match answer:
        case Admitted():
            given = Lease(lease, taken, answer.pool, granted_at=now, check_at=now, nodes=answer.nodes)
            waited = (now - mine.since).total_seconds()
            return replace(book, leases=(*book.leases, given), waiting=others), replace(
                _given(given), waited_seconds=waited
            )
        case Deferred():
            line = tuple(sorted((*others, mine), key=lambda one: one.arrival))
            return replace(book, waiting=line), answer
    return replace(book, waiting=others), answer


def _as_many_as_fit(state: State, mine: Waiting, now: datetime) -> tuple[LeaseRequest, Admission]:
    """Decide on a request; an elastic one that may start takes as many members as may start at once.

    It waits as the fewest that it can do with: nobody has to leave, and nothing
    is kept, for those that it would only like to have.
    """
    answer = decide(state, mine.request, mine.arrival, now, mine.promised_at)
    if isinstance(answer, Admitted):
        for larger in mine.request.larger:
            if isinstance(more := decide(state, larger, mine.arrival, now, mine.promised_at), Admitted):
                return larger, more
    return mine.request, answer


def _given(lease: Lease) -> Admitted:
    members = lease.request.members if lease.request.max_members is not None else None
    return Admitted(lease=lease.id, pool=lease.pool, nodes=lease.nodes, members=members)


def in_line(waiting: Iterable[Waiting], now: datetime, forget_after: timedelta) -> tuple[Waiting, ...]:
    """Those who have asked lately."""
    return tuple(one for one in waiting if now - one.seen_at <= forget_after)


def _left_for(book: Book, request: LeaseRequest) -> Lease | None:
    """The lease that this node was given before, or that another node of this attempt left behind.

    A node that dies between its lease and its claim leaves GPUs that nobody
    uses and that no look at pods can find. The next try asks for the same
    attempt, and would wait for them until its own workflow ends.
    """
    leases = [lease for lease in book.leases if _step(lease.request) == _step(request)]
    own = [lease for lease in leases if lease.request.node == request.node]
    left = [lease for lease in leases if lease.request.attempt == request.attempt]
    return next(iter(own + left), None)


def _hand_over(book: Book, held: Lease, request: LeaseRequest) -> Book:
    """Attempt and node of a lease are what its pods and its end are looked up by."""
    now_for = replace(held.request, node=request.node, attempt=request.attempt)
    if now_for == held.request:
        return book
    taken = replace(held, request=now_for)
    return replace(book, leases=tuple(taken if one is held else one for one in book.leases))


def _place(book: Book, request: LeaseRequest, now: datetime) -> Waiting:
    """The place of the request in the line; a new try of the step keeps that of the one before."""
    before = next((one for one in book.waiting if _step(one.request) == _step(request)), None)
    if before is None:
        return Waiting(request, book.next_arrival, since=now, seen_at=now)
    # The very same object is known to want the same as before, see `same`.
    return replace(before, request=before.request if before.request == request else request, seen_at=now)


def _step(request: LeaseRequest) -> tuple[str, str]:
    return (request.uid, request.step)


def mark(
    book: Book,
    rules: QueueRules,
    waiting: tuple[str, str],
    grace_seconds: Mapping[str, float],
    now: datetime,
    forget_after: timedelta,
) -> tuple[Book, tuple[Lease, ...]]:
    """The book in which these leases leave for the step (uid, step) that waits, and the leases; else the same and none.

    ``grace_seconds`` names the leases, or members that they can spare, by id, and how long each may take.
    """
    found = case_of(book, rules, waiting, now, forget_after)
    if found is None:
        return book, ()
    state, mine = found
    if any(map(is_part, grace_seconds)):
        state = with_parts(state)
    victims = [one for one in state.leases if one.id in grace_seconds]
    if len(victims) < len(grace_seconds) or objection(state, mine, victims, now) is not None:
        return book, ()
    going: defaultdict[str, list[Lease]] = defaultdict(list)
    for victim in victims:
        going[whole(victim.id)].append(victim)

    def marked(one: Lease) -> Lease:
        if one.id not in going:
            return one
        grace = timedelta(seconds=max(grace_seconds[victim.id] for victim in going[one.id]))
        return asked(one, going[one.id], waiting, now, grace)

    after = replace(book, leases=tuple(map(marked, book.leases)))
    return after, tuple(one for one in after.leases if one.id in going)


def case_of(
    book: Book, rules: QueueRules, waiting: tuple[str, str], now: datetime, forget_after: timedelta
) -> tuple[State, Waiting] | None:
    """A request that waits and those around it; None if it does not wait, or has not asked lately."""
    alive = in_line(book.waiting, now, forget_after)
    mine = next((one for one in alive if (one.request.uid, one.request.step) == waiting), None)
    if mine is None:
        return None
    others = tuple(one for one in alive if one is not mine)
    return State(rules, book.leases, others, book.history), mine
