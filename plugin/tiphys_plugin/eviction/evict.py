"""Evicts the pods of preempted attempts, and shrinks the leases of elastic gangs that lost members.

An eviction deletes the pods with the grace period that the author of the step
set. The program gets SIGTERM, may commit a checkpoint, and exits. The eviction
does not wait for that; the ends of the pods release the lease as usual.

The Job does not replace a lost member of an elastic gang, so the attempt cannot
use its GPUs any more. They are released once the Job counts the member as lost
and its pod has ended; `remaining_member_nodes` compares both counts.
"""

from collections.abc import Collection, Sequence

import structlog

from tiphys.errors import TiphysError
from tiphys.protocol.gang import GANG_LABEL, GangBackend, GangPhase, gang_name
from tiphys_plugin.attempts import pods
from tiphys_plugin.attempts.liveness import NamespaceStores
from tiphys_plugin.cluster.interface import Cluster, GangStatus, PodStatus
from tiphys_plugin.quota.admission_backend import AdmissionBackend
from tiphys_plugin.quota.lease import Lease

DEFAULT_GRACE_SECONDS = 30.0
"""Default of Kubernetes, for attempts whose pods do not exist yet."""


def list_unfinished_pods(cluster: Cluster, lease: Lease) -> list[PodStatus]:
    """The unfinished pods of the attempt that holds ``lease``.

    Of a gang only the members: the Argo pod that watches them ends after they have ended.
    """
    request = lease.request
    attempt_pods = pods.list_instance_pods(
        cluster, request.namespace, request.run, request.uid, request.attempt, request.instance_hash
    )
    unfinished = [pod for pod in attempt_pods if not pod.finished]
    return [pod for pod in unfinished if GANG_LABEL in pod.labels] or unfinished


def longest_grace_seconds(pods_of_attempt: Sequence[PodStatus]) -> float:
    """Longest termination grace period of the pods of an attempt."""
    grace_periods = [pod.grace_seconds for pod in pods_of_attempt if pod.grace_seconds is not None]
    return max(grace_periods, default=DEFAULT_GRACE_SECONDS)


def evict_lease(cluster: Cluster, lease: Lease) -> int:
    """Delete the pods that a preemption ends, except those that end already; returns the number of deleted pods."""
    return _end_pods(cluster, select_pods_to_evict(lease, list_unfinished_pods(cluster, lease)))


def evict_from_nodes(cluster: Cluster, lease: Lease, nodes: Collection[str]) -> int:
    """Delete the pods of an attempt that must leave ``nodes``; returns the number of deleted pods.

    An elastic gang that can continue without these members loses only them; any other attempt ends as a whole.
    """
    return _end_pods(cluster, select_pods_on_nodes(lease, list_unfinished_pods(cluster, lease), nodes))


def select_pods_on_nodes(lease: Lease, unfinished: Sequence[PodStatus], nodes: Collection[str]) -> list[PodStatus]:
    """The pods that must end so that the attempt leaves ``nodes``; see `evict_from_nodes`."""
    on_nodes = [pod for pod in unfinished if pod.host in nodes]
    if not can_lose_members(lease.request.min_members, unfinished, on_nodes):
        return list(unfinished)
    remaining = len(unfinished) - len(on_nodes)
    # No pod on the nodes: either these members have ended and the lease is not shrunk yet, or the pods have no
    # known hosts; in the second case the whole attempt must end.
    return on_nodes if on_nodes or remaining < lease.request.members else list(unfinished)


def can_lose_members(min_members: int | None, unfinished: Sequence[PodStatus], lost: Sequence[PodStatus]) -> bool:
    """Whether an attempt can continue without ``lost``, which are among ``unfinished``; only an elastic gang can."""
    return min_members is not None and len(unfinished) - len(lost) >= min_members and all(pod.rank for pod in lost)


def _end_pods(cluster: Cluster, pods_to_end: Sequence[PodStatus]) -> int:
    running = [pod for pod in pods_to_end if not pod.ending]
    for pod in running:
        cluster.delete_pod(pod)
    return len(running)


def select_pods_to_evict(lease: Lease, unfinished: Sequence[PodStatus]) -> list[PodStatus]:
    """The pods of an attempt that a preemption ends: all pods, or the members that its elastic gang is to lose.

    Rank 0 is never among the lost members, because the others cannot continue without it. Members on the nodes
    that the preemptor needs go first, and of these the highest ranks.
    """
    keeps = lease.preemption.keeps if lease.preemption is not None else None
    if keeps is None:
        return list(unfinished)
    nodes_to_free = set(lease.nodes[keeps:])

    def eviction_order(pod: PodStatus) -> tuple[bool, bool, int]:
        return not pod.ending, pod.host not in nodes_to_free, -(pod.rank or 0)

    evictable = sorted((pod for pod in unfinished if pod.rank), key=eviction_order)
    return evictable[: max(0, len(unfinished) - keeps)]


_log = structlog.get_logger()


def shrink_elastic_leases(
    ledger: AdmissionBackend, cluster: Cluster, stores: NamespaceStores, leases: Sequence[Lease]
) -> None:
    """Shrink the leases of elastic gangs that lost members. An error for one lease is logged and retried next time."""
    for lease in leases:
        request = lease.request
        if request.min_members is None or not stores.serves(request.namespace):
            continue
        try:
            nodes = _find_remaining_nodes(cluster, lease)
            if nodes is not None:
                ledger.shrink(lease.id, len(nodes), nodes if lease.nodes else ())
                _log.info(
                    "gang.shrunk", run=request.run, step=request.step, attempt=request.attempt, members=len(nodes)
                )
        except TiphysError as error:
            _log.warning("gang.not_examined", run=request.run, step=request.step, error=str(error))


def _find_remaining_nodes(cluster: Cluster, lease: Lease) -> tuple[str, ...] | None:
    request = lease.request
    name = gang_name(request.run, request.step, request.attempt)
    gang = cluster.gang(GangBackend.JOB, request.namespace, name, request.uid)
    if gang is None or _has_all_members(lease, gang):
        return None
    return remaining_member_nodes(lease, gang, list_unfinished_pods(cluster, lease))


def _has_all_members(lease: Lease, gang: GangStatus) -> bool:
    is_finished = gang.stage is GangPhase.FINISHED  # then the end of the attempt releases the whole lease
    return is_finished or gang.remaining is None or gang.remaining >= lease.request.members


def remaining_member_nodes(lease: Lease, gang: GangStatus, unfinished: Sequence[PodStatus]) -> tuple[str, ...] | None:
    """The node of each remaining member, if the Job lost members and all others have unfinished pods; else None.

    GPUs of a member that has succeeded or was not created yet are released at the end of the attempt.
    """
    if _has_all_members(lease, gang) or gang.remaining != len(unfinished) or not unfinished:
        return None
    nodes = tuple(pod.host for pod in sorted(unfinished, key=lambda pod: pod.rank or 0))
    return None if lease.nodes and not all(nodes) else nodes
