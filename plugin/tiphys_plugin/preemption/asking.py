"""Asking an attempt to leave: its pods are deleted, each with the grace period that its author gave it.

The program gets SIGTERM, may commit a checkpoint, and ends. Nothing here waits
for that: GPUs come back by the ways by which they always do.
"""

from collections.abc import Sequence

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
    """Have the attempt end, as far as it was not told before; the number of pods that were told now."""
    untold = [pod for pod in living_pods(cluster, lease) if not pod.ending]
    for pod in untold:
        cluster.end_pod(pod)
    return len(untold)
