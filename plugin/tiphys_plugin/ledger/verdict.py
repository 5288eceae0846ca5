"""What one look along the line has found: who may start, and how it stands with all others.

Thousands wait and ask again every few seconds, and between two changes of the
book the same look answers all of them. So it is kept whole, and what a person
wants to know (who is ahead, which place) is worked out from it when somebody asks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

from tiphys_plugin.ledger.capacity import Capacity
from tiphys_plugin.ledger.model import LeaseRequest, Waiting
from tiphys_plugin.ledger.reservation import Reservation
from tiphys_plugin.ledger.terms import Limit

Rank = tuple[bool, bool, int, float, int]
"""Nobody was asked to leave for it, nor for one behind it; borrows, priority from the highest, share of the queue,
arrival."""


@dataclass(frozen=True)
class Verdict:
    """How it stands with a request, and with all that want the same and come after it, while it has to wait.

    ``pool`` is what it may start on; None if it has to wait: then ``reserved`` says for whom what it wants is kept.
    """

    uses: frozenset[Limit]
    """What others may lack because of it."""
    pool: str | None = None
    nodes: tuple[str, ...] = ()
    """The node of each member, where nodes are declared."""
    reserved: Reservation | None = None
    start: datetime | None = None
    """When it will fit, if it is the one that something is kept for."""


class Start(NamedTuple):
    """Who may start, on GPUs of which pool, and on which nodes, where nodes are declared."""

    waiting: Waiting
    pool: str
    nodes: tuple[str, ...] = ()


class Seen(NamedTuple):
    """A request, its place among all, and what came of it."""

    rank: Rank
    waiting: Waiting
    verdict: Verdict

    @property
    def is_promised(self) -> bool:
        """Whether somebody was asked to leave for it."""
        return not self.rank[0]


@dataclass(frozen=True)
class Turn:
    """How it stands with one request when its turn has come.

    ``pool`` is what it may start on; None if it has to wait. ``position`` counts from 1 those that want what it
    wants, ``first`` is the first of them before it; ``reserved`` is for whom what it wants is kept.
    """

    pool: str | None
    nodes: tuple[str, ...]
    position: int
    first: Seen | None
    reserved: Reservation | None
    start: datetime | None
    """When it is expected to start, where that can be said."""
    held: Capacity
    """What leases hold, without those who only could start."""
    is_promised: bool
    """Whether somebody was asked to leave for it."""


@dataclass(frozen=True)
class Look:
    """Everybody who was looked at, with rank and verdict; ``held`` is what leases hold."""

    seen: tuple[Seen, ...]
    held: Capacity
    wants: Callable[[LeaseRequest], frozenset[Limit]]

    @property
    def starts(self) -> Iterator[Start]:
        """Who may start, in the order of their turns."""
        given = ((one, verdict) for _, one, verdict in self.seen)
        return (Start(one, verdict.pool, verdict.nodes) for one, verdict in given if verdict.pool is not None)

    def turn(self, arrival: int) -> Turn:
        """How it stands with the request that arrived as this number, which was looked at."""
        place, one, verdict = self._places[arrival]
        wanted = self.wants(one.request)
        ahead = [before for before in self._in_order[:place] if not wanted.isdisjoint(before.verdict.uses)]
        first = ahead[0] if ahead else None
        return Turn(
            verdict.pool,
            verdict.nodes,
            len(ahead) + 1,
            first,
            verdict.reserved,
            verdict.start,
            self.held,
            self._in_order[place].is_promised,
        )

    @cached_property
    def _in_order(self) -> list[Seen]:
        return sorted(self.seen, key=itemgetter(0))

    @cached_property
    def _places(self) -> dict[int, tuple[int, Waiting, Verdict]]:
        return {one.arrival: (place, one, verdict) for place, (_, one, verdict) in enumerate(self._in_order)}
