"""Create one Workflow for one claimed submission, once, whatever dies in between.

The name is a function of run and submission, so a second create meets the first
object instead of making another. The binding is create-only: a Workflow that is
not the bound one is refused by its first admit.

Whose turn is it? Decides whether a run may be submitted again, and under which number.
"""

from typing import NamedTuple

from tiphys.errors import ConflictError
from tiphys.faults import failpoint
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.records import SubmissionBound, SubmissionClaim
from tiphys.store import RunLayout, Store, Submission, claim, find_record
from tiphys_controller.plan.prune import workflow_name
from tiphys_controller.submit.submitter import LiveWorkflow, Submitter, is_known


def check_free(store: Store, submitter: Submitter, namespace: str, run: str, submission: int) -> None:
    """Make sure, before a submission is claimed, that its Workflow will not meet a stranger's.

    Raises:
        ConflictError: an object of that name exists, and nobody has claimed the
            submission; whoever has is told by the claim.
    """
    name = workflow_name(run, submission)
    live = submitter.find(namespace, name)
    if live and find_record(store, RunLayout(run).submission(submission), SubmissionClaim) is None:
        raise ConflictError(
            f"cluster {submitter.cluster} already has a Workflow {namespace}/{name} (uid {live.uid}) that is no "
            "submission of this run; delete it, or choose another run name"
        )


def send(store: Store, submitter: Submitter, claimed: SubmissionClaim, manifest: Manifest, verb: str) -> LiveWorkflow:
    """Create the Workflow of a claimed submission and bind it. ``verb`` begins the names of the failpoints.

    Where nobody knows which cluster it went to, its first admit binds it, which does.

    Raises:
        ConflictError: another Workflow is bound to the submission already.
    """
    failpoint(f"{verb}.after_claim")
    live = _create(submitter, claimed, manifest)
    failpoint(f"{verb}.after_create")
    if is_known(submitter.cluster):
        bind(store, submitter.cluster, claimed, live)
    failpoint(f"{verb}.after_bind")
    return live


def find_created(store: Store, submitter: Submitter, claimed: SubmissionClaim) -> LiveWorkflow | None:
    """The Workflow that somebody created for a claim and died before they could bind it: bound now; None without one.

    Raises:
        ConflictError: another Workflow is bound to the submission already.
    """
    live = submitter.find(claimed.namespace, claimed.workflow_name)
    if live is not None and is_known(submitter.cluster):
        bind(store, submitter.cluster, claimed, live)
    return live


def bind(store: Store, cluster: str, claimed: SubmissionClaim, live: LiveWorkflow) -> SubmissionBound:
    """Record which object a submission became, and answer the record that holds.

    Raises:
        ConflictError: another Workflow is bound to the submission.
    """
    wanted = SubmissionBound(
        run=claimed.run,
        submission=claimed.submission,
        cluster=cluster,
        namespace=live.namespace,
        workflow_name=live.name,
        uid=live.uid,
    )
    held = claim(store, RunLayout(claimed.run).submission_bound(claimed.submission), wanted).record
    if held.uid != live.uid:
        raise ConflictError(
            f"submission {claimed.submission} of run {claimed.run} is Workflow {held.workflow_name} (uid {held.uid}) "
            f"in cluster {held.cluster}; {live.name} (uid {live.uid}) in cluster {cluster} will be refused: delete it"
        )
    return held


def _create(submitter: Submitter, claimed: SubmissionClaim, manifest: Manifest) -> LiveWorkflow:
    try:
        return submitter.create(manifest)
    except ConflictError:
        # A create whose reply was lost, or another controller that recovers the same submission.
        live = submitter.find(claimed.namespace, claimed.workflow_name)
        if live is None:
            raise
        return live


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
