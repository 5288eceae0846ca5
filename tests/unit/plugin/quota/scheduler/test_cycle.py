"""The order in which queues are served, and who may start before somebody who has to wait.

| who                                             | goes first                      |
|-------------------------------------------------|---------------------------------|
| stays within its quota                          | before who borrows              |
| of the same: higher priority                    | before lower                    |
| of the same: queue with the smaller share       | before the larger               |
| of the same: earlier arrival                    | before later                    |
| behind somebody whose start is known            | if that start is not delayed    |
| behind somebody whose start is not known        | if it wants nothing that is short |
"""

from dataclasses import replace
from datetime import timedelta

import pytest
from support.builders.ledger import NOW, ask, cohort, deferral, lease, queues, strict, waiting
from tiphys_plugin.quota.lease import (
    AdmissionReason,
    Admitted,
    Deferred,
    EndedUsage,
    LedgerState,
    PreemptionNotice,
    Rejected,
)
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler import pools
from tiphys_plugin.quota.scheduler.decide import decide_admission, decide_pending

EIGHT = queues(research={"A100": 8})
PAIR = cohort(research={"gpus": {"A100": 8}}, nightly={"gpus": {"A100": 8}})
STRICT = strict(EIGHT)
HOUR = 3600


def decided(state: LedgerState, request, arrival: int = 100):
    return decide_admission(state, request, arrival, NOW)


def admits(state: LedgerState, request, arrival: int = 100) -> bool:
    return isinstance(decided(state, request, arrival), Admitted)


@pytest.mark.parametrize(("asked", "admitted"), [(4, True), (5, False)])
def test_no_more_is_borrowed_than_the_borrowing_limit(asked, admitted):
    rules = cohort(research={"gpus": {"A100": 8}, "borrowing_limit": {"A100": 4}}, nightly={"gpus": {"A100": 8}})
    answer = decided(LedgerState((lease(8),), queues=rules), ask(asked))
    assert isinstance(answer, Admitted) is admitted
    if not admitted:
        assert answer.reason is AdmissionReason.BORROWING_LIMIT_REACHED


@pytest.mark.parametrize(("asked", "admitted"), [(3, True), (4, False)])
def test_no_more_is_lent_than_the_lending_limit(asked, admitted):
    rules = cohort(research={"gpus": {"A100": 8}}, nightly={"gpus": {"A100": 8}, "lending_limit": {"A100": 3}})
    answer = decided(LedgerState((lease(8),), queues=rules), ask(asked))
    assert isinstance(answer, Admitted) is admitted
    if not admitted:
        assert answer.reason is AdmissionReason.WAITING_FOR_QUOTA
        assert "queue research holds 8 of 8 A100 and may take 3 more now, what cohort lab lends included" in (
            answer.message
        )


def test_gpus_above_the_lending_limit_stay_with_their_queue():
    rules = cohort(research={"gpus": {"A100": 8}}, nightly={"gpus": {"A100": 8}, "lending_limit": {"A100": 3}})
    greedy = LedgerState((lease(11),), (waiting(4, 1, priority=99),), queues=rules)
    assert admits(greedy, ask(5, queue="nightly"))
    assert not admits(greedy, ask(6, queue="nightly"))


def test_a_request_above_the_quota_of_the_cohort_is_rejected():
    answer = decided(LedgerState(queues=PAIR), ask(17))
    assert isinstance(answer, Rejected)
    assert "queue research may hold at most 16, borrowed ones included" in answer.message


def test_a_stopped_queue_admits_no_request_and_lends_its_quota():
    rules = cohort(research={"gpus": {"A100": 8}, "stopped": True}, nightly={"gpus": {"A100": 8}})
    answer = decided(LedgerState((), (waiting(1, 1),), queues=rules), ask(1))
    assert isinstance(answer, Deferred)
    assert (answer.reason, answer.position) == (AdmissionReason.QUEUE_STOPPED, 2)
    assert admits(LedgerState((), (waiting(16, 1, priority=9),), queues=rules), ask(16, queue="nightly"))


def test_a_request_within_its_quota_goes_before_one_that_borrows():
    borrower = waiting(16, 1, queue="nightly", priority=50)
    assert admits(LedgerState((), (borrower,), queues=PAIR), ask(8), arrival=2)
    answer = decided(LedgerState((), (waiting(8, 2),), queues=PAIR), ask(16, queue="nightly", priority=50), arrival=1)
    assert deferral(answer) is AdmissionReason.BEHIND_SMALLER_SHARE


def test_a_queue_that_uses_less_goes_first_of_two_that_borrow():
    rules = cohort(a={"gpus": {"A100": 0}}, b={"gpus": {"A100": 0}}, lender={"gpus": {"A100": 8}})
    held = (lease(4, queue="a"),)
    assert not admits(LedgerState(held, (waiting(4, 9, queue="b"),), queues=rules), ask(4, queue="a"), arrival=1)
    answer = decided(LedgerState(held, (waiting(4, 9, queue="b"),), queues=rules), ask(4, queue="a"), arrival=1)
    assert answer.reason is AdmissionReason.BEHIND_SMALLER_SHARE
    assert admits(LedgerState(held, (waiting(4, 1, queue="a"),), queues=rules), ask(4, queue="b"), arrival=9)


def test_weight_is_how_much_more_a_queue_may_use():
    rules = cohort(a={"gpus": {"A100": 0}, "weight": 4}, b={"gpus": {"A100": 0}}, lender={"gpus": {"A100": 16}})
    held = (lease(6, "a", queue="a"), lease(2, "b", queue="b"))
    assert admits(LedgerState(held, (waiting(8, 1, queue="b"),), queues=rules), ask(8, queue="a"), arrival=9)


def test_recent_usage_counts_and_is_forgotten():
    rules = cohort(a={"gpus": {"A100": 0}}, b={"gpus": {"A100": 0}}, lender={"gpus": {"A100": 8}})
    rival = (waiting(8, 9, queue="b"),)
    recent = (EndedUsage("a", "A100", 8.0, NOW - timedelta(hours=1)),)
    assert not admits(LedgerState((), rival, recent, queues=rules), ask(8, queue="a"), arrival=1)
    both = (*recent, EndedUsage("b", "A100", 8.0, NOW - timedelta(minutes=1)))
    assert admits(LedgerState((), rival, both, queues=rules), ask(8, queue="a"), arrival=1)


def test_a_burst_is_not_let_in_before_its_use_is_counted():
    """Everybody of queue a asks at once; b, which asks last, is served before the second of a."""
    rules = cohort(a={"gpus": {"A100": 0}}, b={"gpus": {"A100": 0}}, lender={"gpus": {"A100": 8}})
    burst = tuple(waiting(4, arrival, queue="a") for arrival in range(1, 6))
    assert admits(LedgerState((), burst, queues=rules), ask(4, queue="b"), arrival=9)
    late = (*burst[1:], waiting(4, 9, queue="b"))
    assert admits(LedgerState((), late, queues=rules), burst[0].request, arrival=1)
    assert not admits(
        LedgerState((), (burst[0], *burst[2:], waiting(4, 9, queue="b")), queues=rules), burst[1].request, arrival=2
    )


def test_a_short_one_starts_before_the_one_that_cannot_start_yet():
    running = (lease(6, seconds=2 * HOUR),)
    state = LedgerState(running, (waiting(8, 1),), queues=EIGHT)
    assert admits(state, ask(2, seconds=HOUR))
    answer = decided(state, ask(2, seconds=3 * HOUR))
    assert isinstance(answer, Deferred)
    assert answer.reason is AdmissionReason.RESERVED
    assert (
        "2 A100 would be free, and are kept for run-waiter-1/fit (8 A100), expected to start by 2026-01-01 02:00"
        in (answer.message)
    )
    assert not admits(state, ask(2)), "nobody said how long it runs"


def test_a_long_one_starts_before_it_if_enough_will_be_left():
    running = (lease(4, seconds=HOUR), lease(2, "b", seconds=HOUR))
    state = LedgerState(running, (waiting(6, 1),), queues=EIGHT)
    assert admits(state, ask(2)), "8 will be free, and 6 are enough"
    assert not admits(LedgerState(running, (waiting(7, 1),), queues=EIGHT), ask(2))


def test_requests_that_start_earlier_do_not_delay_the_blocked_one_together():
    running = (lease(4, seconds=HOUR),)
    state = LedgerState(running, (waiting(6, 1), waiting(2, 2)), queues=EIGHT)
    answer = decided(state, ask(2), arrival=3)
    assert deferral(answer) is AdmissionReason.RESERVED, "the second has taken the two that the first leaves over"


def test_backfill_is_closed_where_no_end_is_known():
    state = LedgerState((lease(6),), (waiting(8, 1),), queues=STRICT)
    assert not admits(state, ask(1, seconds=60))


def test_an_end_that_has_passed_is_not_known():
    overrun = lease(6, seconds=60)
    state = LedgerState((overrun,), (waiting(8, 1),), queues=STRICT)
    assert isinstance(decide_admission(state, ask(1, seconds=30), 9, NOW + timedelta(seconds=30)), Admitted)
    assert (
        deferral(decide_admission(state, ask(1, seconds=30), 9, NOW + timedelta(seconds=90)))
        is AdmissionReason.BEHIND_EARLIER_REQUEST
    )


def test_the_blocked_request_has_an_expected_start():
    answer = decided(LedgerState((lease(6, seconds=HOUR),), queues=EIGHT), ask(8))
    assert isinstance(answer, Deferred)
    assert answer.expected_start == NOW + timedelta(hours=1)
    assert answer.message.endswith("position 1, expected to start by 2026-01-01 01:00:00 UTC")
    assert decided(LedgerState((lease(6),), queues=EIGHT), ask(8)).expected_start is None


def test_reasons_are_given_with_the_heaviest_first():
    stocked = queues({"A100": {"count": 8}}, research={"A100": 8}, nightly={"A100": 8})
    held = (lease(8, queue="research"),)
    answer = decided(LedgerState(held, (waiting(2, 1),), queues=stocked), ask(4))
    assert [one.reason for one in answer.reasons] == [
        AdmissionReason.WAITING_FOR_QUOTA,
        AdmissionReason.WAITING_FOR_INVENTORY,
        AdmissionReason.BEHIND_EARLIER_REQUEST,
    ]
    assert answer.reason is AdmissionReason.WAITING_FOR_QUOTA


def test_a_request_that_waits_for_its_own_quota_reserves_nothing_of_other_queues():
    stocked = queues({"A100": {"count": 16}}, research={"A100": 8}, nightly={"A100": 8})
    state = LedgerState((lease(8),), (waiting(8, 1, priority=99),), queues=stocked)
    assert admits(state, ask(8, queue="nightly"))


def leaving(gpus: int, uid: str, whom: str, **changes):
    asked = PreemptionNotice(whom, "fit", NOW, NOW + timedelta(minutes=2))
    return replace(lease(gpus, uid, **changes), preemption=asked)


def test_a_preemptor_waits_for_its_victim_with_an_expected_start():
    state = LedgerState((leaving(8, "victim", whom="first"),), (waiting(4, 1, "other", priority=9),), queues=EIGHT)
    answer = decided(state, ask(8, "first"), arrival=2)
    assert isinstance(answer, Deferred), "nothing is free before it is gone"
    assert (answer.position, answer.expected_start) == (1, NOW + timedelta(minutes=2))
    assert answer.reason is AdmissionReason.WAITING_FOR_PREEMPTED_CHECKPOINT
    assert "run-victim/fit was asked to save and go at 00:00:00, by 00:02:00 at the latest" in answer.message


@pytest.mark.parametrize(("gpus", "subject"), [((4, 4), " and 1 other were"), ((4, 2, 2), " and 2 others were")])
def test_the_message_counts_the_trainings_that_were_asked_to_go(gpus, subject):
    *victims, last = (leaving(count, f"victim-{number}", whom="first") for number, count in enumerate(gpus))
    asked = PreemptionNotice("first", "fit", NOW + timedelta(seconds=30), NOW + timedelta(minutes=5))
    answer = decided(LedgerState((*victims, replace(last, preemption=asked)), queues=EIGHT), ask(8, "first"))
    named = f"{last.request.run}/fit{subject} asked to save and go at 00:00:00, by 00:05:00 at the latest"
    assert answer.message.startswith(named), "the first time and the last deadline"


def test_the_cache_of_request_shapes_is_bounded_and_changes_no_decision(monkeypatch):
    monkeypatch.setattr(pools, "MAX_CACHED_SHAPES", 2)
    rules = queues(research={"A100": 8})
    admitted = [admits(LedgerState((), queues=rules), ask(count)) for count in range(1, 13)]
    assert admitted == [True] * 8 + [False] * 4
    assert len(rules.pool_options_caches[0]) <= 2


def test_freed_gpus_are_reserved_for_the_request_that_preempted():
    state = LedgerState((leaving(4, "victim", whom="first"),), (waiting(8, 2, "first"),), queues=EIGHT)
    answer = decided(state, ask(2, "quick", priority=9), arrival=1)
    assert isinstance(answer, Deferred)
    assert answer.reason is AdmissionReason.RESERVED
    assert "2 A100 would be free, and are kept for run-first/fit (8 A100), expected to start by 2026-01-01 00:02" in (
        answer.message
    )
    assert admits(state, ask(2, "quick", seconds=60), arrival=3), "and who is over before that is in nobody's way"


def test_a_deferred_request_names_the_reservation_before_it():
    state = LedgerState((leaving(8, "victim", whom="first"),), (waiting(8, 2, "first"),), queues=EIGHT)
    answer = decided(state, ask(8, "other", priority=9), arrival=1)
    assert isinstance(answer, Deferred)
    assert "behind run-first/fit (8 A100, for which GPUs are kept)" in answer.reasons[1].message


def test_freed_gpus_do_not_go_to_the_preemptor_of_another_victim():
    """The four free ones are those that left for ``first``; nothing says so any more, but that it came before."""
    queue = {"name": "research", "gpus": {"A100": 8}, "preempts_lower_priority": True}
    rules = Queues.model_validate({"queues": [queue]})
    state = LedgerState((leaving(4, "victim", whom="second"),), (waiting(4, 2, "second", priority=9),), queues=rules)
    assert admits(state, ask(4, "first", priority=9), arrival=1)
    assert not admits(state, ask(4, "late", priority=99), arrival=3), "who came later takes nothing from the second"
    assert not admits(state, ask(4, "low"), arrival=1), "nor does one that was behind it"


def test_the_higher_priority_goes_first_of_two_requests_with_reserved_gpus():
    stocked = queues({"A100": {"count": 8}}, a={"A100": 8}, b={"A100": 8})
    low = replace(waiting(8, 1, "low", queue="a", priority=5), promised_at=NOW)
    high = replace(waiting(8, 2, "high", queue="b", priority=9), promised_at=NOW)
    state = LedgerState((), (low, high), queues=stocked)
    assert isinstance(decide_pending(state, high, NOW), Admitted)
    answer = decide_pending(state, low, NOW)
    assert isinstance(answer, Deferred)
    assert (answer.reason, answer.position) == (AdmissionReason.RESERVED, 2)


def test_an_overdue_victim_still_holds_its_gpus():
    late = LedgerState((leaving(8, "victim", whom="first"),), (waiting(8, 1, "first"),), queues=EIGHT)
    answer = decide_admission(late, ask(1, "other"), 2, NOW + timedelta(minutes=3))
    assert deferral(answer) is AdmissionReason.WAITING_FOR_QUOTA
    assert answer.expected_start is None
