"""Go on with a run from storage alone: fence, claim the next submission, create its Workflow, bind it.

Takes unfinished attempts away from whoever may still hold them.

An end record is create-only, so a fence and a late finish cannot both count:
whoever writes the end first decides.

What is asked of a resume beyond doing what is missing, and whether a claim that was never sent says the same.

The record of a resume: the claim of its submission, before anything is sent, and what is told of it afterwards.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tiphys.errors import ConflictError
from tiphys.faults import failpoint
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.records import AttemptClaim, AttemptEnd, Event, Outcome, SubmissionClaim, SubmissionKind
from tiphys.store import RunLayout, Store, append_events, claim, read_record
from tiphys_controller.plan.decide import check_volumes
from tiphys_controller.plan.drift import gate, in_words
from tiphys_controller.plan.prune import Identity, prune, workflow_name
from tiphys_controller.plan.step_state import EndKey
from tiphys_controller.submit.idempotency import key_digest
from tiphys_controller.submit.plan_report import PlanReport, report_of
from tiphys_controller.submit.planner import Change, Planned, check_intact, planned, workflow_record
from tiphys_controller.submit.start import first_kind
from tiphys_controller.submit.submission import Turn, check_free, cluster_of, find_created, next_turn, place, send
from tiphys_controller.submit.submitter import LiveWorkflow, Submitter


def fence(store: Store, run: str, attempts: Sequence[EndKey]) -> list[AttemptEnd]:
    """End each attempt as fenced, unless somebody has ended it first; answers what each end says now."""
    return [_fence(store, RunLayout(run), *attempt) for attempt in attempts]


def _fence(store: Store, layout: RunLayout, step: str, attempt: int) -> AttemptEnd:
    claimed = read_record(store, layout.attempt(step, attempt), AttemptClaim)
    wanted = AttemptEnd(
        run=layout.run,
        step=step,
        attempt=attempt,
        submission=claimed.submission,
        outcome=Outcome.FENCED,
        message="fenced by a resume of the run",
        step_key=claimed.step_key,
    )
    return claim(store, layout.attempt_end(step, attempt), wanted).record


class Order(NamedTuple):
    """``again`` are steps to run again, ``key`` is the digest of an idempotency key; both may be empty.

    ``workflow`` is the digest of another Workflow to go on with; None for none.
    """

    again: tuple[str, ...] = ()
    key: str = ""
    workflow: str | None = None

    def is_met_by(self, claimed: SubmissionClaim) -> bool:
        """Whether a submission does what is asked; who asks for nothing but a resume is content with any."""
        return self.again in ((), claimed.again) and self.workflow in (None, claimed.workflow)

    def check(self, turn: Turn, force: bool) -> Turn:
        """``turn``, if the submission that it is to send says what is asked; with ``force`` else the number behind it.

        What was passed over is fenced by the newer claim, even if its Workflow is created late.

        Raises:
            ConflictError: it was claimed for something else.
        """
        claimed = turn.claimed
        if claimed is None or self.is_met_by(claimed):
            return turn
        if force:
            return Turn(claimed.submission + 1, claimed.namespace)
        raise ConflictError(
            f"submission {claimed.submission} of run {claimed.run} was claimed and never sent, and it is to run "
            f"{', '.join(claimed.steps)} and not what is asked now; `tiphys resume {claimed.run}` sends it, "
            "--force passes it over"
        )


def take(store: Store, submitter: Submitter, found: Planned, order: Order, turn: Turn) -> SubmissionClaim:
    """Claim the next submission of a run; it says all that is asked of it.

    Raises:
        ConflictError: somebody else was faster, and who.
    """
    record, before = found.state.record, found.last.claim if found.last else None
    run, since = record.run, before.fresh_since if before else dict.fromkeys(record.fresh, 1)
    wanted = SubmissionClaim(
        run=run,
        submission=turn.submission,
        kind=SubmissionKind.RESUME if turn.submission > 1 else first_kind(record),
        workflow_name=workflow_name(run, turn.submission),
        namespace=turn.namespace,
        cluster=submitter.cluster,
        steps=found.plan.running,
        again=found.again,
        fresh_since={**since, **dict.fromkeys(found.fresh, turn.submission)},
        workflow=order.workflow if order.workflow is not None else before.workflow if before else "",
        key=order.key,
    )
    held, won = claim(store, RunLayout(run).submission(turn.submission), wanted)
    if not won:
        raise ConflictError(
            f"somebody else resumes run {run}: submission {turn.submission} was claimed at {held.written_at:%H:%M:%S} "
            f"UTC for cluster {held.cluster or 'unknown'} as Workflow {held.namespace}/{held.workflow_name}"
        )
    return wanted


def resumed_event(found: Planned, claimed: SubmissionClaim, live: LiveWorkflow, fenced: tuple[str, ...]) -> Event:
    """What is told of a resume, for people and for dashboards."""
    running = found.plan.running
    skipped = [task.name for task in found.plan.tasks if task.name not in running]
    message = f"submission {claimed.submission} runs {', '.join(running)}"
    if skipped:
        message += f"; finished before: {', '.join(skipped)}"
    if found.drift:
        message += f"; changed: {', '.join(dict.fromkeys(one.drift.value for one in found.drift))}"
    if claimed.again:
        message += f"; asked to run again: {', '.join(claimed.again)}"
    data = {
        "submission": claimed.submission,
        "workflow": live.name,
        "run": list(running),
        "skipped": skipped,
        "fenced": list(fenced),
        "again": list(claimed.again),
        "drift": [in_words(one) for one in found.drift],
    }
    return Event(name="run.resumed", message=message, data=data)


class Resumed(NamedTuple):
    """What a resume did. ``submission`` is None where nothing was submitted."""

    run: str
    plan: PlanReport
    submission: int | None = None
    workflow_name: str = ""
    uid: str = ""
    fenced: tuple[str, ...] = ()
    """Attempts taken away from the submission before, as ``step/attempt``."""
    created: bool = True
    """False where an earlier call under the same key had submitted it."""


def resume(
    store: Store,
    submitter: Submitter,
    run: str,
    force: bool = False,
    dry_run: bool = False,
    namespace: str = "",
    again: Sequence[str] = (),
    key: str = "",
    change: Change | None = None,
) -> Resumed:
    """Submit what is missing of a run, once.

    Nothing is submitted where nothing is missing. After a crash between claim
    and create, the claimed number is used and not another.

    Args:
        store: Where the run is kept.
        submitter: Where the next Workflow goes.
        run: Name of the run.
        force: Go on although the last submission may still be running.
        dry_run: Plan and prune, and write nothing.
        namespace: Where a Workflow goes that is the first of the run in this cluster;
            empty: as recorded.
        again: Steps that run again although they are done, and with them all that hang on them.
        key: Idempotency key: calls under one key make one submission, and all answer it.
        change: Another Workflow to go on with; None: what the last submission was made of.

    Raises:
        NotFoundError: there is no such run.
        UsageError: the run cannot be pruned, and why; there is no such step; the key is not valid.
        ConflictError: it is still running, or somebody else resumes it, or something has changed that may not.
        IntegrityError: a record is damaged.
    """
    found = planned(store, run, again, change)
    check_volumes(found.pipeline, found.fresh)
    order = Order(tuple(again), key_digest(key) if key else "", _other_workflow(found, change))
    if done := _done_before(store, found, order):
        return done
    try:
        return _resume(store, submitter, found, _Asked(order, change, force, dry_run, namespace))
    except ConflictError:
        # Somebody with the same key may have been a moment faster.
        if order.key and (done := _done_before(store, planned(store, run), order)):
            return done
        raise


class _Asked(NamedTuple):
    """All that a resume is told beside the run."""

    order: Order
    change: Change | None
    force: bool
    dry_run: bool
    namespace: str


def _other_workflow(found: Planned, change: Change | None) -> str | None:
    """Digest of the Workflow to go on with, empty for that of ``run.json``; None where nobody gave one."""
    if change is None or change.workflow is None:
        return None
    wanted = workflow_record(found.state.record, change.workflow).digest
    return "" if wanted == found.state.record.digest else wanted


def _done_before(store: Store, found: Planned, order: Order) -> Resumed | None:
    """What a call under the same key has submitted, if that was sent or another one follows it."""
    for one in found.state.submissions if order.key else ():
        if one.claim.key == order.key and (one.bound or one is not found.last):
            uid = one.bound.uid if one.bound else ""
            plan = report_of(found, store.url)
            return Resumed(
                found.state.record.run, plan, one.claim.submission, one.claim.workflow_name, uid, created=False
            )
    return None


def _resume(store: Store, submitter: Submitter, found: Planned, asked: _Asked) -> Resumed:
    run, order = found.state.record.run, asked.order
    if not found.plan.running:
        return Resumed(run, report_of(found, store.url))
    # What cannot be pruned must be refused before anything is written.
    _pruned(store, found, Turn(len(found.state.submissions) + 1, "default"))
    if asked.dry_run:
        return Resumed(run, report_of(found, store.url))
    check_intact(found.state.record)
    gate(found.drift, run, forking=False)
    if recovered := _recover(store, submitter, found, order):
        number = found.state.submissions[-1].claim.submission
        return Resumed(run, report_of(found, store.url), number, recovered.name, recovered.uid)
    turn = _take_turn(store, submitter, found, asked)
    fenced = fence(store, run, found.state.unfinished)
    failpoint("resume.after_fence")
    if any(end.outcome is Outcome.DONE for end in fenced):
        found = planned(store, run, order.again, asked.change)
        if not found.plan.running:
            return Resumed(run, report_of(found, store.url))
    if asked.change is not None and asked.change.workflow is not None and order.workflow:
        record = workflow_record(found.state.record, asked.change.workflow)
        claim(store, RunLayout(run).workflow(record.digest), record)
        failpoint("resume.after_workflow")
    claimed = turn.claimed or take(store, submitter, found, order, turn)
    live = send(store, submitter, claimed, _pruned(store, found, turn), "resume")
    taken = tuple(f"{end.step}/{end.attempt}" for end in fenced if end.outcome is Outcome.FENCED)
    append_events(store, run, "controller", [resumed_event(found, claimed, live, taken)])
    return Resumed(run, report_of(found, store.url), claimed.submission, live.name, live.uid, taken)


def _recover(store: Store, submitter: Submitter, found: Planned, order: Order) -> LiveWorkflow | None:
    """Bind a Workflow that was created by somebody who died before they could; None if there is none that runs.

    Neither is there one where something else is asked than it does: it runs, and so has to end first.
    """
    last = found.last
    if last is None or last.bound or cluster_of(last) not in ("", submitter.cluster):
        return None
    live = find_created(store, submitter, last.claim)
    return live if live and live.running and order.is_met_by(last.claim) else None


def _take_turn(store: Store, submitter: Submitter, found: Planned, asked: _Asked) -> Turn:
    last = found.last
    live = submitter.find(*place(last)) if last else None
    recorded = (found.state.record.workflow.get("metadata") or {}).get("namespace") or "default"
    turn = next_turn(last, live, submitter.cluster, asked.namespace or recorded, asked.force)
    turn = asked.order.check(turn, asked.force)
    if turn.claimed is None:
        check_free(store, submitter, turn.namespace, found.state.record.run, turn.submission)
    return turn


def _pruned(store: Store, found: Planned, turn: Turn) -> Manifest:
    run = found.state.record.run
    name = turn.claimed.workflow_name if turn.claimed else workflow_name(run, turn.submission)
    return prune(found.pipeline, found.plan, store.artifact_key, Identity(run, turn.submission, name, turn.namespace))
