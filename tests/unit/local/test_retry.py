"""What follows a failed attempt, in Argo's order of checks.

shutdown → longest duration → back-off → policy → limit → expression
"""

from typing import Any

import pytest

from hera_pipelines.local.nodes import NodePhase
from hera_pipelines.local.retry import Again, GiveUp, Observation, RetryStrategy, Wait, attempt_variables
from tiphys.errors import UsageError

FAILED = Observation(1, NodePhase.FAILED, "main: Error (exit code 1)", "1", duration=2.0, elapsed=2.0)
ERROR = FAILED._replace(phase=NodePhase.ERROR, message="pod deleted", exit_code=None)


def after(strategy: dict[str, Any], seen: Observation) -> object:
    return RetryStrategy.read(strategy).after(seen)


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
    policy: dict[str, str], seen: Observation, again: bool
) -> None:
    expected = Again() if again else GiveUp(seen.message)
    assert after({"limit": "3", **policy}, seen) == expected


def test_the_limit_counts_retries_and_not_attempts() -> None:
    assert after({"limit": 2}, FAILED._replace(attempts=2)) == Again()
    assert after({"limit": 2}, FAILED._replace(attempts=3)) == GiveUp("No more retries left")
    assert after({}, FAILED._replace(attempts=1000)) == Again()


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
def test_the_expression_sees_the_last_attempt(expression: str, seen: Observation, again: bool) -> None:
    expected = Again() if again else GiveUp("retryStrategy.expression evaluated to false")
    assert after({"limit": 3, "expression": expression}, seen) == expected


BACKOFF = {"limit": 10, "backoff": {"duration": "2s", "factor": "3", "cap": "20s"}}


@pytest.mark.parametrize(("attempts", "wait"), [(1, 2), (2, 6), (3, 18), (4, 20), (10, 20)])
def test_back_off_grows_to_its_cap(attempts: int, wait: float) -> None:
    decision = after(BACKOFF, FAILED._replace(attempts=attempts))
    assert decision == Wait(wait, f"Backoff for {wait} seconds")
    assert after(BACKOFF, FAILED._replace(attempts=attempts, waited=True)) == Again()


def test_without_a_limit_there_is_no_back_off() -> None:
    assert after({"backoff": {"duration": "2s"}}, FAILED) == Again()


def test_even_what_is_not_retried_waits_first() -> None:
    strategy = {**BACKOFF, "retryPolicy": "OnError"}
    assert isinstance(after(strategy, FAILED), Wait)
    assert after(strategy, FAILED._replace(waited=True)) == GiveUp(FAILED.message)


def test_after_the_last_retry_nothing_is_waited_for() -> None:
    assert after({"limit": 1, "backoff": {"duration": "1h"}}, FAILED._replace(attempts=2)) == GiveUp(
        "No more retries left"
    )


def test_the_longest_duration_ends_it() -> None:
    strategy = {"limit": 9, "backoff": {"duration": "2s", "maxDuration": "10s"}}
    assert after(strategy, FAILED._replace(elapsed=11.0)) == GiveUp("Max duration limit exceeded")
    assert after(strategy, FAILED._replace(elapsed=9.0)) == GiveUp("Backoff would exceed max duration limit")
    assert after(strategy, FAILED._replace(elapsed=4.0, waited=True)) == Again(6.0)


def test_shutdown_comes_before_everything() -> None:
    assert after(BACKOFF, FAILED._replace(stopped="Stopped with strategy 'Stop'")) == GiveUp(
        "Stopped with strategy 'Stop'"
    )


def test_a_back_off_of_many_attempts_does_not_overflow() -> None:
    assert RetryStrategy.read(BACKOFF).wait_seconds(10_000) == 20


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
        RetryStrategy.read(strategy)


def test_variables_of_an_attempt() -> None:
    assert attempt_variables(0, None)["lastRetry.exitCode"] == "0"
    second = attempt_variables(1, FAILED)
    assert (second["retries"], second["lastRetry.exitCode"], second["lastRetry.status"]) == ("1", "1", "Failed")
    assert attempt_variables(1, ERROR)["lastRetry.exitCode"] == "0"
