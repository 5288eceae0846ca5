"""The line of those who wait for GPUs: laws that hold whatever the queues, the leases and the requests are.

| law                                                                    | test          |
|------------------------------------------------------------------------|---------------|
| no queue above its ceiling, no cohort above its quotas, no type above its stock | `..._never_more_...` |
| no node more than it has, no member without a node, none on a cordoned one | `..._no_node_...` |
| one by one is decided as all together                                  | `..._agree`   |
| the request that is next starts no later because of those behind it    | `..._delayed` |
| a deferred request is told why, and what it is told is true            | `..._reason`  |
| more quota, more GPUs or fewer leases never defer a lone request       | `..._more_...` |
| it does not matter when the start of a reservation is worked out       | `..._whenever_...` |
| it does not matter that requests wait in groups                        | `..._group`   |
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from unittest.mock import patch

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.builders.ledger import NOW, ask
from tiphys_plugin.quota.lease import (
    AdmissionReason,
    Admitted,
    Deferred,
    EndedUsage,
    Lease,
    LeaseRequest,
    LedgerState,
    PendingRequest,
    declared_end,
)
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler import cycle, pools
from tiphys_plugin.quota.scheduler.backfill import Reservation
from tiphys_plugin.quota.scheduler.cache import SchedulerCache
from tiphys_plugin.quota.scheduler.capacity import Capacity
from tiphys_plugin.quota.scheduler.cycle import run_cycle
from tiphys_plugin.quota.scheduler.cycle_result import CycleResult, PoolAssignment
from tiphys_plugin.quota.scheduler.decide import decide_admission, decide_pending, select_admissible
from tiphys_plugin.quota.scheduler.derived_state import DerivedState
from tiphys_plugin.quota.scheduler.pending_queues import PendingQueues

OTHERS = {
    AdmissionReason.BEHIND_EARLIER_REQUEST,
    AdmissionReason.BEHIND_HIGHER_PRIORITY,
    AdmissionReason.BEHIND_SMALLER_SHARE,
    AdmissionReason.RESERVED,
    AdmissionReason.LINE_CLOSED,
}
TYPES = ["A100", "T4"]
NAMES = ["a", "b", "c"]
LATER = NOW + timedelta(minutes=10)


@st.composite
def clusters(draw: st.DrawFn):
    """Nodes of every type, in two racks, some of them cordoned."""
    nodes = [
        {
            "name": f"n{number}",
            "gpu_type": gpu_type,
            "gpus": draw(st.sampled_from([1, 2, 4, 8])),
            "rack": draw(st.sampled_from(["", "r1", "r2"])),
            "cordoned": draw(st.sampled_from([False, False, False, True])),
        }
        for number, gpu_type in enumerate([*TYPES, *draw(st.lists(st.sampled_from(TYPES), max_size=3))])
    ]
    return {"nodes": nodes, "placement": draw(st.sampled_from(["best-fit", "fragmentation"]))}


STOCK = st.fixed_dictionaries({name: st.integers(1, 12).map(lambda count: {"count": count}) for name in TYPES})
ANYTHING = st.one_of(st.just({}), st.builds(lambda it: {"inventory": it}, STOCK), clusters())
"""What is said of the GPUs that exist."""


@st.composite
def rules(draw: st.DrawFn, exists: st.SearchStrategy[Any] = ANYTHING) -> Queues:
    queues = []
    for name in NAMES:
        gpus = draw(st.dictionaries(st.sampled_from([*TYPES, "*"]), st.integers(0, 8), min_size=1))
        queue = {"name": name, "gpus": gpus, "weight": draw(st.sampled_from([1, 2]))}
        queue["backfill"] = draw(st.sampled_from(["bounded", "strict", "preemptible"]))
        if queue["backfill"] == "bounded":
            queue["backfill_hours"] = draw(st.sampled_from([0, 0.1, 48]))
        if draw(st.booleans()):
            queue["cohort"] = "lab"
            limited = draw(st.sets(st.sampled_from(sorted(gpus))))
            queue["borrowing_limit"] = {pool: draw(st.integers(0, 4)) for pool in limited}
            queue["lending_limit"] = {pool: draw(st.integers(0, gpus[pool])) for pool in limited}
        queues.append(queue)
    return Queues.model_validate({"queues": queues, **draw(exists)})


@st.composite
def requests(draw: st.DrawFn, number: int, lengths: Sequence[int | None] = (None, 300, 900, 3600)):
    return ask(
        gpus := draw(st.integers(1, 6)),
        f"u{number}",
        members=draw(st.sampled_from([1, 1, *(size for size in (2, 3) if gpus % size == 0)])),
        queue=draw(st.sampled_from(NAMES)),
        gpu_type=draw(st.sampled_from([*TYPES, None])),
        priority=draw(st.sampled_from([0, 0, 5])),
        seconds=draw(st.sampled_from(lengths)),
    )


@st.composite
def states(
    draw: st.DrawFn,
    lengths: Sequence[int | None] = (None, 300, 900, 3600),
    exists: st.SearchStrategy[Any] = ANYTHING,
) -> LedgerState:
    """Queues that were filled by what they admit, and a line of requests that could be served one day."""
    found = draw(rules(exists))
    leases: list[Lease] = []
    for number in range(draw(st.integers(0, 6))):
        request = draw(requests(number, lengths))
        answer = decide_admission(LedgerState(tuple(leases), queues=found), request, 1, NOW)
        if isinstance(answer, Admitted):
            leases.append(Lease(f"l{number}", request, answer.pool, NOW, NOW, answer.nodes))
    line = [draw(requests(number)) for number in range(10, 10 + draw(st.integers(1, 6)))]
    possible = [one for one in line if isinstance(decide_admission(LedgerState(queues=found), one, 1, NOW), Admitted)]
    waiting = tuple(PendingRequest(one, arrival, NOW, NOW) for arrival, one in enumerate(possible, 1))
    history = draw(st.lists(st.sampled_from(NAMES), unique=True))
    return LedgerState(
        tuple(leases), waiting, tuple(EndedUsage(name, "A100", 4.0, NOW) for name in history), queues=found
    )


def started(state: LedgerState) -> list[PoolAssignment]:
    return select_admissible(state, LATER, SchedulerCache())


def evaluated(state: LedgerState) -> CycleResult:
    """The result of a cycle that no other has left anything for."""
    return run_cycle(DerivedState(state.queues, state), PendingQueues(state.queues, state.pending), LATER)


def decided(state: LedgerState, one: PendingRequest):
    others = tuple(other for other in state.pending if other is not one)
    return decide_pending(replace(state, pending=others), one, LATER)


@given(states())
def test_leases_never_exceed_the_gpus_that_exist(state):
    queues = state.queues
    held = [(one.request, one.pool) for one in state.leases]
    held += [(one.request, pool) for one, pool, _ in started(state)]
    by_pool, by_type = Counter(), Counter()
    for request, pool in held:
        by_pool[request.queue, pools.find_pool(queues, request.queue, request.gpu_type, pool)] += request.gpus
        by_type[pools.gpu_kind_in_pool(request, pool)] += request.gpus
    for queue in queues.queues:
        for pool in queue.gpus:
            assert by_pool[queue.name, pool] <= queue.max_with_borrowing(pool)
    for pool in [*TYPES, "*"]:
        members = [queue for queue in queues.queues if queue.cohort and pool in queue.gpus]
        used = sum(max(by_pool[queue.name, pool], queue.guaranteed_quota(pool)) for queue in members)
        assert used <= sum(queue.gpus[pool] for queue in members)
    for name, stock in (queues.gpu_inventory or {}).items():
        assert by_type[name] <= stock.count
    if queues.gpu_inventory is not None:
        assert by_type.total() <= sum(stock.count for stock in queues.gpu_inventory.values())


@given(states(exists=clusters()))
def test_no_node_gives_more_than_it_has_and_no_member_goes_without(state):
    known = {node.name: node for node in state.queues.nodes or ()}
    given_now = [(one.request, nodes) for one, _, nodes in started(state)]
    used = Counter()
    for request, nodes in [*((one.request, one.nodes) for one in state.leases), *given_now]:
        assert len(nodes) == request.members
        assert len({known[name].gpu_type for name in nodes}) == 1
        assert request.gpu_type in (None, known[nodes[0]].gpu_type)
        for name in nodes:
            used[name] += request.gpus // request.members
    assert all(used[name] <= node.gpus for name, node in known.items())
    assert not any(known[name].cordoned for _, nodes in given_now for name in nodes)


@given(states())
def test_requests_decided_one_by_one_and_together_get_the_same_answer(state):
    together = {one.arrival: (pool, nodes) for one, pool, nodes in started(state)}
    for one in state.pending:
        answer = decided(state, one)
        assert together.get(one.arrival) == ((answer.pool, answer.nodes) if isinstance(answer, Admitted) else None)


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(states(lengths=(900, 3600)))
def test_the_one_that_is_next_is_not_delayed_by_those_behind_it(state):
    answers = [(one, decided(state, one)) for one in state.pending]
    expected = [
        (one, answer) for one, answer in answers if isinstance(answer, Deferred) and answer.expected_start is not None
    ]
    assume(expected)
    first, before = min(expected, key=lambda known: known[1].position)
    assume(before.position == 1)
    given_now = [Lease(one.request.uid, one.request, pool, LATER, LATER, nodes) for one, pool, nodes in started(state)]
    still_there = [one for one in (*state.leases, *given_now) if not is_over(one, before.expected_start)]
    then = Capacity(state.queues, still_there)
    assert then.find_fitting_pools(state.queues.find(first.request.queue), first.request)


def is_over(lease: Lease, at: datetime) -> bool:
    end = declared_end(lease.request, lease.granted_at)
    return end is not None and end <= at


@given(states())
def test_a_deferred_request_gets_a_true_reason(state):
    for one in state.pending:
        answer = decided(state, one)
        if not isinstance(answer, Deferred):
            continue
        assert answer.reasons
        assert answer.reason is answer.reasons[0].reason
        reasons = {because.reason for because in answer.reasons} - {AdmissionReason.FIRST_IN_LINE}
        alone = decide_admission(replace(state, pending=()), one.request, one.arrival, LATER)
        if reasons <= OTHERS:
            assert isinstance(alone, Admitted), "it is said to wait for others, and would wait without them"
            assert answer.position > 1
        else:
            assert isinstance(alone, Deferred), "it is said that too little is free, and alone it would start"


@given(states(), st.data())
def test_a_lone_request_is_never_deferred_by_fewer_leases_or_more_quota(state, data):
    request = data.draw(requests(99))
    lone = replace(state, pending=())
    assume(isinstance(decide_admission(lone, request, 1, LATER), Admitted))
    fewer = replace(lone, leases=tuple(one for one in state.leases if data.draw(st.booleans())))
    assert isinstance(decide_admission(fewer, request, 1, LATER), Admitted)
    document = state.queues.model_dump(mode="json", exclude_none=True)
    for queue in document["queues"]:
        queue["gpus"] = {pool: gpus + 1 for pool, gpus in queue["gpus"].items()}
        queue["borrowing_limit"] = {pool: limit + 1 for pool, limit in queue["borrowing_limit"].items()}
        queue["lending_limit"] = {pool: limit + 1 for pool, limit in queue["lending_limit"].items()}
    more = replace(lone, queues=Queues.model_validate(document))
    assert isinstance(decide_admission(more, request, 1, LATER), Admitted)


class EagerReservation(Reservation):
    """Has its start worked out at once."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        assert self.start is not None


def busy_state(seed: int, backfills: Sequence[str]) -> LedgerState:
    """Little is free, most leases and requests have known ends, and some requests may start before others."""
    draw = random.Random(seed)
    queues = [
        {
            "name": name,
            "gpus": {gpu_type: draw.choice([4, 8, 16]) for gpu_type in TYPES},
            "backfill": draw.choice(backfills),
            **({"cohort": "lab"} if draw.random() < 0.7 else {}),
        }
        for name in NAMES
    ]
    found = Queues.model_validate({"queues": queues, "inventory": {name: {"count": 24} for name in TYPES}})

    def request(number: int) -> LeaseRequest:
        return ask(
            draw.choice([1, 1, 1, 6]),
            f"u{number}",
            queue=draw.choice(NAMES),
            gpu_type=draw.choice([*TYPES, *TYPES, None]),
            priority=draw.choice([0, 0, 0, 5]),
            seconds=draw.choice([None, *(draw.randrange(700, 9000) for _ in range(4))]),
        )

    leases: list[Lease] = []
    for number in range(40):
        one = request(number)
        answer = decide_admission(LedgerState(tuple(leases), queues=found), one, 1, NOW)
        if isinstance(answer, Admitted):
            leases.append(Lease(f"l{number}", one, answer.pool, NOW, NOW, answer.nodes))
    kept = tuple(one for one in leases if draw.random() < 0.8)
    waiting = tuple(PendingRequest(request(100 + number), number, NOW, NOW) for number in range(1, 41))
    return LedgerState(kept, waiting, queues=found)


@given(st.integers(0, 2**32).map(lambda seed: busy_state(seed, ["bounded", "strict", "preemptible"])))
def test_the_start_of_a_reservation_is_the_same_whenever_it_is_worked_out(state):
    late = evaluated(state)
    with patch.object(cycle, "Reservation", EagerReservation):
        early = evaluated(state)
    for one in state.pending:
        outcomes = [result.outcome_of(one.arrival) for result in (late, early)]
        shown = [
            (
                replace(outcome.verdict, reservation=None, own_reservation=None),
                outcome.position,
                outcome.expected_start,
                start_of(outcome.verdict.reservation),
            )
            for outcome in outcomes
        ]
        assert shown[0] == shown[1]


def start_of(reservation: Reservation | None) -> tuple[Any, ...] | None:
    if reservation is None:
        return None
    start = reservation.start
    return reservation.pending.arrival, start.expected_start, start.is_open, start.closes_at


@given(st.integers(0, 2**32).map(lambda seed: busy_state(seed, ["bounded", "strict"])))
def test_requests_that_wait_are_decided_alone_as_in_their_group(state):
    """Not with preemptible backfill, where a later request of a group may have come earlier."""
    together = evaluated(state)
    with patch.object(PendingQueues, "_group_key", lambda _, entry: (entry.pool_options, entry.position)):
        alone = evaluated(state)
    assert list(together.assignments) == list(alone.assignments)
    for one in state.pending:
        outcomes = [result.outcome_of(one.arrival) for result in (together, alone)]
        assert len({(outcome.verdict.pool, outcome.verdict.nodes, outcome.expected_start) for outcome in outcomes}) == 1
