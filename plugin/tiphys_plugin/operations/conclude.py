"""conclude: the verdict on a step.

The reply carries the step's outputs, from this workflow or reused. For a failed
step it says why the step failed, and how to continue the run.
"""

from collections.abc import Sequence

from tiphys.protocol.execute_api import ExecuteReply, failed_reply, succeeded_reply
from tiphys.protocol.operations import ConcludeOperation
from tiphys.protocol.step_spec import StepKind
from tiphys.recording.derived_records import write_derived_records
from tiphys.recording.reusable_results import describe_reuse
from tiphys.recording.run_binding import RunBinding
from tiphys.records import AttemptClaim, AttemptEnd, AttemptEndOutcome, ReuseRecord
from tiphys.store import Attempt, read_step_attempts
from tiphys_plugin.attempts import pods
from tiphys_plugin.operations import end_attempt, publish, recording, reuse
from tiphys_plugin.operations.settle import decide_retry
from tiphys_plugin.runtime.context import StepCall


def conclude(call: StepCall, operation: ConcludeOperation) -> ExecuteReply:
    """Answer one conclude node.

    Raises:
        ConflictError: the attempt runs in a cluster or namespace that this plugin cannot see.
        NotFoundError: the result that the step reused exists no longer.
        StoreError: storage, ledger or cluster did not answer.
    """
    if (record := reuse.find_reuse_record(call)) is not None:
        return _reuse_reply(call, record)
    attempts = read_step_attempts(call.store, call.run, call.step)
    attempt = _last_of_workflow(attempts, call.binding)
    if attempt is None:
        return failed_reply(
            f"{call.name} was never started in this workflow, so it has no result; "
            f"see its admit step for why, then `tiphys resume {call.run}`"
        )
    return conclude_attempt(call, attempt, operation.status, operation.exit_code, attempts, result=operation.result)


def conclude_attempt(
    call: StepCall,
    attempt: Attempt,
    status: str,
    exit_code: str,
    attempts: Sequence[Attempt] = (),
    *,
    result: str = "",
) -> ExecuteReply:
    """The verdict on an attempt, after its end has been recorded.

    Args:
        call: A call about its step.
        attempt: The attempt.
        status: Argo's status of the program (Step) or of all attempts (Train).
        exit_code: Argo's exit code of the same.
        attempts: All attempts of a Train, which decide about its retries.
        result: Standard output of the program, if the step has it as an output. Only its conclude knows it.
    """
    end = attempt.end or _end_open_attempt(call, attempt.claim, status, exit_code, result)
    return end if isinstance(end, ExecuteReply) else _attempt_reply(call, attempts, end)


def _last_of_workflow(attempts: Sequence[Attempt], binding: RunBinding) -> Attempt | None:
    return next((attempt for attempt in reversed(attempts) if attempt.claim.uid == binding.uid), None)


def _reuse_reply(call: StepCall, record: ReuseRecord) -> ExecuteReply:
    end = reuse.read_reused_end(call, record)
    source = describe_reuse(record)
    return succeeded_reply(source[:1].upper() + source[1:], publish.build_outputs(call, end.outputs))


def _end_open_attempt(
    call: StepCall, claim: AttemptClaim, status: str, exit_code: str, result: str
) -> AttemptEnd | ExecuteReply:
    """End an attempt without an end record: verify its outputs, or record its failure.

    ``status`` and ``exit_code`` are Argo's, of the program (Step) or of all attempts (Train).
    """
    pod_statuses = pods.list_attempt_pods(call.store, call.context.cluster, claim)
    if (waiting := end_attempt.await_pods(call, claim, pod_statuses)) is not None:
        return waiting
    is_training = call.spec.kind is StepKind.TRAIN  # Argo's status covers all its tries, and agents that were lost
    if status == "Succeeded" or (is_training and publish.has_finished(call, claim, pod_statuses)):
        last_try = end_attempt.find_last_try(call, claim, pod_statuses)
        return publish.verify_and_end(call, claim, last_try, result)
    run_status = status if call.spec.kind is StepKind.STEP else ""
    observation = end_attempt.observe_end(call, claim, pod_statuses, run_status, exit_code)
    return end_attempt.end_failed_attempt(call, claim, observation, end_attempt.not_started_message(status))


def _attempt_reply(call: StepCall, attempts: Sequence[Attempt], end: AttemptEnd) -> ExecuteReply:
    match end.outcome:
        case AttemptEndOutcome.DONE:
            write_derived_records(call.store, call.spec, end)
            message = f"Attempt {end.attempt} is done: {_describe_object_count(end)} verified"
            message += f"; {end.message}" if end.message else ""
            return succeeded_reply(message, publish.build_outputs(call, end.outputs))
        case AttemptEndOutcome.FENCED:
            return failed_reply(f"Attempt {end.attempt} of {call.name} {end_attempt.describe_fence(call, end)}")
    decision = decide_retry(call, attempts, end) if call.spec.kind is StepKind.TRAIN else None
    return failed_reply(
        recording.format_verdict(call.context, call.name, end, f"; {decision.message}" if decision else "")
    )


def _describe_object_count(end: AttemptEnd) -> str:
    objects = sum(len(output.objects) for output in end.outputs)
    return "no outputs to be" if objects == 0 else f"{objects} object{'s' if objects > 1 else ''}"
