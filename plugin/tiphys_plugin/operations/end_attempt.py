"""Ends an attempt: waits for its pods, judges its end, writes its one end record, releases its GPUs.

The order of the writes makes a crash between them harmless:

- The quarantine of a bad checkpoint comes before the end record. A repeated call
  reaches the same verdict from the same records, whereas an end without its
  quarantine would let the next attempt load the checkpoint that kills it.
- The lease is released after the end record. A sweep finds and releases the
  lease of an ended attempt, but nothing would find an attempt that counts as
  live while its GPUs belong to another. Only a training that has succeeded gives
  its GPUs back before: its pods are gone, and verifying its outputs may take long.

A pod reports an exit code, and every error of a Python program is 1. The crash
record that the training session leaves in storage distinguishes a full GPU from
a type error, so it is part of the verdict, and the deciding evidence is kept in
the end record. So is the cost of a preemption.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

import structlog

from tiphys.errors import IntegrityError
from tiphys.failures.bad_checkpoints import derive_checkpoint_crash, find_suspect
from tiphys.failures.classify import UNEXPLAINED_RULES, AttemptObservation, FailureVerdict, classify_failure
from tiphys.faults import failpoint
from tiphys.lineage.quarantine import quarantine_checkpoint
from tiphys.lineage.select import AttemptCommits, read_attempt_commits, read_newest_commit
from tiphys.lineage.training_progress import read_training_progress
from tiphys.protocol.execute_api import ExecuteReply, pending_reply
from tiphys.protocol.gang import GangSpec, gang_name
from tiphys.recording.run_binding import RunBinding
from tiphys.records import (
    AttemptClaim,
    AttemptEnd,
    AttemptEndOutcome,
    Cause,
    CrashRecord,
    EvictionRecord,
    FailureEvidence,
    LastCheckpoint,
    Output,
    Preemption,
    task_name,
)
from tiphys.records.attempt import STOPPED_MESSAGE
from tiphys.store import claim_record, find_record, read_step_attempts
from tiphys.store.incarnations import count_incarnations, describe_incarnations, find_crash_record, find_gang_host
from tiphys_plugin.attempts import gangs, liveness, pods
from tiphys_plugin.cluster.interface import GangStatus, PodStatus
from tiphys_plugin.cluster.pod_status import NODE_LOST
from tiphys_plugin.eviction.cost import elapsed_seconds, format_preemption
from tiphys_plugin.operations import program_nodes
from tiphys_plugin.runtime.context import PluginContext, StepCall
from tiphys_plugin.runtime.settings import requeue_seconds

_log = structlog.get_logger()
_CAUSES_OF_A_STOP = (Cause.UNKNOWN, Cause.PREEMPTION, Cause.INFRASTRUCTURE)
"""As which the end of a program shows that ``argo stop`` or ``argo terminate`` has ended."""
QUARANTINE_AUTHOR = "conclude"
"""Author of the quarantines that this module writes."""


def await_pods(call: StepCall, attempt: AttemptClaim, pod_statuses: Sequence[PodStatus]) -> ExecuteReply | None:
    """A reply that waits for the attempt's pods to end; None once they have ended, or the timeout is over.

    Deletes the workload of a gang that would create more pods for an attempt that is over.
    """
    services, key = call.context, _wait_key(attempt)
    pod, is_gang_active = pods.find_live_pod(pod_statuses), _stop_orphaned_gang(call, attempt, pod_statuses)
    if pod is None and not is_gang_active:
        services.wait_tracker.clear(key)
        return None
    # The wait is over for each later call, too; else the end that was forced would wait again with every one.
    if services.wait_tracker.has_given_up(key):
        return None
    limit = services.settings.pod_end_timeout_seconds
    if (waited := services.wait_tracker.waited_seconds(key, services.clock(), limit)) >= limit:
        services.wait_tracker.give_up(key)
        services.metrics.forced_ends.inc()
        return None
    # Most pods end within seconds, for which the next attempt should not wait longer; one that saves takes minutes.
    wait = min(max(1.0, waited / 2), requeue_seconds(services.settings, call.node, position=1))
    name = f"pod {pod.name} is" if pod else "pods are"
    return pending_reply(f"Attempt {attempt.attempt}'s {name} still ending; forced after {limit:g} s", wait)


def end_failed_attempt(
    call: StepCall,
    attempt: AttemptClaim,
    pod_statuses: Sequence[PodStatus],
    *,
    status: str = "",
    exit_code: str = "",
    unknown_cause: str = "",
    note: str = "",
    pods_may_live: bool = False,
) -> AttemptEnd:
    """Judge how an attempt failed and record it; returns the stored record, also if another replica wrote it.

    An attempt that ends because its workflow was stopped has not failed, so its budget is not charged.

    Args:
        call: A call about its step.
        attempt: The attempt.
        pod_statuses: Its pods, in the order of their creation.
        status: Argo's status of the program; empty if Argo reports none.
        exit_code: Argo's exit code of the program; empty likewise.
        unknown_cause: The message if the cause cannot be determined.
        note: Added to any message.
        pods_may_live: Whether pods of it may live, so that its lease is kept until its conclude has seen them end.
    """
    preempted, crash = build_preemption_record(call, attempt), _read_crash_record(call, attempt)
    observation = _observe_end(call, attempt, pod_statuses, status, exit_code, crash)
    crash = crash if crash and crash.incarnation >= observation.last_process else None  # of the last process, or none
    judged = replace(_add_crash_record(observation, crash), is_launched=bool(attempt.lineage))
    if preempted is not None and crash is not None:
        # Preemption deletes the pod in any case, and the reason of that deletion would hide the crash.
        judged = replace(judged, pod_reason="", pod_message="")
    verdict = classify_failure(judged)
    cause = verdict.cause or Cause.UNKNOWN
    # A stop looks like an eviction or a lost pod, while a crash of the program stays one, although a stop came after.
    if cause in _CAUSES_OF_A_STOP and _is_stopped(call, attempt):
        return record_end(
            call,
            attempt,
            AttemptEndOutcome.FENCED,
            message=STOPPED_MESSAGE,
            exit_code=observation.effective_exit_code,
            stopped=True,
            pods_may_live=pods_may_live,
        )
    message = unknown_cause if unknown_cause and verdict.cause is None else verdict.evidence
    argo_message = program_nodes.find_argo_message(call, attempt) if verdict.rule in UNEXPLAINED_RULES else ""
    if argo_message not in message:
        message = f"{message}; Argo: {argo_message}"
    if preempted is not None:
        taken = format_preemption(preempted)
        message = taken if cause is Cause.PREEMPTION else f"{message}; {taken}"
    elif cause is Cause.PREEMPTION and (eviction := _find_eviction(call, attempt)) is not None:
        preempted = _build_evacuation_record(call, attempt, eviction)
        message = "; ".join([eviction.reason, message, *([format_preemption(preempted)] if preempted else [])])
    return record_end(
        call,
        attempt,
        AttemptEndOutcome.FAILED,
        cause=cause,
        message="; ".join(filter(None, [message, note])),
        evidence=_build_evidence(attempt, observation, verdict),
        exit_code=observation.effective_exit_code,
        preempted=preempted,
        terminating_at=observation.ended_at,
        crash=crash,
        pods_may_live=pods_may_live,
    )


def end_lost_attempt(
    call: StepCall, attempt: AttemptClaim, pod_statuses: Sequence[PodStatus], lost: Sequence[PodStatus], message: str
) -> AttemptEnd:
    """End an attempt whose ``lost`` pods are on lost nodes, and delete the workload that would make other pods for it.

    Its lease is kept until its conclude has seen the others of its pods end.
    """
    names, fields = {pod.name for pod in lost}, {"phase": "Unknown", "reason": NODE_LOST, "message": message}
    judged = [pod.model_copy(update=fields) if pod.name in names else pod for pod in pod_statuses]
    end = end_failed_attempt(call, attempt, judged, status="Error", pods_may_live=True)
    if call.spec.gang is not None and (gang_status := _find_gang_status(call, attempt)) is not None:
        call.context.cluster.delete_gang(gang_status)
    return end


def _observe_end(
    call: StepCall,
    attempt: AttemptClaim,
    pod_statuses: Sequence[PodStatus],
    status: str,
    exit_code: str,
    crash: CrashRecord | None,
) -> AttemptObservation:
    """Combine what Argo reports of the attempt's run node with the status of its pods."""
    if call.spec.gang is None:
        return pods.observe_pod_end(pod_statuses, status, exit_code)
    gang, gang_status = gangs.with_started_members(call.spec.gang, attempt), _find_gang_status(call, attempt)
    if gang.min_members is None or gang_status is None:
        return gangs.observe_gang_end(gang, gang_status, pod_statuses, status)
    made = gang.model_copy(update={"members": max(gang.members, gang_status.made)})  # with those that came later
    host, crashed = find_gang_host(call.store, call.run, attempt.step, attempt.attempt), crash is not None
    return gangs.observe_elastic_end(made, gang.min_members, pod_statuses, status, crashed=crashed, host=host)


def _is_stopped(call: StepCall, attempt: AttemptClaim) -> bool:
    bound = pods.read_submission_bound(call.store, call.context.cluster, attempt)
    return liveness.is_stop_requested(call.context.cluster, bound.namespace, bound.workflow_name, attempt.uid)


def end_hidden_crash(call: StepCall, attempt: AttemptClaim, crash: CrashRecord) -> AttemptEnd:
    """Record that an attempt failed although its pod ended with 0; the cause is that of the crash report."""
    verdict = classify_failure(_add_crash_record(AttemptObservation(status="Failed", exit_code=1), crash))
    return record_end(
        call,
        attempt,
        AttemptEndOutcome.FAILED,
        cause=verdict.cause,
        message=f"{crash.error}; the exit code 0 hides it, as that of a pipe does: set -o pipefail, or write exec",
        evidence=_build_evidence(attempt, AttemptObservation(), verdict),
        exit_code=0,
        crash=crash,
    )


def find_last_crash(call: StepCall, attempt: AttemptClaim) -> CrashRecord | None:
    """The crash report of an attempt whose pod ended with 0, unless another process of it trained on after the crash.

    Steps are compared, not times: an elastic training goes on under another clock.
    """
    if (crash := _read_crash_record(call, attempt)) is None:
        return None
    newest = _find_commits(call, attempt)[0]
    progress = read_training_progress(call.store, attempt.lineage, attempt.attempt)
    steps = [record.global_step for record in (newest, progress) if record and record.global_step is not None]
    return None if max(steps, default=-1) > (-1 if crash.global_step is None else crash.global_step) else crash


def is_gang_succeeded(call: StepCall, attempt: AttemptClaim, pod_statuses: Sequence[PodStatus]) -> bool:
    """Whether the members of a gang have succeeded, whatever became of the pod in which Argo watched them."""
    assert call.spec.gang is not None
    gang = gangs.with_started_members(call.spec.gang, attempt)
    return gangs.is_gang_succeeded(gang, _find_gang_status(call, attempt), pod_statuses)


def attempt_call(context: PluginContext, binding: RunBinding, claim: AttemptClaim) -> StepCall:
    """A call about the step of ``claim``, made for another node."""
    spec = binding.pipeline.step(task_name(claim.step))
    return StepCall(context, binding, spec, claim.step, claim.instance, claim.node)


def describe_fence(call: StepCall, end: AttemptEnd) -> str:
    """Return the rest of a sentence about a fenced attempt: why it ended, and after a stop how the run goes on."""
    if not end.stopped:
        return f"was fenced: {end.message}"
    return f"was {end.message}; go on with `tiphys resume {call.run}`, not with `argo retry`"


def not_started_message(status: str) -> str:
    """The message for a program that Argo did not start; ``status`` is Argo's."""
    return f"Argo did not start it ({status or 'no status'}), as it does while a workflow is stopping"


def record_end(
    call: StepCall,
    attempt: AttemptClaim,
    outcome: AttemptEndOutcome,
    *,
    cause: Cause | None = None,
    message: str = "",
    evidence: FailureEvidence | None = None,
    exit_code: int | None = None,
    stopped: bool = False,
    outputs: tuple[Output, ...] = (),
    preempted: Preemption | None = None,
    terminating_at: datetime | None = None,
    crash: CrashRecord | None = None,
    pods_may_live: bool = False,
) -> AttemptEnd:
    """Write the end record of ``attempt`` unless it has one, and release its GPUs unless ``pods_may_live``.

    A failed end may quarantine the checkpoint that the attempt had loaded; see `_quarantine_bad_checkpoint`. ``crash``
    is the crash record that its program left. Returns the stored record, also if another replica wrote it.
    """
    newest, unreadable = _find_commits(call, attempt)
    incarnations = count_incarnations(call.store, call.run, call.step, attempt.attempt) if attempt.lineage else 1
    end = AttemptEnd(
        run=attempt.run,
        step=attempt.step,
        attempt=attempt.attempt,
        submission=attempt.submission,
        outcome=outcome,
        cause=cause,
        message="; ".join(filter(None, [message, describe_incarnations(incarnations)])),
        evidence=evidence,
        exit_code=exit_code,
        stopped=stopped,
        progress=attempt.has_advanced_to(newest) or _has_progress_note(call, attempt),
        progress_unknown=newest is None and unreadable,
        step_key=attempt.step_key,
        outputs=outputs,
        incarnations=incarnations,
        preempted=preempted,
        terminating_at=terminating_at,
        last_checkpoint=LastCheckpoint.from_manifest(newest) if newest else None,
    )
    end = _quarantine_bad_checkpoint(call, attempt, end, crash)
    failpoint("end.before_record")
    stored = claim_record(call.store, call.layout.attempt_end(attempt.step, attempt.attempt), end)
    failpoint("end.after_record")
    if stored.is_ours:
        call.context.metrics.attempts_ended.labels(cause=cause.value if cause else outcome.value).inc()
        if preempted is not None:
            call.context.metrics.count_preemption(preempted)
    # Also of an end that another replica wrote: it may have died before it came to this.
    if not pods_may_live:
        release_lease(call, attempt)
    return stored.record


def release_lease(call: StepCall, attempt: AttemptClaim) -> None:
    """Release the attempt's GPUs, if it holds any and its pods are gone.

    The GPUs of an attempt that was ended by force may still be in use, so a later sweep releases them; see
    `tiphys_plugin.operations.lease_reclaim`.
    """
    if attempt.lease and not call.context.wait_tracker.has_given_up(_wait_key(attempt)):
        call.context.ledger.release(attempt.lease)


def release_lease_if_ended(call: StepCall, attempt: AttemptClaim) -> None:
    """Release the GPUs of an attempt that has an end record, perhaps by another replica, once its pods are gone."""
    if not attempt.lease:
        return
    pod_statuses = pods.list_attempt_pods(call.store, call.context.cluster, attempt)
    if pods.find_live_pod(pod_statuses) is None and not _stop_orphaned_gang(call, attempt, pod_statuses):
        call.context.ledger.release(attempt.lease)


def describe_members_left(call: StepCall, attempt: AttemptClaim) -> str:
    """Describe how many members of an elastic gang were left at its end; empty if it lost none."""
    if call.spec.gang is None or call.spec.gang.min_members is None:
        return ""
    started = gangs.with_started_members(call.spec.gang, attempt)
    left = _count_members_left(call, started, attempt)
    return f"{left} of its {started.members} nodes were left in the end" if left < started.members else ""


def build_preemption_record(call: StepCall, attempt: AttemptClaim) -> Preemption | None:
    """The cost of a preemption by the queue of an attempt whose pods are gone; None unless its lease was preempted."""
    ledger = call.context.ledger.snapshot() if attempt.lease else None
    lease = next((lease for lease in ledger.leases if lease.id == attempt.lease), None) if ledger is not None else None
    # A gang that only gives members away (`keeps`) trains on: its end has another cause.
    if ledger is None or lease is None or lease.preemption is None or lease.preemption.keeps is not None:
        return None
    preemption = lease.preemption
    pending = (waiting.request for waiting in ledger.pending)
    preemptor = next((request for request in pending if preemption.is_for(request)), None)
    return _add_loss(
        call,
        attempt,
        lease.granted_at,
        Preemption(
            for_run=preemptor.run if preemptor else "",
            for_step=preemption.step,
            for_step_name=preemptor.step_name if preemptor else "",
            reason=preemption.reason,
            moves=preemption.moves,
            asked_at=preemption.asked_at,
            gone_at=max(call.context.clock(), preemption.asked_at),
            gpus=lease.request.gpus,
        ),
    )


def _build_evacuation_record(call: StepCall, attempt: AttemptClaim, eviction: EvictionRecord) -> Preemption | None:
    """The cost of leaving nodes that fail or are about to be removed; None if an older version evicted the pods."""
    if not eviction.nodes:
        return None
    asked_at = eviction.written_at
    gpus = call.spec.gpu.gpus_for(attempt.members) if call.spec.gpu else 0
    gone_at = max(call.context.clock(), asked_at)
    evacuation = Preemption(for_step="", nodes=eviction.nodes, asked_at=asked_at, gone_at=gone_at, gpus=gpus)
    return _add_loss(call, attempt, attempt.written_at, evacuation)


def _add_loss(call: StepCall, attempt: AttemptClaim, started_at: datetime, preemption: Preemption) -> Preemption:
    """``preemption`` with the newest checkpoint and the time since; unknown for checkpoints on a volume."""
    if call.volume:
        return preemption
    manifest = read_newest_commit(call.store, attempt.lineage, attempt.attempt) if attempt.lineage else None
    saved_at = manifest.written_at if manifest is not None else started_at
    return preemption.model_copy(
        update={
            "committed": manifest.ref if manifest is not None else None,
            "seconds_lost": elapsed_seconds(saved_at, preemption.asked_at),
        }
    )


def _find_eviction(call: StepCall, claim: AttemptClaim) -> EvictionRecord | None:
    """Why the service deleted the pods of the attempt; None if it did not, or the record is unreadable."""
    with contextlib.suppress(IntegrityError):
        return find_record(call.store, call.layout.eviction(claim.step, claim.attempt), EvictionRecord)
    return None


def _read_crash_record(call: StepCall, claim: AttemptClaim) -> CrashRecord | None:
    """The crash record that the program of an attempt left; None if there is none, or it is unreadable."""
    if not claim.lineage:
        return None
    try:
        return find_crash_record(call.store, claim.run, claim.step, claim.attempt)
    except IntegrityError as error:  # a dying program may leave a damaged record; the verdict does without it
        _log.warning("crash.unreadable", run=claim.run, step=claim.step, attempt=claim.attempt, error=str(error))
        return None


def _add_crash_record(observation: AttemptObservation, crash_record: CrashRecord | None) -> AttemptObservation:
    """``observation`` with the error and the stuck time of the crash record."""
    if crash_record is None:
        return observation
    return replace(observation, crash_error=crash_record.error, stuck_seconds=crash_record.stuck_seconds)


def _build_evidence(
    claim: AttemptClaim, observation: AttemptObservation, verdict: FailureVerdict
) -> FailureEvidence | None:
    """The evidence to keep with the end record; None if no rule decided."""
    if not verdict.rule:
        return None
    only_node = claim.nodes[0] if len(claim.nodes) == 1 else ""
    return FailureEvidence(
        rule=verdict.rule,
        matched_text=verdict.matched_text,
        node=observation.node or only_node,
    )


def _quarantine_bad_checkpoint(
    call: StepCall, claim: AttemptClaim, end: AttemptEnd, crash: CrashRecord | None
) -> AttemptEnd:
    """Quarantine the checkpoint that ``end`` makes suspect, if any; returns ``end`` with that finding.

    ``crash`` is the crash record that the program left.
    """
    if end.outcome is not AttemptEndOutcome.FAILED or not claim.lineage:
        return end
    death = derive_checkpoint_crash(claim, end.cause, end.exit_code, crash, progress=end.progress)
    is_error_new = crash is not None and death is not None and crash.error not in end.message
    cause_message = f"{end.message} ({crash.error})" if crash and is_error_new else end.message
    end = end.model_copy(update={"checkpoint_crash": death, "message": cause_message})
    if death is None:
        return end
    settings = call.context.settings
    earlier = [a for a in read_step_attempts(call.store, call.run, call.step) if a.claim.attempt < claim.attempt]
    suspect = find_suspect(earlier, end, settings.quarantine_after_crashes, settings.quarantine_within_steps)
    if suspect is None:
        return end
    ref = suspect.checkpoint
    if not call.volume:  # the plugin cannot write to a volume; there the training program reads the end record
        quarantine_checkpoint(call.store, ref, suspect.reason, by=QUARANTINE_AUTHOR)
    message = (
        f"{cause_message}; checkpoint {ref.global_step} of attempt {ref.attempt} is quarantined, since {suspect.reason}"
    )
    return end.model_copy(update={"suspect": ref, "message": message})


def _find_commits(call: StepCall, attempt: AttemptClaim) -> AttemptCommits:
    """The checkpoints of the attempt; none if they are on a volume, which the plugin cannot read."""
    readable = attempt.lineage and not call.volume
    return read_attempt_commits(call.store, attempt.lineage, attempt.attempt) if readable else AttemptCommits(None)


def _has_progress_note(call: StepCall, attempt: AttemptClaim) -> bool:
    """Whether a program whose checkpoints are on a volume has noted in storage that it committed one."""
    key = call.layout.progress(attempt.step, attempt.attempt)
    return bool(call.volume and attempt.lineage) and next(call.store.list(key), None) is not None


def _count_members_left(call: StepCall, gang: GangSpec, attempt: AttemptClaim) -> int:
    """Members by the lease, or without GPUs by the workload. One that ended after another succeeded is not lost."""
    if attempt.lease:
        leases = call.context.ledger.snapshot().leases
        return next((lease.request.members for lease in leases if lease.id == attempt.lease), gang.members)
    gang_status = _find_gang_status(call, attempt)
    return gang.members if gang_status is None or gang_status.remaining is None else gang_status.remaining


def _stop_orphaned_gang(call: StepCall, attempt: AttemptClaim, pod_statuses: Sequence[PodStatus]) -> bool:
    """Delete the workload of a gang that goes on after its attempt; returns whether it may still create pods."""
    if call.spec.gang is None:
        return False
    gang_status = _find_gang_status(call, attempt)
    if gang_status is not None and gangs.is_gang_orphaned(call.spec.gang, gang_status, pod_statuses):
        call.context.cluster.delete_gang(gang_status)
    return gangs.is_gang_active(call.spec.gang, gang_status, pod_statuses)


def _find_gang_status(call: StepCall, attempt: AttemptClaim) -> GangStatus | None:
    """The workload that creates the pods of a gang; None if it is gone."""
    assert call.spec.gang is not None
    cluster = call.context.cluster
    namespace = pods.read_submission_bound(call.store, cluster, attempt).namespace
    name = gang_name(attempt.run, attempt.step, attempt.attempt)
    return cluster.gang(call.spec.gang.backend, namespace, name, attempt.uid)


def _wait_key(attempt: AttemptClaim) -> str:
    """Key of the wait for the attempt's pods in the `WaitTracker`."""
    return f"{attempt.run}/{attempt.step}/{attempt.attempt}"
