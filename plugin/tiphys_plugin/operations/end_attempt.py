"""End an attempt: write its one end record, then give its GPUs back.

In this order, because a lease without an end is found and released by a sweep,
whereas an attempt whose GPUs went to somebody else while it counts as live is
found by nobody.

What a program has said of its own end, and what its end was judged by.

Pods tell an exit code, and every error of a Python program is 1. What the
session of a training left in storage tells a full GPU from a typing error, so
it is heard before the verdict; what decided is kept with the end.

An end that tells of a checkpoint: what the attempt died of, and whether that bars what it had loaded.

The quarantine is written before the end. A crash between the two repeats the
judgement, from the same records; an end without its quarantine would send the
next attempt to its death.

What a preemption has cost, written into the end of the attempt that went.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

import structlog

from tiphys.errors import IntegrityError
from tiphys.failures.bad_checkpoints import crash_of, death_of, suspect
from tiphys.failures.classify import Observation, Verdict, classify
from tiphys.faults import failpoint
from tiphys.lineage.quarantine import quarantine
from tiphys.lineage.select import Commits, looked_up, newest_commit
from tiphys.protocol.execute_api import ExecuteReply, pending
from tiphys.protocol.gang import Gang, gang_name
from tiphys.records import AttemptClaim, AttemptEnd, Cause, CrashRecord, Evidence, Outcome, Output, Preemption, Saved
from tiphys.store import claim as claim_record
from tiphys.store import find_record, step_attempts
from tiphys_plugin.attempts import gangs, pods
from tiphys_plugin.attempts import gangs as elastic
from tiphys_plugin.cluster.interface import GangStatus, PodStatus
from tiphys_plugin.eviction.cost import seconds_since, went
from tiphys_plugin.runtime.context import StepCall
from tiphys_plugin.runtime.settings import requeue_seconds

_log = structlog.get_logger()
_LONGEST_WORDS = 300


def crash(call: StepCall, claim: AttemptClaim) -> CrashRecord | None:
    """What the program of an attempt left about its end; None if it left nothing that can be read."""
    if not claim.lineage:
        return None
    try:
        return crash_of(call.store, claim.run, claim.step, claim.attempt)
    except IntegrityError as error:  # a program that dies may leave anything; its end is judged without it
        _log.warning("crash.unreadable", run=claim.run, step=claim.step, attempt=claim.attempt, error=str(error))
        return None


def heard(seen: Observation, left: CrashRecord | None) -> Observation:
    """``seen``, and what the program has left."""
    if left is None:
        return seen
    return replace(seen, account=left.error, stuck_seconds=left.stuck_seconds)


def evidence(claim: AttemptClaim, seen: Observation, verdict: Verdict) -> Evidence | None:
    """What is kept of a verdict; None where there was nothing to judge."""
    if not verdict.rule:
        return None
    alone = claim.nodes[0] if len(claim.nodes) == 1 else ""
    return Evidence(rule=verdict.rule, words=verdict.words[:_LONGEST_WORDS], node=seen.node or alone)


DECIDER = "settle"
"""Who is named in the quarantine."""


def judged(call: StepCall, claim: AttemptClaim, end: AttemptEnd, crash: CrashRecord | None) -> AttemptEnd:
    """``end`` with what it says about a checkpoint; one that it made suspect is quarantined by then.

    ``crash`` is what the program left about its end.
    """
    if end.outcome is not Outcome.FAILED or not claim.lineage:
        return end
    death = death_of(claim, end.cause, end.exit_code, crash, progress=end.progress)
    told = f"{end.message} ({crash.error})" if crash and death else end.message
    end = end.model_copy(update={"death": death, "message": told})
    if death is None:
        return end
    settings = call.services.settings
    earlier = [a for a in step_attempts(call.store, call.run, call.step) if a.claim.attempt < claim.attempt]
    found = suspect(earlier, end, settings.suspect_deaths, settings.suspect_steps)
    if found is None:
        return end
    ref = found.checkpoint
    if not call.volume:  # which is out of sight from here; there the training program goes by the end itself
        quarantine(call.store, ref, found.reason, by=DECIDER)
    message = f"{told}; checkpoint {ref.global_step} of attempt {ref.attempt} is quarantined, since {found.reason}"
    return end.model_copy(update={"suspect": ref, "message": message})


def report(call: StepCall, attempt: AttemptClaim) -> Preemption | None:
    """The card of an attempt whose pods are gone; None unless it was asked to go."""
    seen = call.services.ledger.snapshot() if attempt.lease else None
    lease = next((one for one in seen.leases if one.id == attempt.lease), None) if seen is not None else None
    if seen is None or lease is None or lease.leaving is None or lease.leaving.keeps is not None:
        return None
    leaving = lease.leaving
    wanted = (one.request for one in seen.waiting if (one.request.uid, one.request.step) == (leaving.uid, leaving.step))
    for_run = next((request.run for request in wanted), "")
    manifest = None
    if attempt.lineage and not call.volume:
        manifest = newest_commit(call.store, attempt.lineage, attempt.attempt)
    saved_at = manifest.written_at if manifest is not None else lease.granted_at
    return Preemption(
        for_run=for_run,
        for_step=leaving.step,
        asked_at=leaving.asked_at,
        gone_at=max(call.services.clock(), leaving.asked_at),
        gpus=lease.request.gpus,
        committed=manifest.ref if manifest is not None else None,
        seconds_lost=None if call.volume else seconds_since(saved_at, leaving.asked_at),
    )


def as_it_ended(call: StepCall, attempt: AttemptClaim, seen: Observation) -> Observation:
    """What is seen of an attempt that was asked to go, without what was done to its pods if it crashed by itself.

    Its pod was deleted in any case, which would hide that.
    """
    key = call.layout.attempt_crash(attempt.step, attempt.attempt)
    if find_record(call.store, key, CrashRecord) is None:
        return seen
    return replace(seen, pod_reason="", pod_message="")


_FEWEST_LOOKS = 5
"""As often at least a pod is found alive before its attempt is ended by force, whatever the clock says."""


def await_pods(call: StepCall, attempt: AttemptClaim, found: Sequence[PodStatus]) -> ExecuteReply | None:
    """A reply that waits for the attempt's pods to end; None once they have, or the time for it is over.

    What would make more of them, or goes on although its attempt is over, is deleted.
    """
    services, what = call.services, _pods_of(attempt)
    pod, goes_on = pods.living(found), _goes_on(call, attempt, found)
    if pod is None and not goes_on:
        services.waits.over(what)
        return None
    if services.waits.gave_up(what):
        return None
    limit = services.settings.pods_gone_seconds
    if services.waits.seconds(what, services.clock(), limit / _FEWEST_LOOKS) >= limit:
        services.waits.give_up(what)
        services.metrics.forced_ends.inc()
        return None
    wait = requeue_seconds(services.settings, call.node, position=1)
    name = f"pod {pod.name} is" if pod else "pods are"
    return pending(f"Attempt {attempt.attempt}'s {name} still ending; forced after {limit:g} s", wait)


def _goes_on(call: StepCall, attempt: AttemptClaim, found: Sequence[PodStatus]) -> bool:
    """Whether there may be more pods of a gang than were found; one that goes on for nobody is deleted."""
    if call.spec.gang is None:
        return False
    made_by = _made_by(call, call.spec.gang, attempt)
    if made_by is not None and gangs.is_forgotten(call.spec.gang, made_by, found):
        call.services.cluster.end_gang(made_by)
    return gangs.goes_on(call.spec.gang, made_by, found)


def _made_by(call: StepCall, gang: Gang, attempt: AttemptClaim) -> GangStatus | None:
    """What makes the pods of an attempt; None if that is gone."""
    cluster = call.services.cluster
    namespace = pods.place_of(call.store, cluster, attempt).namespace
    return cluster.gang(gang.backend, namespace, gang_name(attempt.run, attempt.step, attempt.attempt))


def observed(
    call: StepCall, attempt: AttemptClaim, found: Sequence[PodStatus], status: str = "", exit_code: str = ""
) -> Observation:
    """What is known about the end of an attempt: what Argo told of its run node, and what its pods show."""
    if call.spec.gang is None:
        return pods.observation(found, status, exit_code)
    gang = gangs.as_started(call.spec.gang, attempt)
    made_by = _made_by(call, gang, attempt)
    if gang.min_members is None or made_by is None:
        return gangs.observation(gang, made_by, found, status)
    crash = find_record(call.store, call.layout.attempt_crash(attempt.step, attempt.attempt), CrashRecord)
    return elastic.elastic_observation(gang, gang.min_members, found, status, crashed=crash is not None)


def end_failed(call: StepCall, attempt: AttemptClaim, seen: Observation, unjudged: str = "") -> AttemptEnd:
    """Judge how an attempt failed and record it; the record that stands is answered.

    ``unjudged`` is said where nothing is known about the end.
    """
    preempted, left = report(call, attempt), crash(call, attempt)
    observed = heard(seen, left)
    verdict = classify(observed if preempted is None else as_it_ended(call, attempt, observed))
    cause = verdict.cause or Cause.UNKNOWN
    message = unjudged if unjudged and verdict.cause is None else verdict.evidence
    if preempted is not None:
        message = went(preempted) if cause is Cause.PREEMPTION else f"{message}; {went(preempted)}"
    return end(
        call,
        attempt,
        Outcome.FAILED,
        cause=cause,
        message=message,
        evidence=evidence(attempt, seen, verdict),
        exit_code=seen.known_exit_code,
        preempted=preempted,
        over_at=seen.at,
        crash=left,
    )


def never_ran(status: str) -> str:
    """What is said of a program that Argo did not start, and so has no end of its own."""
    return f"Argo did not start it ({status or 'no status'}), as it does while a workflow is stopping"


def end(
    call: StepCall,
    attempt: AttemptClaim,
    outcome: Outcome,
    *,
    cause: Cause | None = None,
    message: str = "",
    evidence: Evidence | None = None,
    exit_code: int | None = None,
    outputs: tuple[Output, ...] = (),
    preempted: Preemption | None = None,
    over_at: datetime | None = None,
    crash: CrashRecord | None = None,
) -> AttemptEnd:
    """Write the end record of ``attempt`` unless it has one, and release its GPUs.

    A failed end may bar the checkpoint that the attempt had loaded; see `poison`.
    ``crash`` is what its program left about its end.
    """
    newest, unreadable = _commits(call, attempt)
    wanted = AttemptEnd(
        run=attempt.run,
        step=attempt.step,
        attempt=attempt.attempt,
        submission=attempt.submission,
        outcome=outcome,
        cause=cause,
        message=message,
        evidence=evidence,
        exit_code=exit_code,
        progress=newest is not None or _noted_progress(call, attempt),
        progress_unknown=newest is None and unreadable,
        step_key=attempt.step_key,
        outputs=outputs,
        preempted=preempted,
        over_at=over_at,
        saved=Saved.of(newest) if newest else None,
    )
    wanted = judged(call, attempt, wanted, crash)
    failpoint("end.before_record")
    held = claim_record(call.store, call.layout.attempt_end(attempt.step, attempt.attempt), wanted)
    failpoint("end.after_record")
    if held.won:
        call.services.metrics.attempts_ended.labels(cause=cause.value if cause else outcome.value).inc()
        if preempted is not None:
            call.services.metrics.count_preemption(preempted)
    release(call, attempt)
    return held.record


def went_on(call: StepCall, attempt: AttemptClaim) -> str:
    """With how many of its nodes an attempt has ended that lost some; empty where it has lost none."""
    if call.spec.gang is None or call.spec.gang.min_members is None:
        return ""
    started = gangs.as_started(call.spec.gang, attempt)
    left = _members_left(call, started, attempt)
    return f", with {left} of its {started.members} nodes in the end" if left < started.members else ""


def _members_left(call: StepCall, gang: Gang, attempt: AttemptClaim) -> int:
    """By what it holds; without GPUs by what made its pods. Who is ended because all is done counts as left."""
    if attempt.lease:
        held = (one.request for one in call.services.ledger.snapshot().leases if one.id == attempt.lease)
        return next((request.members for request in held), gang.members)
    made_by = _made_by(call, gang, attempt)
    return gang.members if made_by is None or made_by.remaining is None else made_by.remaining


def release(call: StepCall, attempt: AttemptClaim) -> None:
    """Give the attempt's GPUs back, if it holds any and its pods are gone.

    One that was ended by force leaves its lease to the sweeps, see `lapses`: its GPUs may be in use.
    """
    if attempt.lease and not call.services.waits.gave_up(_pods_of(attempt)):
        call.services.ledger.release(attempt.lease)


def release_ended(call: StepCall, attempt: AttemptClaim) -> None:
    """The same for an attempt that has an end already, which another service may have given it."""
    if not attempt.lease:
        return
    found = pods.of_claim(call.store, call.services.cluster, attempt)
    if pods.living(found) is None and not _goes_on(call, attempt, found):
        call.services.ledger.release(attempt.lease)


def _pods_of(attempt: AttemptClaim) -> str:
    """What is waited for until they are gone."""
    return f"{attempt.run}/{attempt.step}/{attempt.attempt}"


def _commits(call: StepCall, attempt: AttemptClaim) -> Commits:
    """The checkpoints of the attempt; none where there are none, or none that can be seen from here."""
    seen = attempt.lineage and not call.volume
    return looked_up(call.store, attempt.lineage, attempt.attempt) if seen else Commits(None)


def _noted_progress(call: StepCall, attempt: AttemptClaim) -> bool:
    """Whether a program whose checkpoints lie on a volume has left a note that it committed one."""
    key = call.layout.progress(attempt.step, attempt.attempt)
    return bool(call.volume and attempt.lineage) and next(call.store.list(key), None) is not None
