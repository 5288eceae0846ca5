"""In which phase is a run? Storage knows how a submission ended only if the Workflow lived to say so.

What is not known is called unknown, with the reason. Whoever can see the
cluster, such as the local engine, makes more of it known.
"""

from enum import StrEnum
from typing import NamedTuple

from tiphys.store import Submission
from tiphys_controller.submitter import LiveWorkflow
from tiphys_controller.turns import cluster_of


class Phase(StrEnum):
    """Of a run, which is more than one Workflow."""

    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    INTERRUPTED = "Interrupted"
    """It does not run, and never said that it ended."""
    UNKNOWN = "Unknown"


class Seen(NamedTuple):
    """What the cluster at hand says of the last submission.

    ``visible`` is False where the submission went to another cluster, or none
    was asked.
    """

    visible: bool
    live: LiveWorkflow | None = None


def phase_of(last: Submission | None, seen: Seen) -> tuple[Phase, str]:
    """The phase of a run and the reason in words. ``last`` is its last submission."""
    if last is None:
        return Phase.INTERRUPTED, "recorded and never submitted"
    number = last.claim.submission
    if seen.live and seen.live.running:
        return Phase.RUNNING, f"submission {number} is Workflow {seen.live.name} ({seen.live.phase})"
    if last.end:
        return _sealed(last.end.status, number, last.end.message)
    if not seen.visible:
        where = f"cluster {cluster_of(last)}" if cluster_of(last) else "a cluster nobody wrote down"
        return Phase.UNKNOWN, f"submission {number} went to {where} and has not said that it ended"
    if seen.live is None:
        return Phase.INTERRUPTED, f"Workflow {last.claim.workflow_name} is gone, and never said how it ended"
    if seen.live.phase in ("Succeeded", "Failed", "Error"):
        return _sealed(seen.live.phase, number, "")
    return Phase.INTERRUPTED, f"Workflow {seen.live.name} stands at {seen.live.phase}, and nothing runs it any more"


def _sealed(status: str, number: int, message: str) -> tuple[Phase, str]:
    phase = Phase.SUCCEEDED if status == "Succeeded" else Phase.FAILED
    return phase, f"submission {number} {status.lower()}{f': {message}' if message else ''}"
