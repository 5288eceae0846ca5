"""Creates one Workflow for one claimed submission, and chooses the next submission.

The name of a Workflow is a function of run and submission, so a second create
meets the first object. The binding is create-only: the first admit of a
Workflow that is not the bound one refuses it. A run is submitted again only if
its last Workflow is known not to run, or with force.
"""

from typing import NamedTuple

from tiphys.errors import ConflictError
from tiphys.faults import failpoint
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.records import SubmissionBinding, SubmissionClaim, SubmissionEnd, utc_now
from tiphys.records.names import LOCAL_CLUSTER_PREFIX
from tiphys.store import RunLayout, Store, Submission, claim_record, find_record
from tiphys_controller.plan.prune import workflow_name
from tiphys_controller.submit.submitter import LiveWorkflow, Submitter, is_stable_cluster_name

_STALLED_SECONDS = 5.0
"""Age of a claim from which on its sender looks whether others have dealt with it: most are sent at once."""


def check_workflow_name_free(store: Store, submitter: Submitter, namespace: str, run: str, submission: int) -> None:
    """Check, before a submission is claimed, that the name of its Workflow is free.

    Raises:
        ConflictError: an object of that name exists, and the submission is not
            claimed. For a claimed submission the claim itself reports the conflict.
    """
    name = workflow_name(run, submission)
    live = submitter.find(namespace, name)
    if live and find_record(store, RunLayout(run).submission(submission), SubmissionClaim) is None:
        raise ConflictError(
            f"cluster {submitter.cluster} already has a Workflow {namespace}/{name} (uid {live.uid}) that is no "
            "submission of this run; delete it, or choose another run name"
        )


def create_and_bind(
    store: Store, submitter: Submitter, claimed: SubmissionClaim, manifest: Manifest, verb: str
) -> LiveWorkflow:
    """Create the Workflow of a claimed submission and bind it. ``verb`` prefixes the names of the failpoints.

    A submitter that knows only an address cannot name the cluster; then the first admit binds the Workflow.

    Raises:
        ConflictError: another Workflow is bound to the submission.
    """
    failpoint(f"{verb}.after_claim")
    live = _create_workflow(store, submitter, claimed, manifest)
    failpoint(f"{verb}.after_create")
    if is_stable_cluster_name(submitter.cluster):
        bind_submission(store, submitter.cluster, claimed, live)
    failpoint(f"{verb}.after_bind")
    return live


def recover_created_workflow(store: Store, submitter: Submitter, claimed: SubmissionClaim) -> LiveWorkflow | None:
    """Find and bind the Workflow of a claim whose creator crashed before binding it; None without one.

    Raises:
        ConflictError: another Workflow is bound to the submission.
    """
    live = submitter.find(claimed.namespace, claimed.workflow_name)
    if live is not None and is_stable_cluster_name(submitter.cluster):
        bind_submission(store, submitter.cluster, claimed, live)
    return live


def bind_submission(store: Store, cluster: str, claimed: SubmissionClaim, workflow: LiveWorkflow) -> SubmissionBinding:
    """Record the Workflow object of a submission, and return the record that holds.

    Raises:
        ConflictError: another Workflow is bound to the submission.
    """
    binding = SubmissionBinding(
        run=claimed.run,
        submission=claimed.submission,
        cluster=cluster,
        namespace=workflow.namespace,
        workflow_name=workflow.name,
        uid=workflow.uid,
    )
    existing = claim_record(store, RunLayout(claimed.run).submission_binding(claimed.submission), binding).record
    if existing.uid != workflow.uid:
        raise ConflictError(
            f"submission {claimed.submission} of run {claimed.run} is Workflow {existing.workflow_name} "
            f"(uid {existing.uid}) in cluster {existing.cluster}; {workflow.name} (uid {workflow.uid}) in cluster "
            f"{cluster} will be refused: delete it"
        )
    return existing


def _check_unsent(store: Store, claimed: SubmissionClaim) -> None:
    """Raise `ConflictError` if others have sent or ended the submission since its claim."""
    bound = find_record(store, RunLayout(claimed.run).submission_binding(claimed.submission), SubmissionBinding)
    if bound is not None:
        raise ConflictError(
            f"submission {claimed.submission} of run {claimed.run} is Workflow {bound.workflow_name} (uid "
            f"{bound.uid}) in cluster {bound.cluster}, which another process has sent meanwhile and which is not "
            "found; nothing was created"
        )
    if find_record(store, RunLayout(claimed.run).submission_end(claimed.submission), SubmissionEnd) is not None:
        raise ConflictError(
            f"submission {claimed.submission} of run {claimed.run} has ended before it was sent, because all steps "
            "were done; nothing was created"
        )


def _create_workflow(store: Store, submitter: Submitter, claimed: SubmissionClaim, manifest: Manifest) -> LiveWorkflow:
    try:
        # Kubernetes has no create that depends on a record, so a process that stands still right here creates a second
        # Workflow, and the binding refuses that.
        if abs((utc_now() - claimed.written_at).total_seconds()) > _STALLED_SECONDS:
            _check_unsent(store, claimed)
        return submitter.create(manifest)
    except ConflictError:
        # The reply of a create was lost, or another controller recovers the same submission.
        live = submitter.find(claimed.namespace, claimed.workflow_name)
        if live is None:
            raise
        return live


def is_bound_workflow(submission: Submission, live: LiveWorkflow) -> bool:
    """Whether ``live``, found under the submission's name, is its Workflow; before the binding the name decides."""
    return submission.binding is None or live.uid == submission.binding.uid


class NextSubmission(NamedTuple):
    """The next submission. ``unsent_claim`` is its claim, if it was claimed and its Workflow never created."""

    submission: int
    namespace: str
    unsent_claim: SubmissionClaim | None = None


def locate_workflow(submission: Submission) -> tuple[str, str]:
    """(namespace, name) of the Workflow of a submission."""
    if submission.binding:
        return submission.binding.namespace, submission.binding.workflow_name
    return submission.claim.namespace, submission.claim.workflow_name


def find_workflow(submitter: Submitter, submission: Submission) -> LiveWorkflow | None:
    """The live Workflow of a submission; None if there is none, or if a local engine ran it on another machine."""
    if submission_cluster(submission).startswith(LOCAL_CLUSTER_PREFIX) and submission_cluster(submission) != (
        submitter.cluster
    ):
        return None
    return submitter.find(*locate_workflow(submission))


def choose_next_submission(
    last: Submission | None,
    live: LiveWorkflow | None,
    cluster: str,
    namespace: str,
    force: bool,
    gone_cluster: str = "",
) -> NextSubmission:
    """Choose the next submission of a run.

    Args:
        last: The last submission; None before the first.
        live: The object at its `locate_workflow` in ``cluster``; None if there is none.
        cluster: Cluster of the next submission. A mere address (`is_stable_cluster_name`) does not identify it.
        namespace: Namespace of the run's first submission, and of its first in this cluster.
        force: Submit although the last submission may still be running.
        gone_cluster: Name of a cluster that runs nothing any more; empty if none is known.

    Raises:
        ConflictError: the last submission runs, or may run in a cluster that is not visible.
    """
    if last is None:
        return NextSubmission(1, namespace)
    elsewhere = _is_elsewhere(last, live, cluster)
    following = NextSubmission(last.claim.submission + 1, namespace if elsewhere else last.claim.namespace)
    if force and (live is not None or elsewhere):
        return following
    if elsewhere:
        if last.end or (gone_cluster and submission_cluster(last) == gone_cluster):
            return following
        raise ConflictError(_unseen_message(last, cluster))
    if last.binding is None and live is None:
        return NextSubmission(last.claim.submission, last.claim.namespace, last.claim)
    if live and live.running and is_bound_workflow(last, live):
        raise ConflictError(
            f"run {last.claim.run} is still running: submission {last.claim.submission} is Workflow "
            f"{live.namespace}/{live.name} ({live.phase}) in cluster {cluster}; wait for it, stop it, "
            "or fence it with --force"
        )
    return following


def submission_cluster(submission: Submission) -> str:
    """Cluster of a submission: the bound or else the claimed one; empty if not recorded."""
    return submission.binding.cluster if submission.binding else submission.claim.cluster


def _is_elsewhere(last: Submission, live: LiveWorkflow | None, cluster: str) -> bool:
    """Whether the submission may run where ``cluster`` does not show it.

    A uid identifies one object under any cluster name, so a live object with the bound uid is the submission.
    """
    if last.binding and live and live.uid == last.binding.uid:
        return False
    return not is_stable_cluster_name(cluster) or submission_cluster(last) not in ("", cluster)


def _unseen_message(last: Submission, cluster: str) -> str:
    namespace, name = locate_workflow(last)
    bound_cluster = submission_cluster(last)
    return (
        f"run {last.claim.run} may still be running: submission {last.claim.submission} went to cluster "
        f"{bound_cluster} as Workflow {namespace}/{name}, and no end is recorded; cluster {cluster} does not show "
        "whether it runs. Resume it there, or fence it with --force"
    )
