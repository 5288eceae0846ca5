"""settle: judges how a training attempt ended, and decides whether another one follows.

In this module the phase Failed means "retry" and Succeeded means "stop
retrying". Argo's retryStrategy sees neither exit code nor cause of a group of
steps, so settle decides and replies by phase.
"""

from collections.abc import Sequence

from tiphys.failures.retry_budget import RetryDecision, evaluate_retry_budget
from tiphys.faults import failpoint
from tiphys.protocol.execute_api import ExecuteReply, failed_reply, succeeded_reply
from tiphys.protocol.operations import SettleOperation, attempt_node_name
from tiphys.records import AttemptEnd, AttemptEndOutcome, Cause
from tiphys.store import Attempt, read_step_attempts
from tiphys_plugin.attempts import pods
from tiphys_plugin.attempts.gangs import NOT_STARTED_STATUSES
from tiphys_plugin.operations import end_attempt, publish, start_checkpoint
from tiphys_plugin.runtime.context import StepCall


def settle(call: StepCall, operation: SettleOperation) -> ExecuteReply:
    """Answer one settle node.

    Raises:
        ConflictError: the attempt runs in a cluster or namespace that this plugin cannot see.
        StoreError: storage, ledger or cluster did not answer.
    """
    attempts = read_step_attempts(call.store, call.run, call.step)
    attempt = _find_attempt_of_try(call, attempts)
    if attempt is None:
        return succeeded_reply("No attempt was opened: the result was adopted, or the step was refused")
    if attempt.end is None:
        pod_statuses = pods.list_attempt_pods(call.store, call.context.cluster, attempt.claim)
        if (waiting := end_attempt.await_pods(call, attempt.claim, pod_statuses)) is not None:
            return waiting
        has_succeeded = operation.status == "Succeeded"
        has_finished = has_succeeded or publish.has_finished(call, attempt.claim, pod_statuses)
        crash = publish.find_hidden_crash(call, attempt.claim) if has_finished else None
        if has_finished and crash is None:
            members_left = end_attempt.describe_members_left(call, attempt.claim)
            end_attempt.release_lease(call, attempt.claim)
            lost = "" if has_succeeded else f", although Argo reports {operation.status or 'nothing'}"
            return succeeded_reply(
                f"Attempt {attempt.claim.attempt} succeeded{members_left}{lost}; its outputs are verified next"
            )
        failpoint("settle.before_end")
        if crash is not None:
            end = end_attempt.end_hidden_crash(call, attempt.claim, crash)
        else:
            seen = end_attempt.observe_end(call, attempt.claim, pod_statuses, operation.status, operation.exit_code)
            unknown = end_attempt.not_started_message(operation.status)
            doubt = publish.find_doubt_of_success(call, attempt.claim, pod_statuses)
            note = f"its program exited with 0, but {doubt}" if doubt else ""
            end = end_attempt.end_failed_attempt(call, attempt.claim, seen, unknown, note)
        failpoint("settle.after_end")
    else:
        end = attempt.end
        end_attempt.release_lease_if_ended(call, attempt.claim)
    if operation.status in NOT_STARTED_STATUSES:
        return succeeded_reply(f"Attempt {end.attempt} did not run: {end.message}")
    return _attempt_reply(call, attempts, end)


def decide_retry(call: StepCall, attempts: Sequence[Attempt], end: AttemptEnd) -> RetryDecision:
    """Decide whether another attempt follows ``end``; a repeated call gets the same decision."""
    ends = [a.end for a in attempts if a.end is not None and a.end.attempt < end.attempt]
    return evaluate_retry_budget([*ends, end], call.spec.retry, end.submission)


def describe_cause(cause: Cause | None) -> str:
    """The display name of a cause."""
    return (cause or Cause.UNKNOWN).display_name


def _find_attempt_of_try(call: StepCall, attempts: Sequence[Attempt]) -> Attempt | None:
    try_node = attempt_node_name(call.node)
    for attempt in reversed(attempts):
        if attempt.claim.uid == call.binding.uid and attempt_node_name(attempt.claim.node) == try_node:
            return attempt
    return None


def _attempt_reply(call: StepCall, attempts: Sequence[Attempt], end: AttemptEnd) -> ExecuteReply:
    if end.outcome is AttemptEndOutcome.DONE:
        return succeeded_reply(f"Attempt {end.attempt} is done")
    if end.outcome is AttemptEndOutcome.FENCED:
        return succeeded_reply(f"Stopped trying: attempt {end.attempt} {end_attempt.describe_fence(call, end)}")
    decision = decide_retry(call, attempts, end)
    ending = f"{describe_cause(end.cause)}, {end.message}"
    if not decision.retry:
        return succeeded_reply(f"Stopped trying: {ending}; {decision.message}")
    return failed_reply(
        f"Attempt {end.attempt} ended by {ending}; attempt {end.attempt + 1} {_describe_next_start(call, attempts)}"
    )


def _describe_next_start(call: StepCall, attempts: Sequence[Attempt]) -> str:
    if call.spec.checkpoints is None:
        return "starts from the beginning, because the step keeps no checkpoints"
    if call.volume:
        return "follows"
    choice = start_checkpoint.find_start_checkpoint(call, attempts)
    if choice.checkpoint is None:
        return "starts from the beginning"
    return f"resumes from step {choice.checkpoint.global_step}"
