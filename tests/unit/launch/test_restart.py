"""Which ends of a program are followed by another process in its pod: a table, and the laws behind it."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tiphys.failures.classify import AttemptObservation, classify_failure
from tiphys.launch.restart import ProgramEnd, choose_exit_code, choose_restart_cause, count_memory_kills
from tiphys.launch.session_registry import NEEDS_NEW_POD
from tiphys.protocol.step_spec import RetryPolicy
from tiphys.records import Cause

DEFAULT = [cause.value for cause in RetryPolicy().causes_in_place()]


def restart(
    code: int, *failures: str, allowed: list[str] = DEFAULT, saved: bool = True, lacked_memory: bool = False
) -> str:
    return choose_restart_cause(ProgramEnd(code, failures, has_committed=saved), allowed, lacked_memory=lacked_memory)


@pytest.mark.parametrize(
    ("code", "failures", "cause"),
    [
        (137, (), "infrastructure"),  # somebody killed it
        (79, (), "hang"),
        (142, ("hang",), "hang"),  # the kernel's alarm
        (142, (), ""),  # its own alarm
        (79, ("hang",), "hang"),
        (1, ("infrastructure",), "infrastructure"),  # it lost its peers
        (1, ("unknown",), "unknown"),  # a computation on its GPU
        (1, ("infrastructure", "unknown"), "infrastructure"),
        (1, (), ""),  # an error of its own, which is not retried by default
        (139, (), ""),
        (1, ("user_error",), ""),
        (1, ("infrastructure", "user_error"), ""),  # a rank has a bug, the others lost it
        (1, ("gpu_out_of_memory",), ""),
        (1, (NEEDS_NEW_POD,), ""),
        (0, (), ""),
        (75, (), ""),
        (76, (), ""),
        (69, (), ""),
        (143, (), ""),
        (126, (), ""),
        (127, (), ""),
    ],
)
def test_restart_needs_a_cause_that_a_new_process_cures(code: int, failures: tuple[str, ...], cause: str) -> None:
    assert restart(code, *failures) == cause


def test_restart_needs_a_checkpoint_of_this_process() -> None:
    assert restart(137, saved=False) == ""


def test_restart_needs_memory_that_sufficed() -> None:
    assert restart(137, lacked_memory=True) == ""


@pytest.mark.parametrize(
    ("policy", "causes"),
    [
        (RetryPolicy(), ["hang", "infrastructure", "unknown"]),
        (RetryPolicy(user_error=1, hang=0), ["infrastructure", "unknown", "user_error"]),
        (RetryPolicy(infrastructure=None, unknown=0), ["hang", "infrastructure"]),
        (RetryPolicy(in_place=False), []),
    ],
)
def test_policy_allows_restarts_for_what_it_retries(policy: RetryPolicy, causes: list[str]) -> None:
    assert [cause.value for cause in policy.causes_in_place()] == causes


@pytest.mark.parametrize(
    ("code", "failures", "incarnation", "saved", "lacked_memory", "expected"),
    [
        (1, (), 2, False, False, 80),  # maybe by what the process before left
        (1, ("user_error",), 3, False, False, 80),
        (1, (), 1, False, False, 1),
        (1, (), 2, True, False, 1),  # it got further: the error is its own
        (1, ("gpu_out_of_memory",), 2, False, False, 1),
        (1, (NEEDS_NEW_POD,), 2, False, False, 1),
        (1, (), 2, False, True, 1),
        (137, (), 2, False, False, 137),
        (75, (), 2, False, False, 75),
        (0, (), 2, False, False, 0),
        (80, (), 1, True, False, 1),  # the program's own
        (80, (), 2, True, False, 1),
    ],
)
def test_exit_code_of_a_program_that_is_not_restarted(
    code: int, failures: tuple[str, ...], incarnation: int, saved: bool, lacked_memory: bool, expected: int
) -> None:
    end = ProgramEnd(code, failures, has_committed=saved)
    assert choose_exit_code(end, DEFAULT, incarnation=incarnation, lacked_memory=lacked_memory) == expected


def test_own_error_that_the_policy_retries_keeps_its_exit_code() -> None:
    assert choose_exit_code(ProgramEnd(1), [*DEFAULT, "user_error"], incarnation=2, lacked_memory=False) == 1


CAUSES = st.sampled_from(["hang", "infrastructure", "unknown", "user_error", "out_of_memory", NEEDS_NEW_POD])


@given(st.integers(0, 255), st.sets(CAUSES), st.sets(CAUSES), st.booleans(), st.booleans())
def test_no_restart_for_a_cause_that_is_not_allowed(
    code: int, failures: set[str], allowed: set[str], saved: bool, lacked_memory: bool
) -> None:
    cause = choose_restart_cause(ProgramEnd(code, failures, has_committed=saved), allowed, lacked_memory=lacked_memory)
    assert not cause or (saved and not lacked_memory and cause in allowed and failures <= allowed)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("low 0\nhigh 0\nmax 3\noom 2\noom_kill 2\noom_group_kill 0\n", 2),
        ("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n", 5),
        ("", 0),
    ],
)
def test_memory_kills_are_counted_in_both_versions_of_control_groups(tmp_path, text: str, count: int) -> None:
    file = tmp_path / "events"
    file.write_text(text)
    assert count_memory_kills([str(tmp_path / "absent"), str(file)]) == count


@pytest.mark.parametrize("code", [code for code in range(1, 256) if restart(code)])
def test_cause_of_an_exit_code_is_that_of_the_classifier(code: int) -> None:
    """The launcher imports no records, so the rule stands in both places."""
    assert restart(code) == classify_failure(AttemptObservation(status="Failed", exit_code=code)).cause


def test_exit_codes_that_are_the_fault_of_the_program_are_so_for_both() -> None:
    own = [code for code in range(1, 256) if restart(code, allowed=["user_error"])]
    blamed = [classify_failure(AttemptObservation(status="Failed", exit_code=code)).cause for code in own]
    assert set(blamed) <= {Cause.USER_ERROR, Cause.INFRASTRUCTURE}
    # Argo's executor has two codes of its own, which a program below the launcher does not give it.
    assert [code for code, cause in zip(own, blamed, strict=True) if cause is not Cause.USER_ERROR] == [64, 141]
