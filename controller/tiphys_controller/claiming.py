"""The record of a resume: the claim of its submission, before anything is sent, and what is told of it afterwards."""

from tiphys.errors import ConflictError
from tiphys.records import Event, SubmissionClaim, SubmissionKind
from tiphys.store import RunLayout, Store, claim
from tiphys_controller.drifting import in_words
from tiphys_controller.identity import workflow_name
from tiphys_controller.order import Order
from tiphys_controller.planning import Planned
from tiphys_controller.starting import first_kind
from tiphys_controller.submitter import LiveWorkflow, Submitter
from tiphys_controller.turns import Turn


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
