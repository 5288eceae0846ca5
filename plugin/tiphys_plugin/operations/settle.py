"""settle: how did the training attempt end, and shall there be another?

In here Failed means "try again" and Succeeded "stop trying": Argo's
retryStrategy sees neither exit code nor cause after a group of steps, so the
decision is made here and answered by phase.
"""

from collections.abc import Sequence

from tiphys.failures.retry_budget import Decision, decide
from tiphys.faults import failpoint
from tiphys.protocol.execute_api import ExecuteReply, failed, succeeded
from tiphys.protocol.operations import Settle, attempt_of
from tiphys.records import AttemptEnd, Cause, Outcome
from tiphys.store import Attempt, step_attempts
from tiphys_plugin.attempts import pods
from tiphys_plugin.operations import end_attempt as ending
from tiphys_plugin.operations import start_checkpoint as beginnings
from tiphys_plugin.runtime.context import StepCall

_DID_NOT_RUN = ("Skipped", "Omitted")


def settle(call: StepCall, operation: Settle) -> ExecuteReply:
    """Answer one settle node. Raises `ConflictError` if the attempt is of another cluster."""
    attempts = step_attempts(call.store, call.run, call.step)
    mine = _of_this_try(call, attempts)
    if mine is None:
        return succeeded("No attempt was opened: the result was adopted, or the step was refused")
    if mine.end is None:
        found = pods.of_claim(call.store, call.services.cluster, mine.claim)
        if (waiting := ending.await_pods(call, mine.claim, found)) is not None:
            return waiting
        if operation.status == "Succeeded":
            how = ending.went_on(call, mine.claim)
            ending.release(call, mine.claim)
            return succeeded(f"Attempt {mine.claim.attempt} succeeded{how}; its outputs are verified next")
        failpoint("settle.before_end")
        seen = ending.observed(call, mine.claim, found, operation.status, operation.exit_code)
        end = ending.end_failed(call, mine.claim, seen, ending.never_ran(operation.status))
        failpoint("settle.after_end")
    else:
        end = mine.end
        ending.release_ended(call, mine.claim)
    if operation.status in _DID_NOT_RUN:
        return succeeded(f"Attempt {end.attempt} did not run: {end.message}")
    return _verdict(call, attempts, end)


def decision(call: StepCall, attempts: Sequence[Attempt], end: AttemptEnd) -> Decision:
    """Whether ``end`` is followed by another attempt; the same answer whenever it is asked."""
    ends = [a.end for a in attempts if a.end is not None and a.end.attempt < end.attempt]
    return decide([*ends, end], call.spec.retry, end.submission)


def words(cause: Cause | None) -> str:
    """A cause as a person says it."""
    return (cause or Cause.UNKNOWN).words


def _of_this_try(call: StepCall, attempts: Sequence[Attempt]) -> Attempt | None:
    here = attempt_of(call.node)
    for attempt in reversed(attempts):
        if attempt.claim.uid == call.binding.uid and attempt_of(attempt.claim.node) == here:
            return attempt
    return None


def _verdict(call: StepCall, attempts: Sequence[Attempt], end: AttemptEnd) -> ExecuteReply:
    if end.outcome is Outcome.DONE:
        return succeeded(f"Attempt {end.attempt} is done")
    if end.outcome is Outcome.FENCED:
        return succeeded(f"Stopped trying: attempt {end.attempt} was fenced, {end.message}")
    judged = decision(call, attempts, end)
    how = f"{words(end.cause)}, {end.message}"
    if not judged.again:
        return succeeded(f"Stopped trying: {how}; {judged.message}")
    return failed(f"Attempt {end.attempt} ended by {how}; attempt {end.attempt + 1} {_start(call, attempts)}")


def _start(call: StepCall, attempts: Sequence[Attempt]) -> str:
    if call.spec.checkpoints is None or call.volume:
        return "follows"
    choice = beginnings.foresee(call, attempts)
    if choice.checkpoint is None:
        return "starts from the beginning"
    return f"resumes from step {choice.checkpoint.global_step}"
