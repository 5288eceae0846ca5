"""Checks of the Workflow object itself: its size, and its schedule. Each is pure."""

from collections.abc import Iterator

from tiphys_controller.doctor.check import Finding, check, failed, passed, warning

from hera_pipelines.compile.workflow_size import MAX_WORKFLOW_BYTES, estimate_size, size_warning
from hera_pipelines.preflight.subject import PreflightSubject

_NEAR = 0.8


@check("size")
def check_size(subject: PreflightSubject) -> Iterator[Finding]:
    """The Workflow with all its nodes fits into one object, with room for retries."""
    manifest = subject.pipeline.manifest
    size = estimate_size(manifest)
    if sentence := size_warning(manifest):
        what, _, remedy = sentence.partition(": ")
        yield warning(what, remedy)
    elif size.bytes > _NEAR * MAX_WORKFLOW_BYTES:
        yield warning(
            f"the Workflow will have some {size.nodes:,} nodes and {size.bytes:,} bytes without retries, and Argo "
            f"stores at most {MAX_WORKFLOW_BYTES:,} in one object",
            "start fewer items per run, or configure Argo's node status offloading; see docs/install.md#large-runs",
        )
    else:
        yield passed(f"some {size.nodes:,} nodes and {size.bytes:,} bytes, of {MAX_WORKFLOW_BYTES:,}")


@check("schedule")
def check_schedule(subject: PreflightSubject) -> Iterator[Finding]:
    """The schedule of the pipeline can be applied."""
    if subject.schedule_complaint:
        what, _, remedy = subject.schedule_complaint.rpartition("; ")
        yield failed(what or remedy, remedy if what else "")
