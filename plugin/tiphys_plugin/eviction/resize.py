"""Makes the lease of an elastic gang and its members follow each other.

The workload does not replace a lost member, so the attempt cannot use its GPUs any
more. They are released once the workload counts the member as lost and its pod has
ended; `remaining_member_nodes` compares both counts.

The ledger grants more members where GPUs are idle. It records how many the workload
will have made then, and the workload is made to follow: at once, or in a later round
if this service dies in between.

Where the lease names nodes, each pod of the gang waits behind a gate until it is
sent to one of them: the nodes of later members are not known when the workload is
created.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime

import structlog

from tiphys.errors import ForbiddenError, TiphysError, UsageError
from tiphys.protocol.gang import GangBackend, GangPhase, gang_name
from tiphys_plugin.attempts.liveness import NamespaceStores
from tiphys_plugin.cluster.interface import Cluster, GangStatus, PodStatus
from tiphys_plugin.eviction.evict import list_unfinished_pods
from tiphys_plugin.quota.admission_backend import AdmissionBackend
from tiphys_plugin.quota.lease import Lease, LedgerState
from tiphys_plugin.quota.ledger.transitions import grow, is_growth_due

_log = structlog.get_logger()


def resize_elastic_gangs(
    ledger: AdmissionBackend, cluster: Cluster, stores: NamespaceStores, state: LedgerState, now: datetime
) -> None:
    """Shrink leases, grow gangs and place their pods. An error for one gang is logged and retried next time.

    ``state`` is a snapshot of the ledger. A gang that gets no more members by it costs no more than a look at its
    workload.
    """

    def may_grow(lease: Lease) -> bool:
        return is_growth_due(lease, now) and grow(state, lease.id, 1, now, ledger.cache)[1] is not None

    for lease in state.leases:
        request = lease.request
        if request.min_members is None or not stores.serves(request.namespace):
            continue
        try:
            name = gang_name(request.run, request.step, request.attempt)
            gang = cluster.gang(GangBackend.JOB, request.namespace, name, request.uid)
            if gang is not None and gang.stage is not GangPhase.FINISHED:  # its end releases the whole lease
                _resize(ledger, cluster, lease, gang, may_grow)
        except TiphysError as error:
            _log.warning("gang.not_examined", run=request.run, step=request.step, error=str(error))


def _resize(
    ledger: AdmissionBackend, cluster: Cluster, lease: Lease, gang: GangStatus, may_grow: Callable[[Lease], bool]
) -> None:
    if gang.stage is GangPhase.ACTIVE and lease.growth is not None and gang.made < lease.growth.made:
        _make_members(ledger, cluster, lease, gang, lease.growth.made)
        return
    is_due = gang.stage is GangPhase.ACTIVE and may_grow(lease)
    is_waiting = bool(lease.nodes) and gang.has_waiting_pods
    if _has_all_members(lease, gang) and not (is_due or is_waiting):
        return
    unfinished = list_unfinished_pods(cluster, lease)
    _place_pods(cluster, lease, unfinished)
    nodes = remaining_member_nodes(lease, gang, unfinished)
    if nodes is not None:
        ledger.shrink(lease.id, len(nodes), nodes if lease.nodes else (), gang.made)
        _log.info("gang.shrunk", **lease.request.log_fields, members=len(nodes))
    elif is_due and _is_complete(lease, gang, unfinished):
        grown = ledger.grow(lease.id, gang.made)
        if grown is not None and grown.growth is not None:
            _make_members(ledger, cluster, grown, gang, grown.growth.made)
            _log.info("gang.grown", **lease.request.log_fields, members=grown.request.members)


def _make_members(ledger: AdmissionBackend, cluster: Cluster, lease: Lease, gang: GangStatus, made: int) -> None:
    min_members = lease.request.min_members
    assert min_members is not None
    try:
        cluster.grow_gang(gang, made, min_members)
    except (ForbiddenError, UsageError):  # a retry cannot help
        remaining = lease.request.members - (made - gang.made)
        ledger.shrink(lease.id, remaining, lease.nodes[:remaining], made)
        raise


def _is_complete(lease: Lease, gang: GangStatus, unfinished: Sequence[PodStatus]) -> bool:
    """Whether all members run, and none is to leave. A gang that waits for a member does not ask for another."""
    is_running = all(pod.phase == "Running" and not pod.ending for pod in unfinished)
    return is_running and gang.remaining == len(unfinished) == lease.request.members


def _place_pods(cluster: Cluster, lease: Lease, unfinished: Sequence[PodStatus]) -> None:
    """Send the pods behind a gate to the nodes of the lease that have no pod yet.

    All pods exist by then, and the order is fixed. So two services that do this at once send none elsewhere.
    """
    gated = sorted((pod for pod in unfinished if pod.is_gated and not pod.ending), key=lambda pod: pod.rank or 0)
    if len(unfinished) < lease.request.members:
        return
    for pod, node in zip(gated, _find_free_nodes(lease, unfinished), strict=False):
        cluster.place_pod(pod, node)


def _find_free_nodes(lease: Lease, unfinished: Sequence[PodStatus]) -> list[str]:
    """The nodes of the lease to which no pod was sent, once for each member that has room there."""
    taken = Counter(pod.planned_host or pod.host for pod in unfinished if not pod.is_gated)
    return sorted((Counter(lease.nodes) - taken).elements())


def _has_all_members(lease: Lease, gang: GangStatus) -> bool:
    return gang.remaining is None or gang.remaining >= lease.request.members


def remaining_member_nodes(lease: Lease, gang: GangStatus, unfinished: Sequence[PodStatus]) -> tuple[str, ...] | None:
    """The node of each remaining member, if the Job lost members and all others have unfinished pods; else None.

    GPUs of a member that has succeeded or was not created yet are released at the end of the attempt.
    """
    if _has_all_members(lease, gang) or gang.remaining != len(unfinished) or not unfinished:
        return None
    # A gated pod can still be sent to any node that is left.
    left = iter(_find_free_nodes(lease, unfinished))
    ordered = sorted(unfinished, key=lambda pod: pod.rank or 0)
    nodes = tuple(next(left, "") if pod.is_gated else pod.planned_host or pod.host for pod in ordered)
    return None if lease.nodes and not all(nodes) else nodes
