"""Elastic trainings that have lost members go on, and what those held is given back.

A member that is gone is not made anew, so its GPUs are of no more use to its
attempt. They are free once its pod is, as all GPUs are: the Job counts a member
as lost when its pod has ended, and what lives is counted besides.
"""

from collections.abc import Sequence

import structlog

from tiphys.errors import TiphysError
from tiphys.protocol.gang import Backend, Stage, gang_name
from tiphys_plugin.cluster import Cluster, GangStatus, PodStatus
from tiphys_plugin.ledger.model import AdmissionBackend, Lease
from tiphys_plugin.preemption.asking import living_pods
from tiphys_plugin.workflows import Stores

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
