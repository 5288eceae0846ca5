"""A step's retryStrategy, judged by the classifier that judges training attempts.

Argo decides for a step, the plugin for an attempt, from the same evidence; so
the expression must say "again" exactly where the classifier names a cause that
has a budget.
"""

from itertools import product

import pytest

from hera_pipelines.compile.retries import (
    CAUSES_HIDDEN_FROM_ARGO,
    UNLIMITED_RETRIES,
    attempt_retry_strategy,
    retry_expression,
    step_retry_strategy,
)
from hera_pipelines.local.expressions.evaluate import evaluate
from hera_pipelines.local.expressions.expr import parse_expression
from tiphys.failures.classify import AttemptObservation, classify_failure
from tiphys.protocol.step_spec import RetryPolicy
from tiphys.records import Cause

# status, exit code, message: as Argo shows them after real ends
ENDS = [
    ("Failed", "1", "main: Error (exit code 1)"),
    ("Failed", "2", "main: Error (exit code 2)"),
    ("Failed", "69", "main: Error (exit code 69)"),
    ("Failed", "75", "main: Error (exit code 75)"),
    ("Failed", "76", "main: Error (exit code 76)"),
    ("Failed", "143", "main: Error (exit code 143)"),
    ("Failed", "137", "main: Error (exit code 137)"),
    ("Failed", "137", "main: OOMKilled (exit code 137)"),
    ("Failed", "64", "main: Error (exit code 64)"),
    ("Failed", "143", "Pod was active on the node longer than the specified deadline"),
    ("Failed", "-1", "The node was low on resource: memory."),
    ("Failed", "143", "Pod was terminated in response to imminent node shutdown."),
    ("Error", "-1", "pod deleted"),
    ("Error", "-1", "wait: Error (exit code 64)"),
    ("Error", "-1", "wait: Error (exit code 64): failed to put directory: Object name with non UTF-8 strings"),
    ("Error", "1", "wait: something"),
    ("Failed", "-1", ""),
    ("Failed", "0", ""),
]
NOTHING = dict.fromkeys((cause.value for cause in Cause), 0)


def again(policy: RetryPolicy, status: str, exit_code: str, message: str) -> bool:
    last = {"status": status, "exitCode": exit_code, "message": message, "duration": "1"}
    return bool(evaluate(parse_expression(retry_expression(policy)), {"lastRetry": last}))


@pytest.mark.parametrize("cause", [cause for cause in Cause if cause not in CAUSES_HIDDEN_FROM_ARGO])
@pytest.mark.parametrize("end", ENDS, ids=lambda end: "/".join(end))
def test_argo_repeats_what_the_classifier_would(cause: Cause, end: tuple[str, str, str]) -> None:
    policy = RetryPolicy(**{**NOTHING, cause.value: 1})
    status, exit_code, message = end

    judged = classify_failure(AttemptObservation(status=status, exit_code=int(exit_code), pod_message=message)).cause

    assert again(policy, *end) == (judged is cause), f"{message or status} is {judged}"


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (("Failed", "75", "main: Error (exit code 75)"), True),
        (("Error", "-1", "pod deleted"), True),
        (("Failed", "137", "main: OOMKilled (exit code 137)"), True),
        (("Failed", "1", "main: Error (exit code 1)"), False),
        (("Failed", "143", "Pod was active on the node longer than the specified deadline"), False),
    ],
)
def test_by_default_the_world_is_forgiven_and_the_program_is_not(end: tuple[str, str, str], expected: bool) -> None:
    assert again(RetryPolicy(), *end) is expected


def test_every_pair_of_budgets_makes_an_expression_that_parses() -> None:
    for first, second in product([cause for cause in Cause if cause not in CAUSES_HIDDEN_FROM_ARGO], repeat=2):
        parse_expression(retry_expression(RetryPolicy(**{**NOTHING, first.value: 1, second.value: 1})))


def test_the_limit_is_the_sum_of_the_budgets() -> None:
    assert step_retry_strategy(RetryPolicy(**{**NOTHING, "preemption": 3, "unknown": 2}))["limit"] == "5"
    assert step_retry_strategy(RetryPolicy())["limit"] == str(UNLIMITED_RETRIES)
    borrowed = {**NOTHING, "infrastructure": 3, "storage": "infrastructure"}
    assert step_retry_strategy(RetryPolicy(**borrowed))["limit"] == "3"


def test_a_step_that_is_never_repeated_still_counts_its_tries() -> None:
    assert step_retry_strategy(RetryPolicy(**NOTHING)) == {"limit": "0", "retryPolicy": "Always"}


def test_a_back_off_always_has_a_limit() -> None:
    strategies = step_retry_strategy(RetryPolicy()), attempt_retry_strategy(RetryPolicy())
    assert [strategy["backoff"]["duration"] for strategy in strategies] == ["5s", "0.3s"]
    for strategy in strategies:
        assert strategy["backoff"]["factor"] == "2"
        assert int(strategy["limit"]) > 0


def test_argo_waits_for_the_whole_back_off_of_a_step_and_never_longer_than_that_of_a_training() -> None:
    policies = RetryPolicy(), RetryPolicy(backoff_seconds=60, backoff_cap_seconds=90), RetryPolicy(backoff_seconds=0.1)
    short = RetryPolicy(backoff_cap_seconds=8)
    assert [step_retry_strategy(policy)["backoff"]["cap"] for policy in (*policies, short)] == [
        "300s",
        "90s",
        "300s",
        "8s",
    ]
    attempts = [attempt_retry_strategy(policy)["backoff"] for policy in (*policies, short)]
    assert [(backoff["duration"], backoff["cap"]) for backoff in attempts] == [
        ("0.3s", "30s"),
        ("0.3s", "30s"),
        ("0.1s", "30s"),
        ("0.3s", "8s"),
    ]
    assert [RetryPolicy().wait_after(tries) for tries in (1, 2, 7, 1000)] == [5, 10, 300, 300]
