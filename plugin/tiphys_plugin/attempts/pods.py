"""The pods of an attempt: do they still live, and what do they say about its end?

GPUs and the next attempt wait for the end of pods, never for a request or a
hook: a program can outlive the node that Argo shows for it by minutes.
"""

import re
from collections.abc import Sequence

from tiphys.errors import ConflictError, IntegrityError
from tiphys.failures.classify import Observation
from tiphys.records import AttemptClaim, SubmissionBound
from tiphys.store import RunLayout, Store, find_record
from tiphys_plugin.cluster.interface import Cluster, PodStatus

_TRY = re.compile(r"\((\d+)\)$")


def of_instance(cluster: Cluster, namespace: str, run: str, uid: str, attempt: int, instance: str) -> list[PodStatus]:
    """Pods of one attempt of one step, the latest try last. Other steps have attempts of the same number."""
    pods = cluster.pods(namespace, run, uid, str(attempt))
    return sorted((p for p in pods if is_of_instance(p, instance)), key=lambda p: (try_of(p.node), p.name))


def is_of_instance(pod: PodStatus, instance: str) -> bool:
    """Whether a pod belongs to the step with this node name."""
    return pod.node.startswith(f"{instance}[")


def of_claim(store: Store, cluster: Cluster, claim: AttemptClaim) -> list[PodStatus]:
    """Pods of a claimed attempt, which may belong to another submission of the run; raises as `place_of`."""
    bound = place_of(store, cluster, claim)
    return of_instance(cluster, bound.namespace, claim.run, claim.uid, claim.attempt, claim.instance)


def place_of(store: Store, cluster: Cluster, claim: AttemptClaim) -> SubmissionBound:
    """Where a claimed attempt runs.

    Raises:
        ConflictError: the attempt ran in a cluster, or a namespace, that this plugin does not see.
    """
    bound = find_record(store, RunLayout(claim.run).submission_bound(claim.submission), SubmissionBound)
    if bound is not None and bound.cluster != cluster.name:
        raise ConflictError(
            f"attempt {claim.attempt} of {claim.step} was opened in cluster {bound.cluster} and has no end; "
            f"cluster {cluster.name} cannot see whether it still runs: "
            f"once it is sure to be dead, `tiphys resume {claim.run} --force` ends it"
        )
    if bound is None:
        raise IntegrityError(
            f"attempt {claim.attempt} of {claim.step} was opened by submission {claim.submission} of run {claim.run}, "
            "which is bound to no workflow, so nobody knows where its pods are; look at the run's records"
        )
    return bound


def living(pods: Sequence[PodStatus]) -> PodStatus | None:
    """One of the pods that has not finished; None if all have, or are gone."""
    return next((pod for pod in pods if not pod.finished), None)


def try_of(node: str) -> int:
    """Number of the container's own retry that a pod node belongs to: ``wf.prep[1].run(2)`` → 2."""
    match = _TRY.search(node)
    return int(match[1]) if match else 0


def observation(pods: Sequence[PodStatus], status: str, exit_code: str) -> Observation:
    """What Argo told and what the latest pod shows, as far as either is known."""
    told = int(exit_code) if exit_code.isdecimal() else None
    if not pods:
        return Observation(status=status, exit_code=told)
    last = pods[-1]
    return Observation(
        status=status,
        exit_code=told if told is not None else last.exit_code,
        pod_seen=True,
        pod_reason=last.reason,
        pod_message=last.message,
        at=last.trouble_at,
        node=last.host,
        told=last.told,
    )
