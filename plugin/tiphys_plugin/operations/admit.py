"""admit: decides whether a step may run now, and from which checkpoint.

Cheap and final checks come first: a reply recorded earlier, a finished result
to reuse, a live earlier attempt, free GPUs, the checkpoint to start from. The
attempt is claimed last, and a repeated call gets its reply from that claim.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from tiphys.errors import ConflictError, FencedError, IntegrityError, NotFoundError, UsageError
from tiphys.failures.retry_budget import back_off_seconds
from tiphys.faults import failpoint
from tiphys.lineage.select import START_FROM_BEGINNING, CheckpointChoice, shorten_skipped
from tiphys.protocol.execute_api import ExecuteReply, failed_reply, pending_reply, retry_reply
from tiphys.protocol.operations import AdmitOperation, try_number
from tiphys.protocol.quantities import format_duration
from tiphys.protocol.step_spec import GpuRequest, StepKind
from tiphys.recording.reusable_results import describe_reuse, write_reuse_projection
from tiphys.recording.step_key import StepInputs, StepKey, compute_step_key
from tiphys.records import AttemptClaim, AttemptEndOutcome, Cause, FailureEvidence, ReuseRecord, SubmissionClaim
from tiphys.store import Attempt, ClaimResult, claim_record, find_record, lineage_name, read_step_attempts
from tiphys_plugin.attempts import gangs, pods
from tiphys_plugin.attempts.liveness import is_workflow_stopping
from tiphys_plugin.eviction.cost import elapsed_seconds
from tiphys_plugin.operations import (
    conclude,
    end_attempt,
    lease_reclaim,
    pod_patch,
    program_nodes,
    publish,
    recording,
    replies,
    reuse,
    start_checkpoint,
)
from tiphys_plugin.quota.lease import Admission, Admitted, Deferred, LeaseRequest, Rejected, StepAttempt
from tiphys_plugin.runtime.context import StepCall
from tiphys_plugin.runtime.settings import requeue_seconds

_REJECTED_RULE = "rejected"
"""Evidence of an attempt that the queues can never grant; a budget for errors of the program repeats none."""
_MAX_AVOIDED_NODES = 16
"""Most nodes that a request for GPUs avoids, because all namespaces share the room of the ledger."""


def admit(call: StepCall, operation: AdmitOperation, template: dict[str, Any]) -> ExecuteReply:
    """Answer one admit node.

    Raises:
        FencedError: a newer submission of the run was claimed, or the workflow is stopping.
        ConflictError: an earlier attempt has no end and runs in a cluster or namespace that this plugin cannot see.
        NotFoundError: the result that the step reused exists no longer.
        UsageError: an input artifact of a gang is in another store, or tolerations cannot be merged.
        StoreError: storage, ledger or cluster did not answer.
    """
    if call.spec.gang is not None:
        call = replace(call, input_keys=gangs.resolve_input_keys(call.store, template))
    inputs = StepInputs(operation.inputs, (template.get("inputs") or {}).get("artifacts") or [], operation.item)
    if reply := recording.record_steps_before(call) or _claim_first_attempt(call, inputs):
        return reply
    attempts = read_step_attempts(call.store, call.run, call.step)
    for attempt in attempts:
        if (attempt.claim.uid, attempt.claim.node) == (call.binding.uid, call.node):
            return _recorded_reply(call, attempt, attempts)
    if (record := reuse.find_reuse_record(call)) is not None:
        return _reuse_reply(call, record)
    key = compute_step_key(call.store, call.spec, inputs)
    lookup = reuse.find_reusable_result(call, key.key, attempts)
    if lookup.waiting is not None:
        return lookup.waiting
    if lookup.end is not None:
        return _reuse_reply(call, reuse.take_over(call, lookup.end))
    _check_newest_submission(call)
    if (refusal := _retries_exhausted_reply(call, attempts)) is not None:
        return refusal
    if attempts and attempts[-1].end is None:
        # Its result may be the one that the step needs.
        return _end_previous_attempt(call, attempts[-1]) or admit(call, operation, template)
    return _wait_for_next_try(call, attempts) or _open_attempt(call, key, attempts, lookup.damage)


def _reuse_reply(call: StepCall, record: ReuseRecord) -> ExecuteReply:
    reuse.read_reused_end(call, record)  # raises if it counts no longer
    write_reuse_projection(call.store, record)
    return replies.skip_step(_capitalize(describe_reuse(record)))


def _claim_first_attempt(call: StepCall, inputs: StepInputs) -> ExecuteReply | None:
    """Open attempt 1 of a new step; None if the step has attempts, or if more has to be checked.

    Winning the claim of attempt 1 proves that the step has no earlier attempt,
    so there is no reply to repeat, no result to reuse and no attempt to end.
    One write replaces the reads that would find nothing.
    """
    spec = call.spec
    if (
        call.binding.submission > 1
        or try_number(call.node)
        or spec.gpu is not None
        or spec.share
        or call.fork_ancestors
    ):
        return None
    key = compute_step_key(call.store, spec, inputs)
    _check_newest_submission(call)
    claim = _claim_attempt(call, key, (), None, start_checkpoint.pin_start_checkpoint(call, ()))
    return replies.run_step(call, claim.record) if claim.is_ours else None


def _recorded_reply(call: StepCall, attempt: Attempt, attempts: Sequence[Attempt]) -> ExecuteReply:
    """The recorded reply, unless the attempt that it opened has ended.

    Argo repeats the call for the same node after ``argo retry``, and after a
    restart of its agent. An attempt that has ended must not run a second time:
    it holds no GPUs, and its outputs were verified already.
    """
    if attempt.end is None:
        return replies.run_step(call, attempt.claim)
    number = attempt.claim.attempt
    if attempt.end.outcome is AttemptEndOutcome.DONE:
        return replies.skip_step(f"Attempt {number} is finished")
    if call.spec.kind is not StepKind.TRAIN:
        return failed_reply(
            f"Attempt {number} has ended ({attempt.end.message}) and cannot run again; `tiphys resume {call.run}` "
            "opens a new one"
        )
    if attempt.end.outcome is AttemptEndOutcome.FENCED:
        return failed_reply(f"Attempt {number} {end_attempt.describe_fence(call, attempt.end)}")
    if attempt.end.evidence is not None and attempt.end.evidence.rule == _REJECTED_RULE:
        return failed_reply(f"Rejected: {attempt.end.message}")
    exhausted = _retries_exhausted_reply(call, attempts)
    return exhausted or retry_reply(f"Attempt {number} has ended ({attempt.end.message}); the next try opens a new one")


def _retries_exhausted_reply(call: StepCall, attempts: Sequence[Attempt]) -> ExecuteReply | None:
    """A reply that opens no attempt if this workflow was stopped or has used up its retries; None if it may retry.

    ``argo retry`` creates a try after the last one of a step, but Argo never runs
    its program. An attempt would hold its GPUs for as long as the workflow exists.
    """
    ends = [attempt.end for attempt in attempts if attempt.claim.uid == call.binding.uid]
    last = ends[-1] if ends else None
    if last is not None and last.stopped:
        return failed_reply(f"Attempt {last.attempt} {end_attempt.describe_fence(call, last)}")
    if (
        last is None
        or last.outcome is not AttemptEndOutcome.FAILED
        or conclude.decide_retry(call, attempts, last).retry
    ):
        return None
    return failed_reply(
        f"Attempt {last.attempt} was the last of this workflow ({last.message}); `tiphys resume {call.run}` "
        "opens a new one"
    )


def _wait_for_next_try(call: StepCall, attempts: Sequence[Attempt]) -> ExecuteReply | None:
    """A reply that waits for the rest of the back-off, which depends on causes that Argo does not know."""
    ends = [attempt.end for attempt in attempts if attempt.end is not None]
    if not ends or not try_number(call.node):
        return None
    wait = back_off_seconds(ends, call.spec.retry, call.binding.submission) / call.context.settings.speed
    left = round(wait - elapsed_seconds(ends[-1].written_at, call.context.clock()), 1)
    if left <= 0:
        return None
    ended = f"attempt {ends[-1].attempt}, which ended by {recording.describe_cause(ends[-1].cause)}"
    message = f"Attempt {ends[-1].attempt + 1} begins in {format_duration(left)}, the back-off after {ended}"
    return pending_reply(message, left)


def _check_newest_submission(call: StepCall) -> None:
    """Raise `FencedError` if a later submission was claimed. The steps of a workflow share one lookup."""
    newer = call.binding.submission + 1
    key = call.layout.submission(newer)
    services = call.context
    is_superseded = services.single_flight.lookup(
        key, lambda: find_record(call.store, key, SubmissionClaim) is not None, services.settings.lock_timeout_seconds
    )
    if is_superseded:
        raise FencedError(
            f"submission {newer} has taken over run {call.run}; workflow {call.binding.workflow} may open no more "
            "attempts and can be stopped"
        )


def _end_previous_attempt(call: StepCall, previous: Attempt) -> ExecuteReply | None:
    """End the previous attempt once its pods are gone; until then, a reply that waits.

    One of a workflow that goes on, although a resume by force has taken the run over, is fenced at once. The resume
    has fenced those that were open, so this one was claimed since, and Argo may not have started its pod yet.
    """
    claim = previous.claim
    pod_statuses = pods.list_attempt_pods(call.store, call.context.cluster, claim)
    if claim.uid != call.binding.uid and (not pod_statuses or pods.find_live_pod(pod_statuses)):
        bound = pods.read_submission_bound(call.store, call.context.cluster, claim)
        if not is_workflow_stopping(call.context.cluster, bound.namespace, bound.workflow_name, claim.uid):
            message = f"submission {call.binding.submission} has taken over run {call.run}"
            end_attempt.record_end(call, claim, AttemptEndOutcome.FENCED, message=message, pods_may_live=True)
            return None
    waiting = end_attempt.await_pods(call, claim, pod_statuses)
    if waiting is not None:
        return waiting
    is_done = (
        publish.has_finished(call, claim, pod_statuses)
        if call.spec.kind is StepKind.TRAIN
        else program_nodes.is_program_done(call, claim, pod_statuses)
    )
    if is_done and not call.spec.has_result:  # only a conclude knows what the program has printed
        reply = conclude.conclude_attempt(call, previous, "Succeeded", "0")
        return reply if reply.phase == "Pending" else None
    exit_code = "" if pod_statuses else program_nodes.find_argo_exit_code(call, claim)
    unknown_cause = "its end was not observed, and the next attempt was requested"
    end_attempt.end_failed_attempt(call, claim, pod_statuses, exit_code=exit_code, unknown_cause=unknown_cause)
    return None


def _open_attempt(call: StepCall, key: StepKey, attempts: Sequence[Attempt], damage: str) -> ExecuteReply:
    """Get the GPUs, choose the checkpoint, claim the attempt."""
    number = _next_attempt_number(attempts)
    admission = _request_gpus(call, number, attempts)
    match admission:
        case Deferred():
            wait = requeue_seconds(call.context.settings, call.node, admission.position)
            return pending_reply(f"Deferred: {admission.reason}: {admission.message}", wait)
        case Rejected():
            return _reject_attempt(call, key, attempts, f"{admission.reason}: {admission.message}")
    failpoint("admit.after_lease")
    with _release_on_refusal(call, number, admission):
        claim = _claim_attempt(
            call, key, attempts, admission, start_checkpoint.pin_start_checkpoint(call, attempts)
        ).record
    if not _is_own_claim(call, claim):
        return _lost_race_reply(call, claim, admission)
    granted = admission.flavor if isinstance(admission, Admitted) else None
    return replies.run_step(call, claim, _capitalize(damage), granted)


def _is_own_claim(call: StepCall, claim: AttemptClaim) -> bool:
    return (claim.uid, claim.node) == (call.binding.uid, call.node)


def _lost_race_reply(call: StepCall, winner: AttemptClaim, admission: Admission | None) -> ExecuteReply:
    """The reply when another node has claimed the attempt in the meantime."""
    _release_unused_lease(call, winner.attempt, admission)
    return pending_reply(f"Attempt {winner.attempt} was just opened by {winner.node}; looking again", 1)


def _request_gpus(call: StepCall, number: int, attempts: Sequence[Attempt]) -> Admission | None:
    """None for a step without GPUs."""
    gpu = call.spec.gpu
    if gpu is None:
        return None
    services, binding = call.context, call.binding
    if is_workflow_stopping(services.cluster, binding.namespace, binding.workflow, binding.uid):
        services.ledger.withdraw(binding.uid)
        raise FencedError(f"workflow {binding.workflow} is stopping, so {call.name} gets no GPUs")
    request = _build_lease_request(call, gpu, number, attempts)
    answer = _submit_lease_request(call, request)
    if isinstance(answer, Deferred) and lease_reclaim.reclaim_leases(services):
        answer = _submit_lease_request(call, request)
    if isinstance(answer, Admitted):
        services.metrics.gpu_wait_seconds.observe(answer.waited_seconds)
    return answer


def _submit_lease_request(call: StepCall, request: LeaseRequest) -> Admission:
    metrics = call.context.metrics
    with metrics.gpu_decision_seconds.time():
        answer = call.context.ledger.request(request)
    metrics.gpu_requests.labels(answer="Admitted" if isinstance(answer, Admitted) else answer.reason.value).inc()
    return answer


def _build_lease_request(call: StepCall, gpu: GpuRequest, number: int, attempts: Sequence[Attempt]) -> LeaseRequest:
    binding, escalation = call.binding, pod_patch.plan_escalation(call, attempts, "")
    attained, first_start = lease_reclaim.attained_service(gpu, attempts)
    workflow = (binding.uid, binding.namespace, binding.workflow)
    attempt = StepAttempt(*workflow, call.run, call.step, call.instance, call.node, number)
    request = replace(LeaseRequest.from_gpu_request(gpu, attempt), attained=attained, first_start=first_start)
    if escalation is None:
        return request
    avoids_spot = gpu.spot != "no" and escalation.on_demand
    avoided_nodes = escalation.avoided_nodes[:_MAX_AVOIDED_NODES]
    return replace(request, spot="avoided" if avoids_spot else gpu.spot, avoided_nodes=avoided_nodes)


def _reject_attempt(call: StepCall, key: StepKey, attempts: Sequence[Attempt], reason: str) -> ExecuteReply:
    """Record an attempt that may never run, so that people see why."""
    claim = _claim_attempt(call, key, attempts, None, START_FROM_BEGINNING).record
    if not _is_own_claim(call, claim):
        return _lost_race_reply(call, claim, None)
    if claim.lease:  # another replica, with another queue file, has admitted this same call
        return replies.run_step(call, claim)
    evidence = FailureEvidence(rule=_REJECTED_RULE, matched_text=reason)
    end_attempt.record_end(
        call, claim, AttemptEndOutcome.FAILED, cause=Cause.USER_ERROR, message=reason, evidence=evidence
    )
    return failed_reply(f"Rejected: {reason}")


def _next_attempt_number(attempts: Sequence[Attempt]) -> int:
    return attempts[-1].claim.attempt + 1 if attempts else 1


def _claim_attempt(
    call: StepCall, key: StepKey, attempts: Sequence[Attempt], admission: Admission | None, choice: CheckpointChoice
) -> ClaimResult[AttemptClaim]:
    """Claim the attempt after ``attempts``; the result holds the stored claim, of this or of another caller."""
    lease = admission if isinstance(admission, Admitted) else None
    number, escalated = _next_attempt_number(attempts), pod_patch.plan_escalation(call, attempts, key.key)
    claim = AttemptClaim(
        run=call.run,
        step=call.step,
        attempt=number,
        submission=call.binding.submission,
        uid=call.binding.uid,
        node=call.node,
        instance=call.instance,
        step_key=key.key,
        parameters=key.parameters,
        dataset=key.dataset,
        data=call.spec.data,
        lineage=lineage_name(call.run, call.step) if call.spec.checkpoints is not None else "",
        starts_from=choice.checkpoint,
        skipped=shorten_skipped(choice.skipped),
        escalation=escalated,
        lease=lease.lease if lease else "",
        nodes=lease.nodes if lease else (),
        flavor=lease.flavor.name if lease and lease.flavor else "",
        gpu_type=pod_patch.chosen_gpu_type(call, lease),
        members=lease.members if lease else None,
    )
    pod_patch.build_pod_patch(call, claim, lease.flavor if lease else None)  # refuses before anything is claimed
    failpoint("admit.before_claim")
    stored = claim_record(call.store, call.layout.attempt(call.step, number), claim)
    failpoint("admit.after_claim")
    return stored


@contextlib.contextmanager
def _release_on_refusal(call: StepCall, number: int, admission: Admission | None) -> Iterator[None]:
    """Release the GPUs of an attempt that is refused for good; after a storage failure the next call finds them."""
    try:
        yield
    except (UsageError, NotFoundError, ConflictError, IntegrityError):
        _release_unused_lease(call, number, admission)
        raise


def _release_unused_lease(call: StepCall, number: int, admission: Admission | None) -> None:
    """Release the lease for attempt ``number``, unless the attempt uses it: another node may have opened it."""
    if not isinstance(admission, Admitted):
        return
    opened = find_record(call.store, call.layout.attempt(call.step, number), AttemptClaim)
    if opened is None or opened.lease != admission.lease:
        call.context.ledger.release(admission.lease)


def _capitalize(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
