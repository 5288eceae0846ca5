"""What a queue borrowed stays borrowed when the queue, its type or its cohort leaves the file."""

import random
from dataclasses import replace

import pytest
from support.builders.ledger import ask, lease
from support.stories.plugin import Clock
from tiphys_plugin.quota.lease import Admitted, Deferred
from tiphys_plugin.quota.ledger.sqlite_ledger import SqliteLedger
from tiphys_plugin.quota.queues import parse_queues
from tiphys_plugin.quota.scheduler.capacity import Capacity

A = {"name": "a", "gpus": {"A100": 2}, "cohort": "c"}
B = {"name": "b", "gpus": {"A100": 2}, "cohort": "c"}
ELSEWHERE = {"name": "e", "gpus": {"A100": 2}, "cohort": "elsewhere"}
CHANGES = {
    "its quota is 0": [{**A, "gpus": {"A100": 0}}],
    "its type is gone": [{**A, "gpus": {"T4": 1}}],
    "the queue is gone": [],
    "its cohort is gone": [{"name": "a", "gpus": {"A100": 2}}],
    "it is in another cohort": [{**A, "cohort": "elsewhere"}],
}


def rules(*queues):
    return parse_queues({"queues": list(queues)}, "the test")


def held_by_a(gpus, cohort="c", uid="a"):
    held = lease(gpus, uid, queue="a")
    return replace(held, request=replace(held.request, cohort=cohort))


# Without a record, the cohort in which a queue is now is the one that lends.
@pytest.mark.parametrize(
    ("change", "cohort"), [(one, "c") for one in CHANGES] + [(one, None) for one in CHANGES if "another" not in one]
)
def test_lent_gpus_are_not_granted_again(change, cohort):
    queues = rules(*CHANGES[change], B, ELSEWHERE)
    assert Capacity(queues, [held_by_a(4, cohort)]).available_gpus(queues.find("b"), "A100") <= 0
    assert Capacity(queues).available_gpus(queues.find("b"), "A100") >= 2


@pytest.mark.parametrize("change", ["its type is gone", "the queue is gone", "its cohort is gone"])
def test_a_cohort_that_lent_nothing_is_not_concerned(change):
    queues = rules(*CHANGES[change], B, ELSEWHERE)
    assert Capacity(queues, [held_by_a(4)]).available_gpus(queues.find("e"), "A100") == 2
    assert Capacity(queues, [held_by_a(4, cohort="")]).available_gpus(queues.find("b"), "A100") == 2


def test_a_queue_that_left_its_cohort_owes_only_what_is_beyond_its_quota():
    queues = rules(*CHANGES["its cohort is gone"], B)
    for held, free in ((4, 0), (3, 1), (2, 2), (1, 2)):
        assert Capacity(queues, [held_by_a(held)]).available_gpus(queues.find("b"), "A100") == free


def test_leases_that_end_in_any_order_leave_nothing_behind():
    seed = random.randrange(1 << 30)  # in the message of each assertion
    chance = random.Random(seed)
    for queues in (rules(*change, B, ELSEWHERE) for change in CHANGES.values()):
        leases = [held_by_a(n, cohort, f"{n}-{cohort}") for n in (1, 2, 3) for cohort in ("c", "", None, "elsewhere")]
        leases += [lease(2, "b", queue="b")]
        capacity = Capacity(queues)
        for adding in (True, False):
            for one in chance.sample(leases, len(leases)):
                (capacity.add if adding else capacity.remove)(capacity.held_gpus_of_lease(one))
        whole = Capacity(queues, leases)
        for name in ("b", "e"):
            queue = queues.find(name)
            assert capacity.available_gpus(queue, "A100") == Capacity(queues).available_gpus(queue, "A100"), seed
            for one in leases:
                capacity.add(capacity.held_gpus_of_lease(one))
            assert capacity.available_gpus(queue, "A100") == whole.available_gpus(queue, "A100"), seed
            for one in leases:
                capacity.remove(capacity.held_gpus_of_lease(one))


@pytest.mark.parametrize("change", CHANGES)
def test_a_lender_waits_until_the_borrower_has_ended(tmp_path, change):
    clock = Clock()
    before = SqliteLedger(tmp_path / "ledger.db", rules(A, B, ELSEWHERE), clock=clock)
    granted = before.request(ask(4, "borrower", queue="a", gpu_type="A100"))
    assert isinstance(granted, Admitted)
    before.close()
    after = SqliteLedger(tmp_path / "ledger.db", rules(*CHANGES[change], B, ELSEWHERE), clock=clock)
    lender = ask(2, "lender", queue="b", gpu_type="A100")
    assert isinstance(after.request(lender), Deferred)
    if change in ("the queue is gone", "its type is gone"):
        assert isinstance(after.request(ask(2, "stranger", queue="e", gpu_type="A100")), Admitted)
    after.release(granted.lease)
    assert isinstance(after.request(lender), Admitted)
    after.close()
