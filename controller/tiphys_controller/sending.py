"""Create one Workflow for one claimed submission, once, whatever dies in between.

The name is a function of run and submission, so a second create meets the first
object instead of making another. The binding is create-only: a Workflow that is
not the bound one is refused by its first admit.
"""

from tiphys.errors import ConflictError
from tiphys.faults import failpoint
from tiphys.protocol.pipeline import Manifest
from tiphys.records import SubmissionBound, SubmissionClaim
from tiphys.store import RunLayout, Store, claim, find_record
from tiphys_controller.identity import workflow_name
from tiphys_controller.submitter import LiveWorkflow, Submitter, is_known


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
