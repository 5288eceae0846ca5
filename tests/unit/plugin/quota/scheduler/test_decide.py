"""The decision on one request for GPUs, by what is held, what waits and what exists."""

import pytest
from support.builders.ledger import NOW, ask, deferral, lease, queues, strict, waiting
from tiphys_plugin.quota.lease import AdmissionReason, Admitted, Deferred, LedgerState, Rejected
from tiphys_plugin.quota.queues import MisconfiguredQueues
from tiphys_plugin.quota.scheduler.decide import decide_admission

EIGHT = queues(research={"A100": 8})
MIXED = queues(research={"A100": 8, "*": 4}, nightly={"*": 2})
STOCK = {"A100": {"count": 8, "memory_mb": 81920}, "T4": {"count": 4, "memory_mb": 16384}}


def decided(state: LedgerState, request, arrival: int = 100):
    return decide_admission(state, request, arrival, NOW)


def test_without_a_queue_file_nothing_is_limited():
    assert decided(LedgerState(queues=None), ask(1000, queue="any")) == Admitted("", "A100")
    assert decided(LedgerState(queues=None), ask(1000, gpu_type=None)) == Admitted("", "*")


def test_a_type_that_the_queue_has_not_is_rejected_with_those_that_it_has():
    answer = decided(LedgerState(queues=EIGHT), ask(1, gpu_type="H100"))
    assert isinstance(answer, Rejected)
    assert answer.reason is AdmissionReason.NO_MATCHING_GPU_TYPE
    assert "queue research has no H100; it has: A100" in answer.message


def test_reason_of_a_full_queue_has_the_numbers():
    answer = decided(LedgerState((lease(8),), queues=EIGHT), ask(4))
    assert answer == Deferred(
        AdmissionReason.WAITING_FOR_QUOTA, "queue research holds 8 of 8 A100; 4 A100 asked; position 1", position=1
    )


@pytest.mark.parametrize(
    ("request_", "reason", "says"),
    [
        (ask(1, queue="secret"), AdmissionReason.QUEUE_UNKNOWN, "namespace ml may use: research, nightly"),
        (ask(9), AdmissionReason.EXCEEDS_MAX_QUOTA, "queue research may hold at most 8; ask for fewer"),
        (ask(3, queue="nightly"), AdmissionReason.EXCEEDS_MAX_QUOTA, "queue research may hold 8"),
        (ask(9, queue="nightly"), AdmissionReason.EXCEEDS_MAX_QUOTA, "the largest quota is 8, of queue research"),
    ],
)
def test_an_impossible_request_is_rejected_with_the_nearest_possible(request_, reason, says):
    answer = decided(LedgerState(queues=MIXED), request_)
    assert isinstance(answer, Rejected)
    assert answer.reason is reason
    assert says in answer.message


def test_star_serves_the_types_that_are_not_named_and_no_others():
    assert decided(LedgerState(queues=MIXED), ask(4, gpu_type="T4")) == Admitted("", "*")
    full = (lease(8),)
    assert deferral(decided(LedgerState(full, queues=MIXED), ask(1))) is AdmissionReason.WAITING_FOR_QUOTA


def test_request_without_a_type_takes_the_pool_with_the_least_left_over():
    assert decided(LedgerState(queues=MIXED), ask(2, gpu_type=None)) == Admitted("", "*")
    assert decided(LedgerState(queues=MIXED), ask(6, gpu_type=None)) == Admitted("", "A100")
    assert decided(LedgerState((lease(6),), queues=MIXED), ask(2, gpu_type=None)) == Admitted("", "A100")


def test_small_request_does_not_overtake_a_large_one_that_waits():
    state = LedgerState((lease(4),), (waiting(8, arrival=1),), queues=strict(EIGHT))
    answer = decided(state, ask(2), arrival=2)
    assert isinstance(answer, Deferred)
    assert (answer.reason, answer.position) == (AdmissionReason.BEHIND_EARLIER_REQUEST, 2)
    assert "run-waiter-1/fit" in answer.message


def test_earlier_request_is_not_held_up_by_a_later_one():
    state = LedgerState((lease(4),), (waiting(8, arrival=7),), queues=EIGHT)
    assert isinstance(decided(state, ask(2), arrival=2), Admitted)


def test_higher_priority_goes_first_however_late_it_came():
    state = LedgerState((), (waiting(8, arrival=7, priority=10),), queues=EIGHT)
    answer = decided(state, ask(2), arrival=2)
    assert isinstance(answer, Deferred)
    assert (answer.reason, answer.position) == (AdmissionReason.BEHIND_HIGHER_PRIORITY, 2)
    assert isinstance(decided(state, ask(2, priority=11), arrival=9), Admitted)


def test_requests_of_other_pools_and_queues_do_not_compete():
    state = LedgerState((lease(8),), (waiting(8, 1), waiting(2, 2, queue="nightly", gpu_type="T4")), queues=MIXED)
    assert isinstance(decided(state, ask(4, gpu_type="T4"), arrival=3), Admitted)


def test_inventory_is_a_second_limit():
    both = queues(STOCK, research={"A100": 8}, nightly={"A100": 8})
    answer = decided(LedgerState((lease(6, queue="nightly"),), queues=both), ask(4))
    assert isinstance(answer, Deferred)
    assert answer.reason is AdmissionReason.WAITING_FOR_INVENTORY
    assert answer.message.startswith("6 of 8 A100 of the cluster are in use; 4 A100 asked")


def test_requests_for_the_inventory_compete_across_queues():
    both = queues(STOCK, research={"A100": 8}, nightly={"A100": 8})
    state = LedgerState((lease(4, queue="research"),), (waiting(8, 1, queue="nightly"),), queues=both)
    answer = decided(state, ask(2), arrival=2)
    assert isinstance(answer, Deferred)
    assert answer.reason is AdmissionReason.BEHIND_EARLIER_REQUEST
    # The one ahead waits for its own quota, not for GPUs, so it is in nobody's way.
    blocked = LedgerState((lease(4, queue="nightly"),), (waiting(8, 1, queue="nightly"),), queues=both)
    assert isinstance(decided(blocked, ask(2), arrival=2), Admitted)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (ask(1, gpu_type="H100"), AdmissionReason.NO_MATCHING_GPU_TYPE),
        (ask(1, gpu_type="T4", min_gpu_memory_mb=20000), AdmissionReason.GPU_MEMORY_TOO_SMALL),
        (ask(1, gpu_type=None, min_gpu_memory_mb=90000), AdmissionReason.GPU_MEMORY_TOO_SMALL),
        (ask(6, gpu_type="T4"), AdmissionReason.EXCEEDS_MAX_QUOTA),
    ],
)
def test_a_request_that_the_cluster_cannot_serve_is_rejected(request_, reason):
    answer = decided(LedgerState(queues=queues(STOCK, research={"*": 20})), request_)
    assert isinstance(answer, Rejected)
    assert answer.reason is reason


def test_quota_of_one_type_and_inventory_of_another_do_not_add_up():
    """8 A100 may be held and 6 exist; 10 GPUs exist and 2 that are no A100 may be held."""
    rules = queues({"A100": {"count": 6}, "T4": {"count": 4}}, research={"A100": 8, "*": 2})
    answer = decided(LedgerState(queues=rules), ask(7, gpu_type=None))
    assert isinstance(answer, Rejected)
    assert "ask for at most 6" in answer.message
    assert decided(LedgerState(queues=rules), ask(6, gpu_type=None)) == Admitted("", "A100")


def test_memory_decides_which_pool_a_request_without_a_type_may_take():
    types = queues(STOCK, research={"A100": 8, "T4": 4})
    assert decided(LedgerState(queues=types), ask(1, gpu_type=None, min_gpu_memory_mb=40000)) == Admitted("", "A100")
    assert decided(LedgerState(queues=types), ask(1, gpu_type=None)) == Admitted("", "T4")


def test_memory_that_is_not_declared_is_taken_as_enough():
    types = queues({"A100": {"count": 8}}, research={"A100": 8})
    assert isinstance(decided(LedgerState(queues=types), ask(1, min_gpu_memory_mb=10**6)), Admitted)


def test_waiting_request_of_a_removed_queue_blocks_no_other():
    state = LedgerState((), (waiting(8, 1, queue="gone", priority=99),), queues=EIGHT)
    assert isinstance(decided(state, ask(2), arrival=2), Admitted)


def test_leases_count_in_the_pool_that_they_would_draw_from_today():
    named_later = LedgerState((lease(6, pool="*"),), queues=queues(research={"A100": 8}))
    assert deferral(decided(named_later, ask(4))) is AdmissionReason.WAITING_FOR_QUOTA
    named_before = LedgerState((lease(6, pool="A100"),), queues=queues(research={"*": 8}))
    assert deferral(decided(named_before, ask(4, gpu_type="T4"))) is AdmissionReason.WAITING_FOR_QUOTA
    untyped = LedgerState((lease(6, pool="A100", gpu_type=None),), queues=queues(research={"*": 8}))
    assert deferral(decided(untyped, ask(4))) is AdmissionReason.WAITING_FOR_QUOTA


def test_type_that_an_untyped_lease_got_stays_in_use_when_its_queue_no_longer_names_it():
    edited = queues(STOCK, research={"*": 12}, nightly={"A100": 8})
    answer = decided(LedgerState((lease(8, pool="A100", gpu_type=None),), queues=edited), ask(1, queue="nightly"))
    assert isinstance(answer, Deferred)
    assert answer.reason is AdmissionReason.WAITING_FOR_INVENTORY


def test_rules_that_cannot_be_read_grant_nothing_and_say_why():
    state = LedgerState(
        (), (waiting(8, 1), waiting(8, 2, queue="nightly")), queues=MisconfiguredQueues("queue 'a' is declared twice")
    )
    assert decided(state, ask(1)) == Deferred(AdmissionReason.MISCONFIGURED, "queue 'a' is declared twice", position=2)


def test_a_request_that_an_untyped_lease_and_an_earlier_start_leave_no_gpu_waits_behind_that_start():
    rules = queues(a={"A100": 1, "T4": 1}, b={"A100": 0, "*": 1}, inventory={"A100": {"count": 1}, "T4": {"count": 1}})
    held = (lease(1, queue="b", gpu_type=None, pool="*"),)
    earlier = (waiting(1, 1, queue="a", gpu_type="A100"),)
    answer = decided(LedgerState(held, earlier, queues=strict(rules)), ask(1, "second", queue="a", gpu_type="T4"), 2)
    assert isinstance(answer, Deferred)
    assert [one.reason for one in answer.reasons] == [AdmissionReason.BEHIND_EARLIER_REQUEST]
    assert answer.position == 2
