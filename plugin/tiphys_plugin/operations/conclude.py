"""conclude: the verdict on a step.

The reply carries the step's outputs, from this workflow or reused. For a failed
step it says why the step failed, and how to continue the run.
"""

from collections.abc import Sequence

from tiphys.protocol.execute_api import ExecuteReply, failed_reply, succeeded_reply
from tiphys.protocol.operations import ConcludeOperation
from tiphys.protocol.step_spec import StepKind
from tiphys.records import AttemptClaim, AttemptEnd, AttemptEndOutcome, ReuseRecord
from tiphys.records.names import LOCAL_CLUSTER_PREFIX
from tiphys.store import Attempt, read_step_attempts
from tiphys_plugin.attempts import gangs, pods
from tiphys_plugin.cluster.interface import PodStatus
from tiphys_plugin.operations import end_attempt, publish, reuse
from tiphys_plugin.operations.settle import decide_retry, describe_cause
from tiphys_plugin.runtime.context import StepCall


def conclude(call: StepCall, operation: ConcludeOperation) -> ExecuteReply:
    """Answer one conclude node.

    Raises:
        ConflictError: the attempt runs in a cluster or namespace that this plugin cannot see.
        StoreError: storage, ledger or cluster did not answer.
    """
    if (record := reuse.find_reuse_record(call)) is not None:
        return _reuse_reply(call, record)
    attempts = read_step_attempts(call.store, call.run, call.step)
    own_attempts = [attempt for attempt in attempts if attempt.claim.uid == call.binding.uid]
    if not own_attempts:
        return failed_reply(
            f"{call.name} was never started in this workflow, so it has no result; "
            f"see its admit step for why, then `tiphys resume {call.run}`"
        )
    end = own_attempts[-1].end or _end_open_attempt(call, operation, own_attempts[-1].claim)
    return end if isinstance(end, ExecuteReply) else _attempt_reply(call, attempts, end)


def _reuse_reply(call: StepCall, record: ReuseRecord) -> ExecuteReply:
    source = reuse.describe_reuse(call, record)
    end = reuse.find_reused_end(call, record)
    if end is None:
        return failed_reply(
            f"{call.name} was {source}, whose record has been removed since; "
            f"`tiphys resume {call.run}` runs the step again"
        )
    if end.outcome is not AttemptEndOutcome.DONE:
        return failed_reply(f"{call.name} was {source}, which counts no longer: {end.message}")
    reuse.write_reuse_projection(call, record)
    return succeeded_reply(source[:1].upper() + source[1:], publish.build_outputs(call, end.outputs))


def _end_open_attempt(call: StepCall, operation: ConcludeOperation, claim: AttemptClaim) -> AttemptEnd | ExecuteReply:
    """End an attempt without an end record: verify its outputs, or record its failure."""
    pod_statuses = pods.list_attempt_pods(call.store, call.context.cluster, claim)
    if (waiting := end_attempt.await_pods(call, claim, pod_statuses)) is not None:
        return waiting
    if _program_succeeded(call, operation, pod_statuses):
        return publish.verify_and_end(
            call, claim, last_try=pods.parse_try_number(pod_statuses[-1].node) if pod_statuses else 0
        )
    observation = end_attempt.observe_end(call, claim, pod_statuses, _run_status(call, operation), operation.exit_code)
    return end_attempt.end_failed_attempt(call, claim, observation, end_attempt.not_started_message(operation.status))


def _program_succeeded(call: StepCall, operation: ConcludeOperation, pod_statuses: Sequence[PodStatus]) -> bool:
    """Whether the program succeeded.

    For training, Argo's status covers all tries. It is a failure also if an agent
    pod is lost after the program has finished, so the last pod's phase counts too.
    """
    if operation.status == "Succeeded":
        return True
    if call.spec.gang is not None:
        return gangs.is_gang_succeeded(call.spec.gang, pod_statuses)
    return call.spec.kind is StepKind.TRAIN and bool(pod_statuses) and pod_statuses[-1].phase == "Succeeded"


def _run_status(call: StepCall, operation: ConcludeOperation) -> str:
    """Argo's status of the program; empty for training, where the status covers all tries."""
    return operation.status if call.spec.kind is StepKind.STEP else ""


def _attempt_reply(call: StepCall, attempts: Sequence[Attempt], end: AttemptEnd) -> ExecuteReply:
    match end.outcome:
        case AttemptEndOutcome.DONE:
            publish.write_derived_records(call, end)
            message = f"Attempt {end.attempt} is done: {_describe_object_count(end)} verified"
            return succeeded_reply(message, publish.build_outputs(call, end.outputs))
        case AttemptEndOutcome.FENCED:
            return failed_reply(f"Attempt {end.attempt} of {call.name} was fenced: {end.message}")
    decision = decide_retry(call, attempts, end) if call.spec.kind is StepKind.TRAIN else None
    retries = f"; {decision.message}" if decision else ""
    is_local = call.context.cluster.name.startswith(LOCAL_CLUSTER_PREFIX)
    hint = "" if is_local else " (`argo retry` cannot change this verdict)"
    return failed_reply(
        f"{call.name} failed in attempt {end.attempt} by {describe_cause(end.cause)}: {end.message}{retries}. "
        f"When the cause is gone: `tiphys resume {call.run}`, or `tiphys resume {call.run} FILE` with a changed "
        f"pipeline file{hint}"
    )


def _describe_object_count(end: AttemptEnd) -> str:
    objects = sum(len(output.objects) for output in end.outputs)
    return "no outputs to be" if objects == 0 else f"{objects} object{'s' if objects > 1 else ''}"
