"""Records the steps that run without a gate, by who watches their Workflow.

The controller records a step when its node changes, finalize and admit what they need,
and a resume what all of them have lost. All write the same create-only records, so that
it does not matter which of them is first, nor how often a step is recorded.
"""

from tiphys.recording.recorder import RecordedSteps, WorkflowRecorder
from tiphys.recording.run_binding import RunBinding, WorkflowReader, bind_workflow, submitted_manifest

__all__ = ["RecordedSteps", "RunBinding", "WorkflowReader", "WorkflowRecorder", "bind_workflow", "submitted_manifest"]
