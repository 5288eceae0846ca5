"""Ends the open attempts of a run, so that none of their pods can commit any more.

An attempt that its Workflow left open is ended by what is known about the end of this Workflow.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from tiphys.errors import ObjectMissingError
from tiphys.lineage.select import read_newest_commit
from tiphys.protocol.compiled_workflow import is_shutdown_message
from tiphys.records import AttemptClaim, AttemptEnd
from tiphys.records.attempt import STOPPED_MESSAGE
from tiphys.store import RunLayout, Store, Submission, fence_attempt, find_record
from tiphys_controller.plan.step_state import AttemptId
from tiphys_controller.submit.submitter import LiveWorkflow


class WorkflowEnd(NamedTuple):
    """The end of a Workflow that is known not to run any more."""

    at: datetime | None
    """None if unknown, as of a Workflow that was deleted."""
    stopped: bool
    """Whether a person stopped it."""


def find_workflow_end(last: Submission | None, live: LiveWorkflow | None, *, force: bool) -> WorkflowEnd | None:
    """The end of the Workflow of a submission; None if it runs, or may run where it is not visible.

    ``live`` is its Workflow in the cluster of the resume; None if there is none. ``force``: it may run although it is
    not visible.
    """
    if last is not None and last.end is not None:
        return WorkflowEnd(last.end.written_at, is_shutdown_message(last.end.message))
    if live is not None and not live.running:
        return WorkflowEnd(live.finished_at, live.stopped)
    return WorkflowEnd(None, False) if live is None and not force else None


def fence_attempts(
    store: Store, run: str, attempts: Sequence[AttemptId], workflow_end: WorkflowEnd | None = None
) -> list[AttemptEnd]:
    """End each attempt as fenced, unless it has an end; answers the ends that the attempts have now.

    Their programs ended with the Workflow: no later than its end, no earlier than their newest checkpoints.

    ``workflow_end`` is None if their Workflow may still run.

    Raises:
        ObjectMissingError: a claim is gone since it was listed. The attempt may still run, and nothing would fence it.
    """
    ends = []
    for step, attempt in attempts:
        end = _fence_attempt(store, run, step, attempt, workflow_end)
        if end is None:
            raise ObjectMissingError(
                f"{store.url}: {RunLayout(run).attempt(step, attempt)} is gone since it was listed, so attempt "
                f"{attempt} of {step} cannot be fenced; restore the object, or begin a new run"
            )
        ends.append(end)
    return ends


def _fence_attempt(
    store: Store, run: str, step: str, attempt: int, workflow_end: WorkflowEnd | None
) -> AttemptEnd | None:
    if workflow_end is None:
        return fence_attempt(store, run, step, attempt, "fenced by a resume of the run")
    claim = find_record(store, RunLayout(run).attempt(step, attempt), AttemptClaim)
    newest = read_newest_commit(store, claim.lineage, attempt) if claim and claim.lineage else None
    signs = [
        moment
        for moment in (
            claim.written_at if claim else None,
            newest.written_at if newest else None,
            workflow_end.at,
        )
        if moment
    ]
    return fence_attempt(
        store,
        run,
        step,
        attempt,
        STOPPED_MESSAGE if workflow_end.stopped else "lost with its workflow, which recorded no end of it",
        stopped=workflow_end.stopped,
        last_alive_at=max(signs, default=None),
    )
