"""Records what a submission takes over, and what the Workflow before it has left unrecorded."""

from collections.abc import Mapping

from tiphys.errors import StoreError, TiphysError
from tiphys.faults import failpoint
from tiphys.protocol.fan_out import step_display_name
from tiphys.protocol.workflow_nodes import are_nodes_offloaded, read_nodes
from tiphys.recording import WorkflowRecorder
from tiphys.recording.reusable_results import describe_reuse, record_reuse
from tiphys.recording.run_binding import read_binding
from tiphys.records import AttemptEnd, Event
from tiphys.store import Store, Submission, append_events
from tiphys_controller.submit.submission import locate_workflow, submission_cluster
from tiphys_controller.submit.submitter import Submitter


def record_takeovers(store: Store, run: str, submission: int, taken_over: Mapping[str, AttemptEnd]) -> None:
    """Record the results that a submission takes over, by step id, before its Workflow exists."""
    events = []
    for step, end in sorted(taken_over.items()):
        reuse = record_reuse(store, run, submission, step, end)
        failpoint("takeover.after_record")
        if reuse.is_ours:
            message = f"{step_display_name(step, None)} was not run: {describe_reuse(reuse.record)}"
            events.append(Event(name="step.adopted", step=step, message=message))
    append_events(store, run, "controller", events)


def record_live_workflow(store: Store, submitter: Submitter, run: str, last: Submission | None) -> None:
    """Record the steps without a gate that the Workflow of ``last`` shows and that nobody has recorded.

    Steps that cannot be recorded, such as those of a Workflow that is gone, run again.

    Raises:
        StoreError: storage did not answer.
    """
    if last is None or last.binding is None or submission_cluster(last) != submitter.cluster:
        return
    workflow = submitter.read(*locate_workflow(last))
    if workflow is None or workflow["metadata"].get("uid") != last.binding.uid or are_nodes_offloaded(workflow):
        return
    recorder = WorkflowRecorder(store, read_binding(store, last.binding))
    try:
        recorder.record(workflow, read_nodes(workflow))
    except StoreError:
        raise
    except TiphysError as error:
        import structlog  # takes as long as all else that `tiphys plan` imports

        log = structlog.get_logger()
        log.warning("steps.unrecorded", run=run, workflow=last.binding.workflow_name, error=str(error))
