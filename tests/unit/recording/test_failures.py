"""What an end says of a step that failed, by the message of its node (Argo's ``inferFailedReason`` and others)."""

import pytest
from support.fakes.argo_workflow import ArgoWorkflow, bare, end_of
from support.fakes.memory_store import MemoryStore

from tiphys.records import AttemptEnd, AttemptEndOutcome, Cause
from tiphys.records.attempt import STOPPED_MESSAGE

POD_STOPPED = "workflow shutdown with strategy:  Stop"
RETRY_STOPPED = "Stopped with strategy 'Stop'"


@pytest.fixture
def flow() -> ArgoWorkflow:
    return ArgoWorkflow(MemoryStore(), [bare()])


def failed(flow: ArgoWorkflow, message: str, exit_code: int | None = None, phase: str = "Failed") -> AttemptEnd:
    flow.start()
    flow.fail(message=message, exit_code=exit_code, phase=phase)
    flow.record()
    return end_of(flow)


@pytest.mark.parametrize(
    ("message", "exit_code", "phase", "cause", "recorded_code", "said"),
    [
        ("main: Error (exit code 3)", 3, "Failed", Cause.USER_ERROR, 3, "the program exited with 3"),
        ("main: Error (exit code 3)", None, "Failed", Cause.USER_ERROR, 3, "the program exited with 3"),
        ("main:  (exit code 3)", None, "Failed", Cause.USER_ERROR, 3, "the program exited with 3"),
        ("Error (exit code 3)", None, "Failed", Cause.USER_ERROR, 3, "the program exited with 3"),
        (
            "main: Error (exit code 1): Traceback\n  line 3\nKeyError: 'lr'",
            *(1, "Failed", Cause.USER_ERROR, 1),
            "the program exited with 1 (KeyError: 'lr')",
        ),
        (
            "main: Error (exit code 1): torch.cuda.OutOfMemoryError: CUDA out of memory",
            *(1, "Failed", Cause.GPU_OUT_OF_MEMORY, 1),
            "its GPU had no memory left (torch.cuda.OutOfMemoryError: CUDA out of memory)",
        ),
        ("main: OOMKilled (exit code 137)", 137, "Failed", Cause.OUT_OF_MEMORY, 137, "OOMKilled"),
        ("main: OOMKilled (exit code 137): loading shard 3", 137, "Failed", Cause.OUT_OF_MEMORY, 137, "OOMKilled"),
        ("main: Error (exit code 143): saved", 143, "Failed", Cause.PREEMPTION, 143, "SIGTERM"),
        ("pod deleted", None, "Error", Cause.PREEMPTION, None, "its pod was taken away (pod deleted)"),
        ("pod deleted", 137, "Error", Cause.PREEMPTION, 137, "its pod was taken away (pod deleted)"),
        (
            "Pod was active on the node longer than the specified deadline",
            *(143, "Failed", Cause.DEADLINE, 143),
            "it ran longer than its deadline",
        ),
        ("The node was low on resource: memory.", None, "Failed", Cause.INFRASTRUCTURE, None, "low on resource"),
        ("Preempted in order to admit critical pod", None, "Failed", Cause.PREEMPTION, None, "taken away"),
        (
            "wait: Error (exit code 64): failed to save outputs: stat /tmp/data: no such file or directory",
            *(0, "Error", Cause.OUTPUT_MISSING, 0),
            "a declared output is missing",
        ),
        (
            "Pod failed before main container starts due to ContainerCreating: ",
            *(None, "Error", Cause.INFRASTRUCTURE, None),
            "Pod failed before main container starts due to ContainerCreating",
        ),
        (
            "proxy: Error (exit code 2)",
            *(0, "Failed", Cause.UNKNOWN, 0),
            "the program exited with 0, yet the step did not succeed; Argo: proxy: Error (exit code 2)",
        ),
        ("", None, "Failed", Cause.UNKNOWN, None, "no exit code was seen"),
        ("can't find failed message for pod x", None, "Failed", Cause.UNKNOWN, None, "; Argo: can't find failed"),
    ],
)
def test_cause_of_a_failure_is_in_the_message_of_its_node(flow, message, exit_code, phase, cause, recorded_code, said):
    end = failed(flow, message, exit_code, phase)
    assert (end.outcome, end.cause, end.exit_code) == (AttemptEndOutcome.FAILED, cause, recorded_code)
    assert said in end.message


@pytest.mark.parametrize("log", ["preempted", "pod deleted", "OOMKilled", "Evicted", "DeadlineExceeded"])
def test_words_of_the_program_are_no_words_of_kubernetes(flow, log):
    end = failed(flow, f"main: Error (exit code 1): {log}", 1)
    assert (end.cause, end.message) == (Cause.USER_ERROR, f"the program exited with 1 ({log})")


def test_log_in_a_field_of_its_own_is_read_too(flow):
    """The local engine keeps the log apart from the message."""
    flow.start()
    flow.fail(message="Error (exit code 1)", exit_code=1, terminationMessage="KeyError: 'lr'\n")
    flow.record()
    assert end_of(flow).message == "the program exited with 1 (KeyError: 'lr')"


def test_message_of_argo_without_an_explanation_is_cut(flow):
    end = failed(flow, "x" * 5000)
    assert len(end.message) < 500


@pytest.mark.parametrize("code", ["", "none", "1e3", "9" * 5000, "--1", "٣"])
def test_exit_code_that_is_no_number_is_that_of_the_message(flow, code):
    flow.start()
    flow.fail(message="main: Error (exit code 3)", outputs={"exitCode": code})
    assert flow.record().faults == {}
    assert end_of(flow).exit_code == 3


def test_exit_code_longer_than_any_is_none(flow):
    end = failed(flow, f"main: Error (exit code {'9' * 5000})")
    assert (end.exit_code, end.cause) == (None, Cause.UNKNOWN)


@pytest.mark.parametrize("message", [POD_STOPPED, "workflow shutdown with strategy:  Terminate"])
@pytest.mark.parametrize("exit_code", [None, 0, 143])
def test_step_of_a_stopped_workflow_is_stopped_and_did_not_fail(flow, message, exit_code):
    end = failed(flow, message, exit_code)
    assert (end.outcome, end.stopped, end.message) == (AttemptEndOutcome.FENCED, True, STOPPED_MESSAGE)
    assert (end.cause, end.exit_code) == (None, exit_code)


@pytest.mark.parametrize(
    "of_try", ["main: Error (exit code 143)", "main: Error (exit code 143): bye", POD_STOPPED, "pod deleted"]
)
def test_retries_that_a_stop_has_ended_are_stopped(flow, of_try):
    flow.start(attempt=0)
    flow.fail("prep(0)", of_try, retry_message=RETRY_STOPPED)
    flow.record()
    assert end_of(flow).stopped


@pytest.mark.parametrize("retries", [False, True])
@pytest.mark.parametrize("log", ["early stopping: Stopped with strategy 'patience'", "shutdown with strategy x"])
def test_log_that_speaks_of_a_strategy_stops_nothing(flow, retries, log):
    message = f"main: Error (exit code 1): {log}"
    place = flow.start(attempt=0 if retries else None)
    flow.fail(place, message, exit_code=1, retry_message=message)
    flow.record()
    end = end_of(flow)
    assert (end.outcome, end.stopped, end.cause) == (AttemptEndOutcome.FAILED, False, Cause.USER_ERROR)
    assert end.message == f"the program exited with 1 ({log})"


def test_retries_without_a_message_of_their_pod_have_that_of_all(flow):
    flow.start(attempt=0)
    flow.fail("prep(0)", "", retry_message="Max duration limit exceeded")
    flow.record()
    assert "Max duration limit exceeded" in end_of(flow).message
