"""Whose turn is it? Decides whether a run may be submitted again, and under which number."""

from typing import NamedTuple

from tiphys.errors import ConflictError
from tiphys.records import SubmissionClaim
from tiphys.store import Submission
from tiphys_controller.submitter import LiveWorkflow, is_known


class Turn(NamedTuple):
    """The next submission. ``claimed`` is set if its number was claimed before and never sent."""

    submission: int
    namespace: str
    claimed: SubmissionClaim | None = None


def place(last: Submission) -> tuple[str, str]:
    """(namespace, name) of the Workflow of a submission."""
    if last.bound:
        return last.bound.namespace, last.bound.workflow_name
    return last.claim.namespace, last.claim.workflow_name


def next_turn(last: Submission | None, live: LiveWorkflow | None, cluster: str, namespace: str, force: bool) -> Turn:
    """The next submission of a run.

    Args:
        last: Its last submission; None before the first.
        live: What `place` of that submission holds in ``cluster``; None for nothing.
        cluster: Where the next one would go; of a mere address (`is_known`) nothing is concluded but from a uid.
        namespace: Namespace of a first submission, and of the first one in this cluster.
        force: Go on although the last one may still be running.

    Raises:
        ConflictError: the last one runs, or may run where nobody can see it.
    """
    if last is None:
        return Turn(1, namespace)
    elsewhere = _elsewhere(last, live, cluster)
    after = Turn(last.claim.submission + 1, namespace if elsewhere else last.claim.namespace)
    if force and (live is not None or elsewhere):
        return after
    if elsewhere:
        if last.end:
            return after
        raise ConflictError(_out_of_sight(last, cluster))
    if last.bound is None and live is None:
        return Turn(last.claim.submission, last.claim.namespace, last.claim)
    if live and live.running and (last.bound is None or live.uid == last.bound.uid):
        raise ConflictError(
            f"run {last.claim.run} is still running: submission {last.claim.submission} is Workflow "
            f"{live.namespace}/{live.name} ({live.phase}) in cluster {cluster}; wait for it, stop it, "
            "or take its work away from it with --force"
        )
    return after


def cluster_of(last: Submission) -> str:
    """Where a submission went, or was to go; empty where nobody wrote it down."""
    return last.bound.cluster if last.bound else last.claim.cluster


def _elsewhere(last: Submission, live: LiveWorkflow | None, cluster: str) -> bool:
    """Whether the submission may be where ``cluster`` does not show it.

    A uid is that of one object, whatever its cluster is called: who shows it, shows the submission.
    """
    if last.bound and live and live.uid == last.bound.uid:
        return False
    return not is_known(cluster) or cluster_of(last) not in ("", cluster)


def _out_of_sight(last: Submission, cluster: str) -> str:
    namespace, name = place(last)
    held = cluster_of(last)
    return (
        f"run {last.claim.run} may still be running: submission {last.claim.submission} went to cluster {held} as "
        f"Workflow {namespace}/{name} and never said that it ended; from cluster {cluster} nobody can tell. "
        "Resume there, or take its work away from it with --force"
    )
