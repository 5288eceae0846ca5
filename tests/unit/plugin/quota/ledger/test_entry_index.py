"""What an index answers from one state to the next is what a look at all entries would find."""

import random
from dataclasses import replace
from datetime import timedelta

from support.ledger import NOW, lease, waiting
from tiphys_plugin.quota.lease import Lease, PendingRequest
from tiphys_plugin.quota.ledger.entry_index import EntryIndex, PendingIndex, without_arrivals
from tiphys_plugin.quota.queues import Queues

SEED = 20_261_123
PATIENCE = timedelta(minutes=2)
OWNED = Queues.model_validate({"queues": [{"name": "research", "gpus": {"A100": 8}, "namespaces": ["ml"]}]})
OPEN = Queues.model_validate({"queues": [{"name": "research", "gpus": {"A100": 8}}]})


def test_leases_of_a_step_and_of_a_namespace_are_found():
    draw, index = random.Random(SEED), EntryIndex[Lease]()
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
    draw, index, now = random.Random(SEED), PendingIndex(), NOW
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
        expected = {
            one.arrival
            for one in pending
            if now - one.seen_at > PATIENCE or (rules is OWNED and one.request.namespace != "ml")
        }
        assert set(index.find_inactive(rules, pending, now, PATIENCE)) == expected
    assert pending


def test_requests_are_left_out_by_their_arrival_numbers():
    pending = tuple(waiting(1, number) for number in range(1, 201))
    for arrivals in ({1}, {200, 7}, {201}, set(range(5, 150))):
        assert without_arrivals(pending, arrivals) == tuple(one for one in pending if one.arrival not in arrivals)
