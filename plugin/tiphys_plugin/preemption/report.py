"""What a preemption has cost, written into the end of the attempt that went."""

from dataclasses import replace

from tiphys.lineage.classify import Observation
from tiphys.lineage.newest import newest_commit
from tiphys.records import AttemptClaim, CrashRecord, Preemption
from tiphys.store import find_record
from tiphys_plugin.preemption.loss import seconds_since
from tiphys_plugin.services import StepCall


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
