"""Checks of the Workflow object itself: its size, and its schedule. Each is pure."""

from collections.abc import Iterator

from hera_pipelines.compile.workflow_size import MAX_WORKFLOW_BYTES, estimate_size, size_warning
from hera_pipelines.preflight.finding import PreflightFinding, passed, problem, warning
from hera_pipelines.preflight.subject import PreflightSubject

_NEAR = 0.8


def check_size(subject: PreflightSubject) -> Iterator[PreflightFinding]:
    """The Workflow with all its nodes fits into one object, with room for retries."""
    manifest = subject.pipeline.manifest
    size = estimate_size(manifest)
    if sentence := size_warning(manifest):
        what, _, remedy = sentence.partition(": ")
        yield warning("size", what, remedy)
    elif size.bytes > _NEAR * MAX_WORKFLOW_BYTES:
        yield warning(
            "size",
            f"the Workflow will have some {size.nodes:,} nodes and {size.bytes:,} bytes without retries, and Argo "
            f"stores at most {MAX_WORKFLOW_BYTES:,} in one object",
            "start fewer items per run, or configure Argo's node status offloading; see docs/install.md#large-runs",
        )
    else:
        yield passed("size", f"some {size.nodes:,} nodes and {size.bytes:,} bytes, of {MAX_WORKFLOW_BYTES:,}")


def check_schedule(subject: PreflightSubject) -> Iterator[PreflightFinding]:
    """The schedule of the pipeline can be applied."""
    if subject.schedule_complaint:
        what, _, remedy = subject.schedule_complaint.rpartition("; ")
        yield problem("schedule", what or remedy, remedy if what else "")
