"""What an index answers from one state to the next is what a look at all entries would find."""

import random
from dataclasses import replace
from datetime import timedelta

from support.builders.ledger import NOW, ask, lease, waiting
from tiphys_plugin.quota.lease import Lease, LeaseRequest, LedgerState, PendingRequest
from tiphys_plugin.quota.ledger.transitions import admit_or_queue, release, shrink
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler.cache import SchedulerCache
from tiphys_plugin.quota.scheduler.changes import RecentChanges
from tiphys_plugin.quota.scheduler.entry_index import EntryIndex, PendingIndex, without_arrivals

SEED = 20_261_123
PATIENCE = timedelta(minutes=2)
OWNED = Queues.model_validate({"queues": [{"name": "research", "gpus": {"A100": 8}, "namespaces": ["ml"]}]})
OPEN = Queues.model_validate({"queues": [{"name": "research", "gpus": {"A100": 8}}]})


def test_leases_of_a_step_and_of_a_namespace_are_found():
    draw, index = random.Random(SEED), EntryIndex[Lease](RecentChanges())
    leases: tuple[Lease, ...] = ()
    for number in range(400):
        if leases and draw.random() < 0.4:
            gone = draw.choice(leases)
            leases = tuple(one for one in leases if one is not gone)
        else:
            newcomer = lease(1, f"u{draw.randrange(9)}", namespace=draw.choice(["ml", "vision"]))
            leases = (*leases, replace(newcomer, id=f"lease-{number}"))
        step = (f"u{number % 9}", "fit")
        assert index.find(leases, step) == [one for one in leases if one.request.workflow_step == step]
        assert index.sum_gpus(leases).total() == len(leases)
        assert index.count(leases, "ml") == sum(one.request.namespace == "ml" for one in leases)


def test_requests_that_delay_no_others_are_found_also_after_the_clock_was_put_back():
    draw, index, now = random.Random(SEED), PendingIndex(RecentChanges()), NOW
    pending: tuple[PendingRequest, ...] = ()
    for number in range(1, 600):
        now += timedelta(seconds=draw.choice([1, 30, 30, -600 if number % 50 == 0 else 1]))
        match draw.randrange(4):
            case 0 if pending:
                pending = without_arrivals(pending, {draw.choice(pending).arrival})
            case 1 if pending:
                again = draw.choice(pending)
                pending = tuple(replace(one, seen_at=now) if one is again else one for one in pending)
            case _:
                newcomer = waiting(1, number, namespace=draw.choice(["ml", "vision"]))
                pending = (*pending, replace(newcomer, seen_at=now))
        rules = draw.choice([OWNED, OPEN])
        expected = tuple(
            one for one in pending if now - one.seen_at <= PATIENCE and (rules is OPEN or one.request.namespace == "ml")
        )
        active = index.select_active(rules, pending, now, PATIENCE)
        assert active == expected
        assert index.select_active(rules, pending, now, PATIENCE) is active
    assert pending


def test_requests_are_left_out_by_their_arrival_numbers():
    pending = tuple(waiting(1, number) for number in range(1, 201))
    for arrivals in ({1}, {200, 7}, {201}, set(range(5, 150))):
        assert without_arrivals(pending, arrivals) == tuple(one for one in pending if one.arrival not in arrivals)


def read_anew(state: LedgerState) -> LedgerState:
    """The same state as a service has it after it has loaded a snapshot: other objects."""
    return replace(state, leases=tuple(map(replace, state.leases)), pending=tuple(map(replace, state.pending)))


def test_a_state_that_was_read_anew_changes_like_the_one_before():
    rules = Queues.model_validate({"queues": [{"name": "research", "gpus": {"A100": 800}}]})
    leases = tuple(replace(lease(2, f"u{number}", members=2), id=f"lease-{number}") for number in range(600))
    state, cache = LedgerState(leases, queues=rules), SchedulerCache()

    def decide(one: LedgerState, request: LeaseRequest) -> LedgerState:
        return admit_or_queue(one, request, NOW, "another", cache)[0]

    decide(state, ask(1, "first"))
    again = read_anew(state)
    with_one_more = decide(again, ask(1, "second"))
    decide(with_one_more, ask(1, "third"))
    shorter = release(with_one_more, "lease-7", NOW, cache)
    decide(shorter, ask(1, "fourth"))
    assert [one.id for one in shorter.leases] == [one.id for one in with_one_more.leases if one.id != "lease-7"]
    retry = replace(leases[9].request, node_hash="0" * 10)
    moved = decide(again, retry)
    assert next(one for one in moved.leases if one.id == "lease-9").request.node_hash == retry.node_hash
    smaller = shrink(again, "lease-11", 1, (), None, NOW, cache)
    assert next(one for one in smaller.leases if one.id == "lease-11").request.members == 1
