"""Asking an attempt to leave: its pods are deleted, each with the grace period that its author gave it.

The program gets SIGTERM, may commit a checkpoint, and ends. Nothing here waits
for that: GPUs come back by the ways by which they always do.
"""

from collections.abc import Collection, Sequence

from tiphys.protocol.gang import GANG_LABEL
from tiphys_plugin import pods
from tiphys_plugin.cluster import Cluster, PodStatus
from tiphys_plugin.ledger.model import Lease

DEFAULT_GRACE_SECONDS = 30.0
"""Kubernetes' own, for a pod that is not there yet."""


def living_pods(cluster: Cluster, lease: Lease) -> list[PodStatus]:
    """The pods of the attempt that holds ``lease`` and have not finished.

    Of a gang only its members: Argo's own pod, which watches them, ends when they have.
    """
    held = lease.request
    found = pods.of_instance(cluster, held.namespace, held.run, held.uid, held.attempt, held.instance)
    living = [pod for pod in found if not pod.finished]
    return [pod for pod in living if GANG_LABEL in pod.labels] or living


def grace_seconds(living: Sequence[PodStatus]) -> float:
    """How long the pods of an attempt may take to end."""
    known = [pod.grace_seconds for pod in living if pod.grace_seconds is not None]
    return max(known, default=DEFAULT_GRACE_SECONDS)


def ask(cluster: Cluster, lease: Lease) -> int:
    """Have those end who leave, as far as they were not told before; the number of pods that were told now."""
    return _tell(cluster, going(lease, living_pods(cluster, lease)))


def ask_off(cluster: Cluster, lease: Lease, nodes: Collection[str]) -> int:
    """The same for an attempt that has to leave these nodes: all of it, but for an elastic gang that can go on."""
    return _tell(cluster, off(lease, living_pods(cluster, lease), nodes))


def off(lease: Lease, living: Sequence[PodStatus], nodes: Collection[str]) -> list[PodStatus]:
    """The pods that have to end so that nothing goes on on these nodes."""
    fewest = lease.request.min_members
    there = [pod for pod in living if pod.host in nodes]
    stay = len(living) - len(there)
    if fewest is None or stay < fewest or not all(pod.rank for pod in there):
        return list(living)
    # They have left, and their lease does not say so yet; or nobody knows who is where, and all have to.
    return there if there or stay < lease.request.members else list(living)


def _tell(cluster: Cluster, pods_to_end: Sequence[PodStatus]) -> int:
    untold = [pod for pod in pods_to_end if not pod.ending]
    for pod in untold:
        cluster.end_pod(pod)
    return len(untold)


def going(lease: Lease, living: Sequence[PodStatus]) -> list[PodStatus]:
    """The pods of an attempt that leave: all, or as many as its elastic gang is to lose.

    Never the first, without which the others cannot go on; rather those on the
    nodes whose GPUs are wanted, and of these the last.
    """
    keeps = lease.leaving.keeps if lease.leaving is not None else None
    if keeps is None:
        return list(living)
    wanted = set(lease.nodes[keeps:])

    def order(pod: PodStatus) -> tuple[bool, bool, int]:
        return not pod.ending, pod.host not in wanted, -(pod.rank or 0)

    can_go = sorted((pod for pod in living if pod.rank), key=order)
    return can_go[: max(0, len(living) - keeps)]
