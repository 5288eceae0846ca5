"""Which trainings go, so that a request starts: those that lose the fewest GPU-seconds, and none too many.

A pure function of what the ledger holds. Whether the request starts once they
are gone is asked of the decision on GPUs itself, places included, so that nobody
ever goes for nothing.

An elastic training as those members that it needs, and each that it could do without.

So the choice of who has to go is made among members as it is among trainings,
by the same laws, and without a training that would have to go as a whole.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import lru_cache
from itertools import islice

from tiphys_plugin.quota.lease import Admitted, Lease, LeaseRequest, Leaving, Reason, Waiting
from tiphys_plugin.quota.preemption.rights import Candidates, Rights, protected_until
from tiphys_plugin.quota.queues import Queue, Queues
from tiphys_plugin.quota.scheduler.decide import State, called, clock, decide

_MARK = "/"
"""Between the id of a lease, which is hexadecimal, and the number of a member."""


def is_part(lease_id: str) -> bool:
    """Whether this is one member of a lease."""
    return _MARK in lease_id


def whole(lease_id: str) -> str:
    """The lease that a member belongs to; the lease itself."""
    return lease_id.partition(_MARK)[0]


def with_parts(state: State) -> State:
    """``state`` in which each member that can be spared is a lease of its own; the same object if there is none."""
    leases = tuple(part for one in state.leases for part in parts(one))
    return state if len(leases) == len(state.leases) else replace(state, leases=leases)


def only_parts(state: State, out_of_reach: Container[str]) -> frozenset[str]:
    """Ids of what may not be asked where only members may be: all other leases, and members of those out of reach."""
    return frozenset(one.id for one in state.leases if not is_part(one.id) or whole(one.id) in out_of_reach)


@lru_cache(maxsize=4096)
def parts(lease: Lease) -> tuple[Lease, ...]:
    """What a lease cannot do without, and each member that it can."""
    held = lease.request
    if held.min_members is None or lease.leaving is not None or held.tensor_parallel > 1:
        return (lease,)
    spare = [
        replace(lease, id=f"{lease.id}{_MARK}{number}", request=held.of(1), nodes=lease.nodes[number : number + 1])
        for number in range(held.min_members, held.members)
    ]
    return (stays(lease, held.min_members), *spare) if spare else (lease,)


def stays(lease: Lease, members: int) -> Lease:
    """What is left of a lease when all but its first members have gone."""
    return replace(lease, request=lease.request.of(members), nodes=lease.nodes[:members])


def asked(lease: Lease, going: Collection[Lease], for_whom: tuple[str, str], now: datetime, grace: timedelta) -> Lease:
    """The lease of which these members, or it as a whole, have been asked to leave; those that go are its last."""
    uid, step = for_whom
    if not all(is_part(one.id) for one in going):
        return replace(lease, leaving=Leaving(uid, step, now, now + grace))
    keeps = lease.request.members - len(going)
    last = [node for one in going for node in one.nodes]
    first = list((Counter(lease.nodes) - Counter(last)).elements())
    leaving = Leaving(uid, step, now, now + grace, keeps)
    return replace(lease, nodes=(*first, *last), leaving=leaving)


OVERDUE = timedelta(minutes=2)
"""Who is still there so long after its deadline is no longer expected to go: its node may be lost."""

_MOST_TRIED = 200
"""Sets of trainings of which it is asked whether the request would start without them."""
_MOST_SETS = 20_000
_MOST_WEIGHED = 128
"""Candidates whose loss is looked up, and more for a large request: those that have held their GPUs for the shortest
time can lose least."""

Lost = Callable[[Sequence[Lease]], Mapping[str, float]]
"""GPU-seconds that each of these leases, by id, would lose if it ended now."""


@dataclass(frozen=True)
class Victims:
    """Who is to be asked, those that lose least first, and the GPU-seconds that each would lose, by lease."""

    leases: tuple[Lease, ...]
    lost: Mapping[str, float]

    @property
    def gpu_seconds_lost(self) -> float:
        return sum(self.lost[one.id] for one in self.leases)


@dataclass(frozen=True)
class Nobody:
    """Why nobody is asked; ``reason`` where it is one that keeps the request waiting."""

    message: str
    reason: Reason | None = None


def choose(
    state: State, mine: Waiting, lost: Lost, now: datetime, out_of_reach: Container[str] = ()
) -> Victims | Nobody:
    """Who has to go so that ``mine`` starts. ``mine`` is not among ``state.waiting``.

    ``lost`` is asked only of those who may be asked by the rules. Nobody can ask
    the leases ``out_of_reach``, by id. Where members suffice that elastic
    trainings can spare, nobody goes as a whole; see `surplus`.
    """
    parted = with_parts(state)
    if parted is not state:
        spared = _choose(parted, mine, lost, now, only_parts(parted, out_of_reach))
        if isinstance(spared, Victims):
            return spared
    return _choose(state, mine, lost, now, out_of_reach)


def _choose(state: State, mine: Waiting, lost: Lost, now: datetime, out_of_reach: Container[str]) -> Victims | Nobody:
    found = Case.of(state, mine, now, out_of_reach)
    if isinstance(found, Nobody):
        return found
    if not found.candidates.leases:
        return found.nobody()
    weighed = sorted(found.candidates.leases, key=lambda one: (held_gpu_seconds(one, now), one.id))
    weighed = weighed[: max(_MOST_WEIGHED, 2 * mine.request.gpus)]
    known = lost(weighed)
    costs = {one.id: known.get(one.id, held_gpu_seconds(one, now)) for one in weighed}
    chosen = found.cheapest(weighed, lambda one: costs[one.id])
    if chosen is None:
        return found.not_enough()
    return Victims(chosen, {one.id: costs[one.id] for one in chosen})


def objection(state: State, mine: Waiting, victims: Sequence[Lease], now: datetime) -> str | None:
    """What speaks against asking ``victims`` to leave for ``mine``; None if every law is kept."""
    found = Case.of(state, mine, now)
    if isinstance(found, Nobody):
        return found.message
    known = {one.id for one in found.candidates.leases}
    if strangers := [one for one in victims if one.id not in known]:
        return f"{called(strangers[0].request)} may not be asked"
    if not victims or not found.starts_without(tuple(victims)):
        return "it would not start without them"
    if needless := [one for one in victims if found.fits_without([other for other in victims if other is not one])]:
        return f"{called(needless[0].request)} need not go"
    return None


@dataclass(frozen=True)
class Case:
    """A request that waits, and those who may be asked to leave for it."""

    state: State
    """As it will be when those are gone who leave already; see `settled`."""
    mine: Waiting
    now: datetime
    queue: Queue
    queues: Queues
    rights: Rights
    candidates: Candidates

    @classmethod
    def of(cls, state: State, mine: Waiting, now: datetime, out_of_reach: Container[str] = ()) -> "Case | Nobody":
        """None but a request that waits, whose queue preempts, and for which not enough leave already."""
        queues, request = state.queues, mine.request
        queue = queues.find(request.queue) if isinstance(queues, Queues) else None
        if not isinstance(queues, Queues) or queue is None:
            return Nobody("there are no queues to go by")
        if not queue.preempts:
            return Nobody(
                f"queue {queue.name} has nobody go for others: neither preempts_lower_priority nor reclaims is set, "
                "nor preempts_longer"
            )
        if any(comes_free(one, now) and _leaves_for(one, request) for one in state.leases):
            return Nobody(f"others were asked to leave for {called(request)} already")
        then = settled(state, now)
        if isinstance(decide(then, request, mine.arrival, now, mine.promised_at), Admitted):
            return Nobody(f"enough is free for {called(request)}, or will be when those are gone who leave already")
        rights = Rights(queues, queue, then.leases, request)
        known = {one.id for one in state.leases if one.id not in out_of_reach}
        return cls(then, mine, now, queue, queues, rights, rights.candidates(known, now))

    def starts_without(self, victims: Sequence[Lease]) -> bool:
        """Whether these may go, and the request starts when they are gone, whoever else waits."""
        gone = {one.id for one in victims}
        left = tuple(one for one in self.state.leases if one.id not in gone)
        mine = self.mine
        answer = decide(replace(self.state, leases=left), mine.request, mine.arrival, self.now, mine.promised_at)
        return isinstance(answer, Admitted) and self.rights.allow(victims, answer.pool)

    def fits_without(self, victims: Sequence[Lease]) -> bool:
        """The same, if nobody else waited. Hundreds of sets are tried, so this is counted and not decided."""
        pool = self.rights.pool_without(victims)
        return pool is not None and self.rights.allow(victims, pool)

    def cheapest(self, leases: Sequence[Lease], cost: Callable[[Lease], float]) -> tuple[Lease, ...] | None:
        """The set that loses least; where there are too many to look at, a good one of which nobody can stay."""
        if not self.starts_without(leases):
            return None  # it would not even start if all of them went
        short = self.rights.short()
        sets = (victims for victims in _by_cost(leases, cost) if sum(one.request.gpus for one in victims) >= short)
        for victims in islice(sets, _MOST_TRIED):
            if self._holds(victims):
                return victims
        return self._greedy(leases, cost)

    def nobody(self) -> Nobody:
        """Why there are no candidates."""
        if self.candidates.protected:
            return self._protected(self.candidates.protected)
        rules = [
            *(["a lower priority in its own queue"] if self.queue.preempts_lower_priority else []),
            *(["had more GPU time in its own queue"] if self.queue.preempts_longer else []),
            *(["a queue of its cohort that borrows what it may take back"] if self.queue.reclaims else []),
        ]
        return Nobody(f"nobody has {' or '.join(rules)}")

    def not_enough(self) -> Nobody:
        """Why the candidates are of no use."""
        if self.candidates.protected:
            return self._protected(self.candidates.protected)
        count = len(self.candidates.leases)
        who = f"the {count} that may be asked" if count > 1 else "the one that may be asked"
        return Nobody(f"it would not start if {who} went: others are before it, or hold what it needs")

    def _holds(self, victims: Sequence[Lease]) -> bool:
        """Whether the request fits without them, with nobody who could stay, and starts."""
        return (
            self.fits_without(victims)
            and not any(self.fits_without([other for other in victims if other is not one]) for one in victims)
            and self.starts_without(victims)
        )

    def _greedy(self, leases: Sequence[Lease], cost: Callable[[Lease], float]) -> tuple[Lease, ...] | None:
        """Cheap ones until it fits; then those stay that need not go, the dearest first."""
        victims: list[Lease] = []
        for one in sorted(leases, key=lambda one: (cost(one) / one.request.gpus, one.id)):
            victims.append(one)
            if self.fits_without(victims):
                break
        else:
            return None
        for one in sorted(victims, key=cost, reverse=True):
            rest = [other for other in victims if other is not one]
            if rest and self.fits_without(rest):
                victims = rest
        return tuple(sorted(victims, key=cost)) if self.starts_without(victims) else None

    def _protected(self, protected: Sequence[Lease]) -> Nobody:
        until, first = min(((protected_until(self.queues, one), one) for one in protected), key=lambda pair: pair[0])
        more = f", and {len(protected) - 1} more" if len(protected) > 1 else ""
        return Nobody(
            f"{called(first.request)}{more} may only be asked after min_runtime_seconds of queue "
            f"{first.request.queue}, at {clock(until)}",
            Reason.MIN_RUNTIME_PROTECTED,
        )


def settled(state: State, now: datetime) -> State:
    """As it will be when those are gone who leave: for whom they left holds its GPUs, and waits no more.

    Who is long overdue is still there.
    """
    leases = [left for one in state.leases if (left := _after_leaving(one, now)) is not None]
    waiting = list(state.waiting)
    for one in state.waiting:
        if any(comes_free(lease, now) and _leaves_for(lease, one.request) for lease in state.leases):
            alone = replace(state, leases=tuple(leases), waiting=())
            answer = decide(alone, one.request, one.arrival, now, one.promised_at)
            if isinstance(answer, Admitted):
                leases.append(Lease(f"promised-{one.arrival}", one.request, answer.pool, now, now, answer.nodes))
                waiting.remove(one)
    return replace(state, leases=tuple(leases), waiting=tuple(waiting))


def held_gpu_seconds(lease: Lease, now: datetime) -> float:
    """What a lease has used so far: the most that it can lose."""
    return lease.request.gpus * max(0.0, (now - lease.granted_at).total_seconds())


def comes_free(lease: Lease, now: datetime) -> bool:
    """Whether it leaves, and can be expected to be gone soon."""
    return lease.leaving is not None and lease.leaving.deadline + OVERDUE > now


def _after_leaving(lease: Lease, now: datetime) -> Lease | None:
    if not comes_free(lease, now):
        return lease
    keeps = lease.leaving.keeps if lease.leaving is not None else None
    return stays(lease, min(keeps, lease.request.members)) if keeps is not None else None


def _leaves_for(lease: Lease, request: LeaseRequest) -> bool:
    return lease.leaving is not None and (lease.leaving.uid, lease.leaving.step) == (request.uid, request.step)


def _by_cost(leases: Sequence[Lease], cost: Callable[[Lease], float]) -> Iterator[tuple[Lease, ...]]:
    """Sets of leases, the cheapest first, and the smaller where they cost the same.

    Of those that are alike in what they hold only the cheapest are ever in a
    set, so that there are few sets where many are alike.
    """
    alike: defaultdict[tuple[object, ...], list[Lease]] = defaultdict(list)
    for one in sorted(leases, key=lambda one: (cost(one), one.id)):
        request = one.request
        kind = (request.queue, request.gpu_type, one.pool, request.gpus, request.members, one.nodes)
        alike[kind].append(one)
    groups = list(alike.values())
    heap: list[tuple[float, int, tuple[int, ...]]] = [(0.0, 0, (0,) * len(groups))]
    for _ in range(_MOST_SETS):
        if not heap:
            return
        total, size, counts = heapq.heappop(heap)
        if size:
            yield tuple(one for group, count in zip(groups, counts, strict=True) for one in group[:count])
        last = max((index for index, count in enumerate(counts) if count), default=0)
        for index in range(last, len(groups)):
            if counts[index] < len(groups[index]):
                more = (*counts[:index], counts[index] + 1, *counts[index + 1 :])
                heapq.heappush(heap, (total + cost(groups[index][counts[index]]), size + 1, more))
