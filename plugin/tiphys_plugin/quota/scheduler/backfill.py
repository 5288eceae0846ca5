"""What is kept for a request that is next and does not fit: the core of a bounded wait.

If it is known when enough comes free, others may start before it as far as that
does not delay it. If not, nobody behind it may take what it lacks.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from itertools import count, groupby, islice

from tiphys_plugin.quota.lease import LeaseRequest, Waiting
from tiphys_plugin.quota.queues import ANY_TYPE, Queue
from tiphys_plugin.quota.scheduler.capacity import Capacity, Hold
from tiphys_plugin.quota.scheduler.pools import Limit

End = tuple[datetime, Hold]


@dataclass(frozen=True)
class Scope:
    """Which holds can make a difference to a request: of its ``accounts`` (see `Hold`), or of GPUs that it could have.

    ``types`` are those of the GPUs that it could have, where GPUs that exist are
    a limit; empty where they are not.
    """

    accounts: frozenset[tuple[str, str]]
    types: frozenset[str] = frozenset()

    def has(self, hold: Hold) -> bool:
        return hold.account in self.accounts or (hold.gpu_type in self.types if hold.gpu_type else bool(self.types))

    def may_have(self, account: tuple[str, str]) -> bool:
        """Whether any hold of an account may be in it."""
        _, pool = account
        return account in self.accounts or (pool in self.types if pool != ANY_TYPE else bool(self.types))


NOWHERE = Scope(frozenset())


def first_fit(then: Capacity, ends: Iterable[End], queue: Queue, request: LeaseRequest) -> datetime | None:
    """When the request fits first, if holds come back at ``ends``, in order; ``then`` is left as it is at that time.

    None if it never does. What has come back makes nothing worse, so the time
    is searched in strides that grow and then shrink, and not looked for at each end.
    """
    instants = (list(over) for _, over in groupby(ends, key=lambda end: end[0]))
    for length in (2**power for power in count()):
        stride = list(islice(instants, length))
        for over in stride:
            _give_back(then, over)
        if not stride:
            return None
        if then.fits(queue, request):
            return _last_needed(then, stride, queue, request)
    raise AssertionError("the strides came to an end before the ends did")


def _last_needed(then: Capacity, stride: list[list[End]], queue: Queue, request: LeaseRequest) -> datetime:
    """The first instant of ``stride`` after which it fits; all of them have come back, and before it did not fit."""
    needed, back = len(stride), len(stride)
    too_few = 0
    while needed - too_few > 1:
        middle = (too_few + needed) // 2
        _move(then, stride, back, middle)
        back = middle
        if then.fits(queue, request):
            needed = middle
        else:
            too_few = middle
    _move(then, stride, back, needed)
    return stride[needed - 1][0][0]


def _move(then: Capacity, stride: list[list[End]], back: int, to: int) -> None:
    """Have the first ``to`` instants of the stride be over, where the first ``back`` were."""
    for over in stride[back:to]:
        _give_back(then, over)
    for over in stride[to:back]:
        for _, hold in over:
            then.take(hold)


def _give_back(then: Capacity, over: list[End]) -> None:
    for _, hold in over:
        then.give_back(hold)


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
    scope: Scope = NOWHERE
    is_promised: bool = False
    """Whether others leave for it: for several of them at once, so that only they may count on what comes free."""

    def is_delayed_by(self, hold: Hold, draws: frozenset[Limit], end: datetime | None, *, is_promised: bool) -> bool:
        """Whether a lease from now to ``end`` would keep the reserved request from starting when it is expected to.

        ``is_promised`` if others leave for the request that wants it, too.
        """
        if self.start is None or self.then is None:
            return bool(draws & self.short)
        if (end is not None and end <= self.start) or not self.scope.has(hold):
            return False
        if self.is_promised and not is_promised and draws & self.short:
            return True
        self.then.take(hold)
        delayed = not self.then.fits(self.queue, self.waiting.request)
        self.then.give_back(hold)
        return delayed
