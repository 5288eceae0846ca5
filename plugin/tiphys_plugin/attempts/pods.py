"""Finds the pods of an attempt, and reads from them whether they live and how the attempt ended.

GPUs and the next attempt wait for the end of the pods, never for a request or a
hook, because a program can outlive its node in Argo by minutes.
"""

import re
from collections.abc import Sequence

from tiphys.errors import ConflictError, IntegrityError
from tiphys.failures.classify import AttemptObservation
from tiphys.protocol.operations import step_instance_name
from tiphys.records import AttemptClaim, SubmissionBinding
from tiphys.store import RunLayout, Store, find_record
from tiphys_plugin.cluster.interface import Cluster, PodStatus
from tiphys_plugin.quota.lease import hash_node_name

_TRY = re.compile(r"\((\d+)\)$")


def list_instance_pods(
    cluster: Cluster, namespace: str, run: str, uid: str, attempt: int, instance_hash: str
) -> list[PodStatus]:
    """Pods of one attempt of one step, the latest try last.

    ``instance_hash`` selects the step, because other steps have attempts of the same number.
    """
    pods = cluster.pods(namespace, run, uid, str(attempt))
    return sorted(
        (p for p in pods if hash_instance(p) == instance_hash), key=lambda p: (parse_try_number(p.node), p.name)
    )


def hash_instance(pod: PodStatus) -> str:
    """`LeaseRequest.instance_hash` of the step that a pod belongs to."""
    return hash_node_name(step_instance_name(pod.node))


def list_attempt_pods(store: Store, cluster: Cluster, claim: AttemptClaim) -> list[PodStatus]:
    """Pods of a claimed attempt, also of another submission of the run; raises like `read_submission_bound`."""
    bound = read_submission_bound(store, cluster, claim)
    instance_hash = hash_node_name(claim.instance)
    return list_instance_pods(cluster, bound.namespace, claim.run, claim.uid, claim.attempt, instance_hash)


def read_submission_bound(store: Store, cluster: Cluster, claim: AttemptClaim) -> SubmissionBinding:
    """Cluster, namespace and workflow of the submission that claimed the attempt.

    Raises:
        ConflictError: the attempt ran in another cluster, which this plugin cannot see.
        IntegrityError: the submission has no binding, so its namespace is unknown.
    """
    bound = find_record(store, RunLayout(claim.run).submission_binding(claim.submission), SubmissionBinding)
    if bound is not None and bound.cluster != cluster.name:
        raise ConflictError(
            f"attempt {claim.attempt} of {claim.step} was opened in cluster {bound.cluster} and has no end; "
            f"cluster {cluster.name} cannot see whether it still runs: "
            f"once it is sure to be dead, `tiphys resume {claim.run} --force` ends it"
        )
    if bound is None:
        raise IntegrityError(
            f"attempt {claim.attempt} of {claim.step} was opened by submission {claim.submission} of run {claim.run}, "
            "which is bound to no workflow, so its pods cannot be found; check the run's records in storage"
        )
    return bound


def find_live_pod(pods: Sequence[PodStatus]) -> PodStatus | None:
    """The first pod that has not finished; None if all have finished or are gone."""
    return next((pod for pod in pods if not pod.finished), None)


def parse_try_number(node: str) -> int:
    """Number of the container's retry in the name of a pod node: ``wf.prep[1].run(2)`` → 2."""
    match = _TRY.search(node)
    return int(match[1]) if match else 0


def observe_pod_end(pods: Sequence[PodStatus], status: str, exit_code: str) -> AttemptObservation:
    """Combine Argo's status and exit code with the status of the latest pod, as far as they are known."""
    argo_exit_code = int(exit_code) if exit_code.isdecimal() else None
    if not pods:
        return AttemptObservation(status=status, exit_code=argo_exit_code)
    last = pods[-1]
    return AttemptObservation(
        status=status,
        exit_code=argo_exit_code if argo_exit_code is not None else last.exit_code,
        pod_seen=True,
        pod_reason=last.reason,
        pod_message=last.message,
        ended_at=last.trouble_at,
        node=last.host,
        termination_message=last.termination_message,
    )
