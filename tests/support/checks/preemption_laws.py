"""What must be so of every decision to have somebody go, counted by hand."""

from collections import Counter

from tiphys_plugin.quota.lease import Admitted, Lease, LedgerState, PendingRequest
from tiphys_plugin.quota.queue import Queue
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler.decide import decide_admission

from support.checks.preemption_rounds import Arena, Mark


def quota(queue: Queue) -> int:
    return queue.gpus["A100"]


def held(leases: list[Lease], queue: str) -> int:
    return sum(one.request.gpus for one in leases if one.request.queue == queue)


def lawful(arena: Arena, mark: Mark, victims: tuple[Lease, ...]) -> bool:
    """By hand: the fences, the guarantees and the ages."""
    request, named = mark.mine.request, {queue.name: queue for queue in arena.rules.queues}
    queue = named[request.queue]
    there = soon(arena, mark)[0]
    for one in victims:
        owner = named[one.request.queue]
        if one.preemption is not None or (mark.now - one.granted_at).total_seconds() < owner.min_runtime_seconds:
            return False
        if owner is queue:
            if not (queue.preempts_lower_priority and one.request.priority < request.priority):
                return False
        elif not (queue.reclaims and owner.cohort == queue.cohort):
            return False
    for name in {one.request.queue for one in victims} - {queue.name}:
        of_queue = [one for one in victims if one.request.queue == name]
        left = held(there, name) - sum(one.request.gpus for one in of_queue)
        if left + max(one.request.gpus for one in of_queue) <= quota(named[name]):
            return False
    own = sum(one.request.gpus for one in victims if one.request.queue == queue.name)
    takes_back = any(one.request.queue != queue.name for one in victims)
    return not takes_back or held(there, queue.name) - own + request.gpus <= quota(queue)


def soon(arena: Arena, mark: Mark) -> tuple[list[Lease], list[PendingRequest]]:
    """Who holds and who waits when those are gone who leave already, and those for whom they left have started."""
    leases = [one for one in mark.before.leases if one.preemption is None]
    waiting = [one for one in mark.before.pending if one is not mark.mine]
    promised = {(one.preemption.uid, one.preemption.step) for one in mark.before.leases if one.preemption is not None}
    for one in [one for one in waiting if (one.request.uid, one.request.step) in promised]:
        state = LedgerState(tuple(leases), (), mark.before.history, queues=arena.rules)
        if isinstance(decide_admission(state, one.request, one.arrival, mark.now), Admitted):
            leases.append(Lease(f"of {one.request.uid}", one.request, "A100", mark.now, mark.now))
            waiting.remove(one)
    return leases, waiting


def starts(arena: Arena, mark: Mark, gone: tuple[Lease, ...], *, alone: bool) -> bool:
    """Whether the decision on GPUs lets it start when ``gone`` and all who leave already are gone."""
    leases, waiting = soon(arena, mark)
    left = tuple(one for one in leases if one.id not in {victim.id for victim in gone})
    state = LedgerState(left, () if alone else tuple(waiting), mark.before.history, queues=arena.rules)
    return isinstance(decide_admission(state, mark.mine.request, mark.mine.arrival, mark.now), Admitted)


def examine(arena: Arena, mark: Mark) -> None:
    assert lawful(arena, mark, mark.victims), mark
    assert starts(arena, mark, mark.victims, alone=False), "somebody goes for nothing"
    assert not starts(arena, mark, (), alone=False), "somebody goes although it starts without that"
    for one in mark.victims:
        rest = tuple(other for other in mark.victims if other is not one)
        assert not (lawful(arena, mark, rest) and starts(arena, mark, rest, alone=True)), (
            f"{one.request.uid} could stay"
        )


def come_to_rest(arena: Arena) -> None:
    """Look, go and ask until nothing happens any more; what leaves for somebody must go to it at once."""
    for _ in range(20):
        count = len(arena.marks)
        arena.look()
        again = arena.leave()
        for mark in arena.marks[count:]:
            assert isinstance(arena.ask(mark.mine.request), Admitted), "what left for it went to somebody else"
        for request in again:
            arena.ask(request)
        if not arena.all_ask() and len(arena.marks) == count:
            return
    raise AssertionError("it does not come to rest")


def borrowers_go_last_in_first_out(rules: Queues, mark: Mark, victims: tuple[Lease, ...]) -> bool:
    """Whether each of another queue has borrowed: by priority, then by age, its quota had no more room for it."""
    used: Counter[str] = Counter()
    quotas = {queue.name: quota(queue) for queue in rules.queues}
    for one in sorted(mark.before.leases, key=lambda one: (-one.request.priority, one.granted_at)):
        used[one.request.queue] += one.request.gpus
        is_other = one.request.queue != mark.mine.request.queue
        if one in victims and is_other and used[one.request.queue] <= quotas[one.request.queue]:
            return False
    return True
