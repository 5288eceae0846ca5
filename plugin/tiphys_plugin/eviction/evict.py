"""Evicts the pods of preempted attempts.

An eviction deletes the pods with the grace period that the author of the step
set. The program gets SIGTERM, may commit a checkpoint, and exits. The eviction
does not wait for that; the ends of the pods release the lease as usual.
"""

from collections.abc import Collection, Sequence

from tiphys.protocol.gang import GANG_LABEL
from tiphys_plugin.attempts import pods
from tiphys_plugin.cluster.interface import Cluster, PodStatus
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
    """Whether an attempt can continue without ``lost``, which are among ``unfinished``; only an elastic gang can.

    It begins at its first member: until that runs, the others wait for it.
    """
    are_spared = min_members is not None and len(unfinished) - len(lost) >= min_members
    return are_spared and all(pod.rank or pod.phase == "Running" for pod in lost)


def _end_pods(cluster: Cluster, pods_to_end: Sequence[PodStatus]) -> int:
    running = [pod for pod in pods_to_end if not pod.ending]
    for pod in running:
        cluster.delete_pod(pod)
    return len(running)


def select_pods_to_evict(lease: Lease, unfinished: Sequence[PodStatus]) -> list[PodStatus]:
    """The pods of an attempt that a preemption ends: all pods, or the members that its elastic gang is to lose.

    Rank 0 is never among the lost members, because the others start again without it. Members on the nodes that the
    preemptor needs go first, and of these the highest ranks.
    """
    keeps = lease.preemption.keeps if lease.preemption is not None else None
    if keeps is None:
        return list(unfinished)
    nodes_to_free = set(lease.nodes[keeps:])

    def eviction_order(pod: PodStatus) -> tuple[bool, bool, int]:
        return not pod.ending, pod.host not in nodes_to_free, -(pod.rank or 0)

    evictable = sorted((pod for pod in unfinished if pod.rank), key=eviction_order)
    return evictable[: max(0, len(unfinished) - keeps)]
