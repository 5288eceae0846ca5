"""conclude: the verdict on an attempt, and on its step.

The reply carries the step's outputs, from this workflow or reused. For a training
that failed it decides whether another attempt follows, and answers by phase,
because Argo's retryStrategy sees neither exit code nor cause of a DAG: after
Error Argo begins the next try, after Failed the step has failed. The message says
why, and how to continue the run.
"""

from collections.abc import Sequence

from tiphys.failures.retry_budget import RetryDecision, evaluate_retry_budget
from tiphys.faults import failpoint
from tiphys.protocol.execute_api import ExecuteReply, failed_reply, retry_reply, succeeded_reply
from tiphys.protocol.operations import ConcludeOperation, attempt_node_name
from tiphys.protocol.step_spec import StepKind
from tiphys.recording.derived_records import write_derived_records
from tiphys.recording.reusable_results import describe_reuse
from tiphys.records import AttemptClaim, AttemptEnd, AttemptEndOutcome, ReuseRecord
from tiphys.store import Attempt, read_step_attempts
from tiphys_plugin.attempts import pods
from tiphys_plugin.attempts.gangs import NOT_STARTED_STATUSES
from tiphys_plugin.operations import end_attempt, program_nodes, publish, recording, reuse, start_checkpoint
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
    attempt = _find_attempt_of_node(call, attempts)
    if attempt is None:
        return failed_reply(
            f"{call.name} was never started in this workflow, so it has no result; "
            f"see its admit step for why, then `tiphys resume {call.run}`"
        )
    return conclude_attempt(
        call, attempt, operation.status, operation.exit_code, attempts=attempts, result=operation.result
    )


def conclude_attempt(
    call: StepCall,
    attempt: Attempt,
    status: str,
    exit_code: str,
    *,
    attempts: Sequence[Attempt] = (),
    result: str = "",
) -> ExecuteReply:
    """The verdict on an attempt, after its end has been recorded.

    Args:
        call: A call about its step.
        attempt: The attempt.
        status: Argo's status of the program.
        exit_code: Argo's exit code of the program.
        attempts: All attempts of a Train, which decide about its retries. Without them no other attempt follows.
        result: Standard output of the program, if the step has it as an output. Only its conclude knows it.
    """
    if attempt.end is not None and (waiting := _await_pods_of_ended(call, attempt.claim, attempt.end)) is not None:
        return waiting
    end = attempt.end or _end_open_attempt(call, attempt.claim, status, exit_code, result)
    return end if isinstance(end, ExecuteReply) else _attempt_reply(call, attempts, end, status)


def _await_pods_of_ended(call: StepCall, claim: AttemptClaim, end: AttemptEnd) -> ExecuteReply | None:
    """Release the GPUs of an attempt that was ended beside its conclude, as one whose node is lost.

    Its next attempt needs them, so it waits for the pods; None once they are gone.
    """
    if end.outcome is not AttemptEndOutcome.FAILED:
        # A replica that died between the end and the release has left the lease, which only a sweep would find, later.
        end_attempt.release_lease_if_ended(call, claim)
        return None
    pod_statuses = pods.list_attempt_pods(call.store, call.context.cluster, claim)
    waiting = end_attempt.await_pods(call, claim, pod_statuses)
    if waiting is None:
        end_attempt.release_lease(call, claim)
    return waiting


def decide_retry(call: StepCall, attempts: Sequence[Attempt], end: AttemptEnd) -> RetryDecision:
    """Decide whether another attempt follows ``end``; a repeated call gets the same decision."""
    ends = [a.end for a in attempts if a.end is not None and a.end.attempt < end.attempt]
    return evaluate_retry_budget([*ends, end], call.spec.retry, end.submission)


def _find_attempt_of_node(call: StepCall, attempts: Sequence[Attempt]) -> Attempt | None:
    """The attempt that the admit beside this node has opened, the last one where ``argo retry`` repeats the node."""
    node = attempt_node_name(call.node)
    for attempt in reversed(attempts):
        if attempt.claim.uid == call.binding.uid and attempt_node_name(attempt.claim.node) == node:
            return attempt
    return None


def _reuse_reply(call: StepCall, record: ReuseRecord) -> ExecuteReply:
    end = reuse.read_reused_end(call, record)
    source = describe_reuse(record)
    return succeeded_reply(source[:1].upper() + source[1:], publish.build_outputs(call, end.outputs))


def _end_open_attempt(
    call: StepCall, claim: AttemptClaim, status: str, exit_code: str, result: str
) -> AttemptEnd | ExecuteReply:
    """End an attempt without an end record: verify its outputs, or record its failure.

    The GPUs of a training that has succeeded come back before its outputs are verified; those of an elastic gang that
    lost members only then, because the lease tells how many.
    """
    pod_statuses = pods.list_attempt_pods(call.store, call.context.cluster, claim)
    if (waiting := end_attempt.await_pods(call, claim, pod_statuses)) is not None:
        return waiting
    is_training = call.spec.kind is StepKind.TRAIN  # its tries are attempts, and Argo may not learn of its success
    if status == "Succeeded" or (is_training and publish.has_finished(call, claim, pod_statuses)):
        members_left = end_attempt.describe_members_left(call, claim)
        if is_training and not members_left:
            end_attempt.release_lease(call, claim)
        last_try = program_nodes.find_last_try(call, claim, pod_statuses)
        return publish.verify_and_end(call, claim, last_try, result, members_left)
    failpoint("conclude.before_failure")
    doubt = publish.find_doubt_of_success(call, claim, pod_statuses) if is_training else None
    note = f"its program exited with 0, but {doubt}" if doubt else ""
    end = end_attempt.end_failed_attempt(
        call,
        claim,
        pod_statuses,
        status=status,
        exit_code=exit_code,
        unknown_cause=end_attempt.not_started_message(status),
        note=note,
    )
    failpoint("conclude.after_failure")
    return end


def _attempt_reply(call: StepCall, attempts: Sequence[Attempt], end: AttemptEnd, status: str) -> ExecuteReply:
    is_training = call.spec.kind is StepKind.TRAIN
    match end.outcome:
        case AttemptEndOutcome.DONE:
            # With every reply: the replica that wrote the end may have died before it wrote what follows from it.
            write_derived_records(call.store, call.spec, end)
            is_seen = not is_training or status in ("Succeeded", *NOT_STARTED_STATUSES)
            lost = "" if is_seen else f", although Argo reports {status or 'nothing'}"
            message = f"Attempt {end.attempt} is done{lost}: {_describe_object_count(end)} verified"
            message += f"; {end.message}" if end.message else ""
            return succeeded_reply(message, publish.build_outputs(call, end.outputs))
        case AttemptEndOutcome.FENCED:
            return failed_reply(f"Attempt {end.attempt} of {call.name} {end_attempt.describe_fence(call, end)}")
    decision = decide_retry(call, attempts, end) if is_training else None
    # A workflow that is stopping starts no node, so Argo would not begin the attempt that the reply promises.
    if decision is not None and decision.retry and attempts and status not in NOT_STARTED_STATUSES:
        return retry_reply(
            f"Attempt {end.attempt} ended by {recording.describe_cause(end.cause)}, {end.message}; "
            f"attempt {end.attempt + 1} {_describe_next_start(call, attempts)}"
        )
    retries = f"; {decision.message}" if decision is not None else ""
    return failed_reply(recording.format_verdict(call.context, call.name, end, retries))


def _describe_next_start(call: StepCall, attempts: Sequence[Attempt]) -> str:
    if call.spec.checkpoints is None:
        return "starts from the beginning, because the step keeps no checkpoints"
    if call.volume:
        return "follows"
    choice = start_checkpoint.find_start_checkpoint(call, attempts)
    if choice.checkpoint is None:
        return "starts from the beginning"
    return f"resumes from step {choice.checkpoint.global_step}"


def _describe_object_count(end: AttemptEnd) -> str:
    objects = sum(len(output.objects) for output in end.outputs)
    return "no outputs to be" if objects == 0 else f"{objects} object{'s' if objects > 1 else ''}"
