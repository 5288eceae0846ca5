"""Asking an attempt to leave: its pods are deleted, each with the grace period that its author gave it.

The program gets SIGTERM, may commit a checkpoint, and ends. Nothing here waits
for that: GPUs come back by the ways by which they always do.

Elastic trainings that have lost members go on, and what those held is given back.

A member that is gone is not made anew, so its GPUs are of no more use to its
attempt. They are free once its pod is, as all GPUs are: the Job counts a member
as lost when its pod has ended, and what lives is counted besides.
"""

from collections.abc import Collection, Sequence

import structlog

from tiphys.errors import TiphysError
from tiphys.protocol.gang import GANG_LABEL, Backend, Stage, gang_name
from tiphys_plugin.attempts import pods
from tiphys_plugin.attempts.liveness import Stores
from tiphys_plugin.cluster.interface import Cluster, GangStatus, PodStatus
from tiphys_plugin.quota.lease import AdmissionBackend, Lease

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


_log = structlog.get_logger()


def give_back(ledger: AdmissionBackend, cluster: Cluster, stores: Stores, leases: Sequence[Lease]) -> None:
    """Look at every elastic lease once; one that cannot be looked at waits for the next time."""
    for lease in leases:
        held = lease.request
        if held.min_members is None or not stores.serves(held.namespace):
            continue
        try:
            nodes = _look(cluster, lease)
            if nodes is not None:
                ledger.shrink(lease.id, len(nodes), nodes if lease.nodes else ())
                _log.info("gang.shrunk", run=held.run, step=held.step, attempt=held.attempt, members=len(nodes))
        except TiphysError as error:
            _log.warning("gang.not_examined", run=held.run, step=held.step, error=str(error))


def _look(cluster: Cluster, lease: Lease) -> tuple[str, ...] | None:
    held = lease.request
    made_by = cluster.gang(Backend.JOB, held.namespace, gang_name(held.run, held.step, held.attempt))
    if made_by is None or _nobody_lost(lease, made_by):
        return None
    return left(lease, made_by, living_pods(cluster, lease))


def _nobody_lost(lease: Lease, made_by: GangStatus) -> bool:
    over = made_by.stage is Stage.OVER  # then all comes back at once
    return over or made_by.remaining is None or made_by.remaining >= lease.request.members


def left(lease: Lease, made_by: GangStatus, living: Sequence[PodStatus]) -> tuple[str, ...] | None:
    """The node of each member that is left, if some are lost for good and all others live; None if nothing is certain.

    One that has ended well, or was not yet made, is left to the end of the attempt.
    """
    if _nobody_lost(lease, made_by) or made_by.remaining != len(living) or not living:
        return None
    nodes = tuple(pod.host for pod in sorted(living, key=lambda pod: pod.rank or 0))
    return None if lease.nodes and not all(nodes) else nodes
