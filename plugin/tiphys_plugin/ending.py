"""End an attempt: write its one end record, then give its GPUs back.

In this order, because a lease without an end is found and released by a sweep,
whereas an attempt whose GPUs went to somebody else while it counts as live is
found by nobody.
"""

from collections.abc import Sequence
from datetime import datetime

from tiphys.faults import failpoint
from tiphys.lineage.classify import Observation, classify
from tiphys.lineage.newest import Commits, looked_up
from tiphys.protocol.gang import Gang, gang_name
from tiphys.protocol.wire import ExecuteReply, pending
from tiphys.records import (
    AttemptClaim,
    AttemptEnd,
    Cause,
    CrashRecord,
    Evidence,
    Outcome,
    Output,
    Preemption,
    Saved,
)
from tiphys.store import claim as claim_record
from tiphys.store import find_record
from tiphys_plugin import account, elastic, gangs, pods, poison
from tiphys_plugin.cluster import GangStatus, PodStatus
from tiphys_plugin.pacing import requeue_seconds
from tiphys_plugin.preemption.report import as_it_ended, report
from tiphys_plugin.preemption.words import went
from tiphys_plugin.services import StepCall

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
    preempted, left = report(call, attempt), account.crash(call, attempt)
    heard = account.heard(seen, left)
    verdict = classify(heard if preempted is None else as_it_ended(call, attempt, heard))
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
        evidence=account.evidence(attempt, seen, verdict),
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
    wanted = poison.judged(call, attempt, wanted, crash)
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
