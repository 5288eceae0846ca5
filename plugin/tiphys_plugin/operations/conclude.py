"""conclude: the step's verdict. Its outputs, just made or adopted; or failure, why, and what to do."""

from collections.abc import Sequence

from tiphys.protocol.execute_api import ExecuteReply, failed, succeeded
from tiphys.protocol.operations import Conclude
from tiphys.protocol.step_spec import Kind
from tiphys.records import AdoptedRecord, AttemptClaim, AttemptEnd, Outcome
from tiphys.store import Attempt, step_attempts
from tiphys_plugin.attempts import gangs, pods
from tiphys_plugin.cluster.interface import PodStatus
from tiphys_plugin.operations import end_attempt as ending
from tiphys_plugin.operations import publish
from tiphys_plugin.operations import reuse as adoption
from tiphys_plugin.operations.settle import decision, words
from tiphys_plugin.runtime.context import StepCall


def conclude(call: StepCall, operation: Conclude) -> ExecuteReply:
    """Answer one conclude node. Raises `ConflictError` if the attempt is of another cluster."""
    if (record := adoption.adopted(call)) is not None:
        return _adopted(call, record)
    attempts = step_attempts(call.store, call.run, call.step)
    mine = [attempt for attempt in attempts if attempt.claim.uid == call.binding.uid]
    if not mine:
        return failed(
            f"{call.step} was never started in this workflow, so it has no result; "
            f"see its admit step for why, then `tiphys resume {call.run}`"
        )
    end = mine[-1].end or _judge(call, operation, mine[-1].claim)
    return end if isinstance(end, ExecuteReply) else _answer(call, attempts, end)


def _adopted(call: StepCall, record: AdoptedRecord) -> ExecuteReply:
    where = adoption.describe(call, record)
    end = adoption.source(call, record)
    if end is None:
        return failed(
            f"{call.step} was {where}, whose record has been removed since; "
            f"`tiphys resume {call.run}` runs the step again"
        )
    adoption.project(call, record)
    return succeeded(where[:1].upper() + where[1:], publish.answer(call, end.outputs))


def _judge(call: StepCall, operation: Conclude, claim: AttemptClaim) -> AttemptEnd | ExecuteReply:
    """End the attempt that nobody has ended yet: a result to verify, or a failure."""
    found = pods.of_claim(call.store, call.services.cluster, claim)
    if (waiting := ending.await_pods(call, claim, found)) is not None:
        return waiting
    if _succeeded(call, operation, found):
        return publish.finish(call, claim, last_try=pods.try_of(found[-1].node) if found else 0)
    seen = ending.observed(call, claim, found, _run_status(call, operation), operation.exit_code)
    return ending.end_failed(call, claim, seen, ending.never_ran(operation.status))


def _succeeded(call: StepCall, operation: Conclude, found: Sequence[PodStatus]) -> bool:
    """Whether the program ended well.

    For training the status is that of all the tries. It fails as well when an
    agent pod is lost after the program had finished, so the pod has a say.
    """
    if operation.status == "Succeeded":
        return True
    if call.spec.gang is not None:
        return gangs.all_succeeded(call.spec.gang, found)
    return call.spec.kind is Kind.TRAIN and bool(found) and found[-1].phase == "Succeeded"


def _run_status(call: StepCall, operation: Conclude) -> str:
    """Argo's status of the program; that of the tries says nothing about the last one."""
    return operation.status if call.spec.kind is Kind.STEP else ""


def _answer(call: StepCall, attempts: Sequence[Attempt], end: AttemptEnd) -> ExecuteReply:
    match end.outcome:
        case Outcome.DONE:
            publish.derive(call, end)
            message = f"Attempt {end.attempt} is done: {_count(end)} verified"
            return succeeded(message, publish.answer(call, end.outputs))
        case Outcome.FENCED:
            return failed(f"Attempt {end.attempt} of {call.step} was fenced: {end.message}")
    judged = decision(call, attempts, end) if call.spec.kind is Kind.TRAIN else None
    retries = f"; {judged.message}" if judged else ""
    return failed(
        f"{call.step} failed in attempt {end.attempt} by {words(end.cause)}: {end.message}{retries}. "
        f"When the cause is gone: `tiphys resume {call.run}` (`argo retry` cannot change this verdict)"
    )


def _count(end: AttemptEnd) -> str:
    objects = sum(len(output.objects) for output in end.outputs)
    return "no outputs to be" if objects == 0 else f"{objects} object{'s' if objects > 1 else ''}"
