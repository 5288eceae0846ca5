"""Carries out what was decided: the decision is recorded first, so that every try is counted, also one that dies."""

from tiphys.faults import failpoint
from tiphys.records import AutomaticResume, RunRecord
from tiphys.store import RunLayout, Store, claim, find_record, submissions
from tiphys_controller.automatic.decide import Decision
from tiphys_controller.automatic.observed import Observed
from tiphys_controller.forking import fork
from tiphys_controller.resuming import Resumed, resume
from tiphys_controller.submitter import ClusterSubmitter, Submitter
from tiphys_controller.turns import place


def intend(store: Store, seen: Observed, decision: Decision, alert: str = "") -> None:
    """Record that the next submission is about to be made; whoever finds the record goes on."""
    record = AutomaticResume(
        run=seen.run,
        submission=seen.next_submission,
        reason=decision.message,
        cause=seen.cause,
        alert=alert,
        advance=seen.advance,
    )
    claim(store, RunLayout(seen.run).automatic(seen.next_submission), record)
    failpoint("automatic.after_intent")


def resume_by_itself(
    store: Store, submitter: Submitter, seen: Observed, decision: Decision, alert: str = ""
) -> Resumed:
    """Resume a run as `decision` says, at most once whoever else does.

    Raises:
        ConflictError: somebody else has, or it runs after all.
        UsageError: it cannot be pruned.
    """
    if not seen.intended:
        intend(store, seen, decision, alert)
    return resume(store, submitter, seen.run)


def stop_workflow(store: Store, submitter: ClusterSubmitter, run: str) -> None:
    """Have the Workflow of the last submission end, so that its programs save."""
    last = submissions(store, run)[-1]
    live = submitter.find(*place(last))
    if live is not None and live.running and (last.bound is None or live.uid == last.bound.uid):
        submitter.stop(live)


def fork_by_itself(store: Store, submitter: Submitter, run: str, name: str) -> None:
    """Begin the run ``name`` from what ``run`` has, or finish what somebody has begun who died.

    Raises:
        ConflictError: something has changed that may not.
    """
    if find_record(store, RunLayout(name).record, RunRecord) is None:
        fork(store, submitter, run, name)
        return
    sent = submissions(store, name)
    if not sent or sent[-1].bound is None:
        resume(store, submitter, name)
