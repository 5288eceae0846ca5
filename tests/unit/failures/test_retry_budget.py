"""Which ends are charged, and when a step is given up."""

import itertools

import pytest
from support.builders.lineage import end_of

from tiphys.failures.retry_budget import back_off_seconds, evaluate_retry_budget
from tiphys.protocol.step_spec import RetryPolicy
from tiphys.records import AttemptEnd, AttemptEndOutcome, Cause, Preemption, utc_now

POLICY = RetryPolicy(preemption=None, infrastructure=2, user_error=0, out_of_memory=1)
INFRA, PREEMPTED, OOM = Cause.INFRASTRUCTURE, Cause.PREEMPTION, Cause.OUT_OF_MEMORY


def test_a_budget_of_two_allows_two_retries_and_no_third():
    ends = [end_of(k, INFRA) for k in (1, 2, 3)]
    assert [evaluate_retry_budget(ends[:n], POLICY, 1).retry for n in (1, 2, 3)] == [True, True, False]


def test_a_cause_without_a_limit_is_always_tried_again():
    decision = evaluate_retry_budget([end_of(k, PREEMPTED) for k in range(1, 500)], POLICY, 1)
    assert decision == (True, 499, None, "retries after preemption are not limited")


def test_a_budget_of_zero_is_never_tried_again_even_after_progress():
    decision = evaluate_retry_budget([end_of(1, Cause.USER_ERROR, progress=True)], POLICY, 1)
    assert not decision.retry
    assert decision.message == "user error is not retried"


def test_other_causes_in_between_neither_charge_nor_refund():
    ends = [end_of(1, INFRA), end_of(2, PREEMPTED), end_of(3, OOM), end_of(4, INFRA)]
    assert evaluate_retry_budget(ends, POLICY, 1)[:3] == (True, 2, 2)


def test_progress_refunds_all_that_was_charged_before_it():
    ends = [end_of(1, INFRA), end_of(2, INFRA), end_of(3, INFRA, progress=True)]
    assert evaluate_retry_budget(ends, POLICY, 1)[:3] == (True, 1, 2)


def test_without_progress_the_same_ends_are_given_up():
    assert not evaluate_retry_budget([end_of(1, INFRA), end_of(2, INFRA), end_of(3, INFRA)], POLICY, 1).retry


def test_the_end_of_the_attempt_that_made_progress_is_the_first_charge():
    ends = [end_of(1, INFRA, progress=True), end_of(2, INFRA), end_of(3, INFRA)]
    decision = evaluate_retry_budget(ends, POLICY, 1)
    assert decision[:3] == (False, 3, 2)
    assert "since the last attempt that saved a checkpoint" in decision.message


def test_progress_of_another_cause_refunds_too():
    ends = [end_of(1, OOM), end_of(2, PREEMPTED, progress=True), end_of(3, OOM)]
    assert evaluate_retry_budget(ends, POLICY, 1)[:3] == (True, 1, 1)


def test_other_submissions_are_not_charged_and_do_not_refund():
    ends = [end_of(1, INFRA), end_of(2, INFRA), end_of(3, INFRA, submission=2), end_of(4, INFRA, submission=2)]
    assert evaluate_retry_budget(ends, POLICY, 2).charged == 2
    assert evaluate_retry_budget(ends, POLICY, 1).charged == 2


def test_order_of_the_ends_does_not_matter():
    ends = [end_of(1, INFRA, progress=True), end_of(2, INFRA), end_of(3, OOM)]
    assert len({evaluate_retry_budget(shuffled, POLICY, 1) for shuffled in itertools.permutations(ends)}) == 1


def test_a_failure_without_a_cause_is_charged_as_unknown():
    assert evaluate_retry_budget([end_of(1, None)], POLICY, 1)[:3] == (True, 1, 2)


def test_before_any_end_there_is_nothing_to_charge():
    assert evaluate_retry_budget([], POLICY, 1)[:2] == (True, 0)


@pytest.mark.parametrize("outcome", [AttemptEndOutcome.DONE, AttemptEndOutcome.FENCED])
def test_a_step_that_is_done_or_taken_over_is_not_tried_again(outcome):
    assert not evaluate_retry_budget([end_of(1, INFRA), end_of(2, outcome=outcome)], POLICY, 1).retry


def test_the_messages_count_for_a_person():
    first, last = (evaluate_retry_budget([end_of(k, INFRA) for k in range(1, n)], POLICY, 1).message for n in (2, 4))
    assert first == "retry 1 of 2 after infrastructure"
    assert last == "all 2 retries after infrastructure are used up"


def test_a_single_retry_is_written_in_the_singular():
    policy = RetryPolicy(infrastructure=1)
    assert evaluate_retry_budget([end_of(k, INFRA) for k in (1, 2)], policy, 1).message == (
        "the only retry after infrastructure is used up"
    )


def went(attempt: int, cause: Cause = PREEMPTED) -> AttemptEnd:
    """The end of an attempt that was asked to go by the rules of its queue."""
    card = Preemption(for_run="other", for_step="fit", asked_at=utc_now(), gone_at=utc_now(), gpus=4)
    return end_of(attempt, cause).model_copy(update={"preempted": card})


def test_going_for_another_by_the_rules_of_the_queue_is_never_charged():
    strict = RetryPolicy(preemption=0)
    assert evaluate_retry_budget([went(1)], strict, 1) == (
        True,
        0,
        0,
        "its queue gave its GPUs to another, which is not charged",
    )
    assert evaluate_retry_budget([went(1), went(2), end_of(3, PREEMPTED)], RetryPolicy(preemption=1), 1)[:3] == (
        True,
        1,
        1,
    )


def test_a_crash_of_one_that_was_asked_to_go_is_charged():
    assert not evaluate_retry_budget([went(1, Cause.USER_ERROR)], RetryPolicy(), 1).retry


def lost_sight_of(attempt: int, cause: Cause = INFRA) -> AttemptEnd:
    """The end of an attempt whose only checkpoint cannot be read."""
    return end_of(attempt, cause).model_copy(update={"progress_unknown": True})


def test_unknown_progress_costs_nothing_and_refunds_nothing():
    ends = [end_of(1, INFRA), *(lost_sight_of(k) for k in range(2, 9)), end_of(9, INFRA)]
    assert [evaluate_retry_budget(ends[:n], POLICY, 1)[:2] for n in (1, 2, 8, 9)] == [
        (True, 1),
        (True, 1),
        (True, 1),
        (True, 2),
    ]
    assert not evaluate_retry_budget([*ends, end_of(10, INFRA)], POLICY, 1).retry


def test_a_cause_without_retries_is_not_retried_for_lack_of_evidence():
    assert not evaluate_retry_budget([lost_sight_of(1, Cause.USER_ERROR)], POLICY, 1).retry


ERROR = Cause.USER_ERROR


@pytest.mark.parametrize(
    ("causes", "seconds"),
    [
        ([], 0),
        ([PREEMPTED], 0),
        ([INFRA], 0),
        ([INFRA, INFRA], 5),
        ([INFRA, PREEMPTED, INFRA], 10),
        ([INFRA] * 1000, 300),
        ([ERROR], 5),
        ([ERROR, ERROR], 10),
        ([ERROR, INFRA], 5),
        ([INFRA, ERROR], 10),
        ([None], 5),
        ([Cause.STORAGE], 5),
        ([Cause.IMAGE], 5),
    ],
)
def test_back_off_is_left_out_only_after_a_first_failure_from_outside(causes, seconds):
    ends = [end_of(number, cause) for number, cause in enumerate(causes, 1)]
    assert back_off_seconds(ends, RetryPolicy(), 1) == seconds


def test_back_off_begins_anew_after_progress():
    ends = [end_of(1, INFRA), end_of(2, INFRA), end_of(3, INFRA, progress=True)]
    assert back_off_seconds(ends, RetryPolicy(), 1) == 0
    assert back_off_seconds([*ends, end_of(4, INFRA)], RetryPolicy(), 1) == 5
    assert back_off_seconds([end_of(1, ERROR), end_of(2, ERROR, progress=True)], RetryPolicy(), 1) == 5


def test_back_off_does_not_count_failures_of_other_submissions():
    ends = [end_of(1, ERROR), end_of(2, ERROR), end_of(3, INFRA, submission=2)]
    assert back_off_seconds(ends, RetryPolicy(), 2) == 0
    assert back_off_seconds(ends, RetryPolicy(), 3) == 0
