"""Marking those who leave: one step of the book, which goes by what the book says at that instant.

Between a choice and its mark others start, end and go. So the laws are asked
again of the newest book, and nobody is marked unless they hold there as well.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta

from tiphys_plugin.ledger.admission import in_line
from tiphys_plugin.ledger.book import Book
from tiphys_plugin.ledger.decide import State
from tiphys_plugin.ledger.model import Lease, Waiting
from tiphys_plugin.preemption.choice import objection
from tiphys_plugin.preemption.surplus import asked, is_part, whole, with_parts
from tiphys_plugin.queues import QueueRules


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
