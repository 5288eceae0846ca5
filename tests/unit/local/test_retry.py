"""What follows a failed attempt, in Argo's order of checks.

shutdown → longest duration → back-off → policy → limit → expression, but no back-off before no attempt
"""

from typing import Any

import pytest

from hera_pipelines.local.nodes import NodePhase
from hera_pipelines.local.retry import (
    BackoffWait,
    NextAttempt,
    NoRetry,
    RetryObservation,
    RetryStrategy,
    attempt_variables,
)
from tiphys.errors import UsageError

FAILED = RetryObservation(
    1, NodePhase.FAILED, "main: Error (exit code 1)", "1", duration_seconds=2.0, elapsed_seconds=2.0
)
ERROR = FAILED._replace(phase=NodePhase.ERROR, message="pod deleted", exit_code=None)


def after(strategy: dict[str, Any], seen: RetryObservation) -> object:
    return RetryStrategy.parse(strategy).decide(seen)


@pytest.mark.parametrize(
    ("policy", "seen", "again"),
    [
        ({}, FAILED, True),
        ({}, ERROR, False),
        ({"retryPolicy": "OnError"}, FAILED, False),
        ({"retryPolicy": "OnError"}, ERROR, True),
        ({"retryPolicy": "Always"}, ERROR, True),
        ({"expression": "true"}, ERROR, True),
    ],
)
def test_the_policy_decides_by_phase_and_an_expression_makes_it_always(
    policy: dict[str, str], seen: RetryObservation, again: bool
) -> None:
    expected = NextAttempt() if again else NoRetry(seen.message)
    assert after({"limit": "3", **policy}, seen) == expected


def test_the_limit_counts_retries_and_not_attempts() -> None:
    assert after({"limit": 2}, FAILED._replace(attempts=2)) == NextAttempt()
    assert after({"limit": 2}, FAILED._replace(attempts=3)) == NoRetry("No more retries left")
    assert after({}, FAILED._replace(attempts=1000)) == NextAttempt()


@pytest.mark.parametrize(
    ("expression", "seen", "again"),
    [
        ("lastRetry.status == 'Error' || asInt(lastRetry.exitCode) in [75]", FAILED, False),
        ("lastRetry.status == 'Error' || asInt(lastRetry.exitCode) in [75]", FAILED._replace(exit_code="75"), True),
        ("lastRetry.exitCode == '-1'", ERROR, True),
        ("retries == '0' && asFloat(lastRetry.duration) < 3", FAILED, True),
        ("lastRetry.message matches 'deleted'", ERROR, True),
    ],
)
def test_the_expression_sees_the_last_attempt(expression: str, seen: RetryObservation, again: bool) -> None:
    expected = NextAttempt() if again else NoRetry("retryStrategy.expression evaluated to false")
    assert after({"limit": 3, "expression": expression}, seen) == expected


BACKOFF = {"limit": 10, "backoff": {"duration": "2s", "factor": "3", "cap": "20s"}}


@pytest.mark.parametrize(("attempts", "wait"), [(1, 2), (2, 6), (3, 18), (4, 20), (10, 20)])
def test_back_off_grows_to_its_cap(attempts: int, wait: float) -> None:
    decision = after(BACKOFF, FAILED._replace(attempts=attempts))
    assert decision == BackoffWait(wait, f"Backoff for {wait} seconds")
    assert after(BACKOFF, FAILED._replace(attempts=attempts, has_waited=True)) == NextAttempt()


def test_without_a_limit_there_is_no_back_off() -> None:
    assert after({"backoff": {"duration": "2s"}}, FAILED) == NextAttempt()


def test_a_failure_that_is_not_retried_has_no_backoff() -> None:
    assert after({**BACKOFF, "retryPolicy": "OnError"}, FAILED) == NoRetry(FAILED.message)
    refused = "retryStrategy.expression evaluated to false"
    assert after({**BACKOFF, "expression": "lastRetry.exitCode == '75'"}, FAILED) == NoRetry(refused)


def test_after_the_last_retry_nothing_is_waited_for() -> None:
    assert after({"limit": 1, "backoff": {"duration": "1h"}}, FAILED._replace(attempts=2)) == NoRetry(
        "No more retries left"
    )


def test_the_longest_duration_ends_it() -> None:
    strategy = {"limit": 9, "backoff": {"duration": "2s", "maxDuration": "10s"}}
    assert after(strategy, FAILED._replace(elapsed_seconds=11.0)) == NoRetry("Max duration limit exceeded")
    assert after(strategy, FAILED._replace(elapsed_seconds=9.0)) == NoRetry("Backoff would exceed max duration limit")
    assert after(strategy, FAILED._replace(elapsed_seconds=4.0, has_waited=True)) == NextAttempt(6.0)


def test_shutdown_comes_before_everything() -> None:
    assert after(BACKOFF, FAILED._replace(stop_reason="Stopped with strategy 'Stop'")) == NoRetry(
        "Stopped with strategy 'Stop'"
    )


def test_a_back_off_of_many_attempts_does_not_overflow() -> None:
    assert RetryStrategy.parse(BACKOFF).backoff_seconds(10_000) == 20


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ({"retryPolicy": "OnTransientError"}, "OnTransientError"),
        ({"backoff": {"factor": 2}}, "no duration"),
        ({"limit": "many"}, "many"),
    ],
)
def test_a_strategy_that_cannot_be_honoured_is_refused(strategy: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        RetryStrategy.parse(strategy)


def test_variables_of_an_attempt() -> None:
    assert attempt_variables(0, None)["lastRetry.exitCode"] == "0"
    second = attempt_variables(1, FAILED)
    assert (second["retries"], second["lastRetry.exitCode"], second["lastRetry.status"]) == ("1", "1", "Failed")
    assert attempt_variables(1, ERROR)["lastRetry.exitCode"] == "0"
