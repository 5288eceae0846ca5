"""`AdmissionBackend` over Kueue: Kueue decides, and Tiphys does the rest of the life of a `Workload`.

A Workload passes through these states; each transition is one write of the API
server, so a service may die between any two, and another one goes on:

* *created* by the first request of an attempt, under a name derived from it;
* *admitted* by Kueue, when its queue has the quota;
* *granted*: the next repetition of the request writes the grant, only if Kueue has
  not changed the Workload since. From then on it is a lease;
* *evicted* by Kueue: before the grant the reservation is given back at once, and
  the request waits again. Afterwards the lease is marked as preempted: the
  preemption loop asks the pods to save and exit, and Kueue gets the quota back
  once they are gone;
* *finished* by Tiphys, which returns the quota.
"""

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import structlog

from tiphys.errors import (
    ConflictError,
    ForbiddenError,
    IntegrityError,
    NotFoundError,
    StoreError,
    UsageError,
)
from tiphys.faults import failpoint
from tiphys.kube import KubeApi, Object
from tiphys.kube.resources import KUEUE_FLAVORS, KUEUE_LOCAL_QUEUES, KUEUE_WORKLOADS
from tiphys.protocol.gang import WORKFLOW_UID_LABEL
from tiphys.protocol.step_spec import GPU_RESOURCE, GPU_TYPE_LABEL
from tiphys.records import utc_now
from tiphys_plugin.quota.admission_backend import LedgerLostError
from tiphys_plugin.quota.kueue.positions import QueuePositions
from tiphys_plugin.quota.kueue.status import (
    condition_is_true,
    with_condition,
    with_reservation,
    without_reservation,
)
from tiphys_plugin.quota.kueue.workload import (
    GRANT_ANNOTATION,
    MANAGED_BY,
    POD_SET,
    SPOT_LABEL,
    AssignedFlavor,
    Grant,
    KueueWorkload,
    build_assigned_flavor,
    build_workload,
    describe_wait,
    find_leases,
    find_pending,
    is_spot_flavor,
    parse_workload,
    split_lease_id,
    workload_name,
)
from tiphys_plugin.quota.lease import (
    Admission,
    AdmissionReason,
    Admitted,
    DeferralReason,
    Deferred,
    Lease,
    LeaseRequest,
    LedgerState,
    Rejected,
)
from tiphys_plugin.quota.scheduler.cache import SchedulerCache

_MAX_TRIES = 8
_CHECK_EVERY = timedelta(seconds=30)
_FORGET_GRANTLESS_AFTER = timedelta(minutes=5)
"""A step repeats its request at least twice a minute. What is admitted for longer without a grant is returned."""
_KEEP_FINISHED = timedelta(minutes=10)
"""How long a finished Workload is kept for people who look into a queue."""
_KEEP_HELD = timedelta(days=7)
"""How long one that an administrator holds: the next attempt, which may come late, is held by it."""
_T = TypeVar("_T")
_log = structlog.get_logger()


class KueueAdmission:
    """`AdmissionBackend` over the Workloads of ``namespaces`` (None: all); safe to use from many threads and services.

    Raises:
        StoreError: the API server does not answer, has no Kueue, or refuses access; the message says what to do.
    """

    def __init__(
        self, api: KubeApi, namespaces: Collection[str] | None, clock: Callable[[], datetime] = utc_now
    ) -> None:
        self.cache = SchedulerCache(threading.RLock())
        self._api = api
        self._namespaces = None if namespaces is None else tuple(namespaces)
        self._clock = clock
        self._lock = threading.Lock()
        self._next_check = datetime.min.replace(tzinfo=UTC)
        self._positions = QueuePositions(api, clock)

    def request(self, request: LeaseRequest) -> Admission:
        if (refusal := find_unsupported(request)) is not None:
            return Rejected(AdmissionReason.UNSUPPORTED_BY_KUEUE, refusal)
        return _until_done(request.namespace, _describe(request), lambda: self._try_request(request))

    def _try_request(self, request: LeaseRequest) -> Admission:
        manifest = self._api.get(KUEUE_WORKLOADS, request.namespace, workload_name(request))
        if manifest is None:
            return self._create(request)
        workload = parse_workload(manifest)
        if workload.is_deleting:
            return Deferred(AdmissionReason.PENDING_EVALUATION, "the Workload of an earlier try is being deleted", 1)
        if workload.is_finished:
            self._delete(workload)
            raise ConflictError("the Workload had ended and is deleted now, so that another can be created")
        if workload.grant is None and workload.eviction is not None and workload.is_reserved:
            return self._return_reservation(workload)
        if workload.grant is not None or workload.is_admitted:
            return self._grant(workload)
        return self.explain(workload)

    def _create(self, request: LeaseRequest) -> Admission:
        queues = self._api.list(KUEUE_LOCAL_QUEUES, request.namespace).items
        names = sorted(queue["metadata"]["name"] for queue in queues)
        if request.queue not in names:
            return Rejected(
                AdmissionReason.QUEUE_UNKNOWN,
                f"namespace {request.namespace} has no LocalQueue {request.queue!r}; it has: "
                f"{', '.join(names) or 'none'}; name one of them as the queue of the step, or have the administrator "
                "create it",
            )
        flavors = self._api.list(KUEUE_FLAVORS).items if request.spot != "no" else []
        spot_flavors = [item for item in flavors if is_spot_flavor(item)]
        if request.spot == "only" and not spot_flavors:
            return Rejected(
                AdmissionReason.NO_MATCHING_GPU_TYPE,
                f"{request.step_name} must run on spot nodes, and no ResourceFlavor has the label {SPOT_LABEL}=true; "
                "have the administrator label those of spot nodes",
            )
        failpoint("kueue.before_create")
        try:
            body = build_workload(request, spot_flavors)
            body["spec"]["active"] = not self._is_on_hold(request)
            created = self._api.create(KUEUE_WORKLOADS, request.namespace, body)
        except (UsageError, ForbiddenError) as error:
            if isinstance(error, ForbiddenError) and "denied the request" not in str(error):
                raise
            return Rejected(AdmissionReason.MISCONFIGURED, f"Kueue refused the Workload: {error}")
        failpoint("kueue.after_create")
        reason, message = describe_wait(parse_workload(created))
        return Deferred(reason, message, position=1)

    def _is_on_hold(self, request: LeaseRequest) -> bool:
        """Whether an administrator holds the step: the Workload of its attempt before has ``spec.active: false``."""
        if request.attempt == 1:
            return False
        found = self._api.list(
            KUEUE_WORKLOADS, request.namespace, f"{MANAGED_BY},{WORKFLOW_UID_LABEL}={request.uid}"
        ).items
        parsed = (workload for workload in map(self._parse, found) if workload)
        own = [workload for workload in parsed if workload.request.workflow_step == request.workflow_step]
        return bool(own) and max(own, key=lambda workload: workload.request.attempt).is_on_hold

    def _grant(self, workload: KueueWorkload) -> Admitted:
        """The answer for an admitted Workload. Repeated, it is the same."""
        grant = workload.grant or self._write_grant(workload)
        is_elastic = workload.request.min_members is not None
        return Admitted(
            lease=workload.lease_id,
            pool=grant.flavor.name,
            waited_seconds=max(0.0, (grant.granted_at - workload.created_at).total_seconds()),
            nodes=grant.nodes,
            flavor=grant.flavor,
            members=grant.members if is_elastic else None,
        )

    def _write_grant(self, workload: KueueWorkload) -> Grant:
        flavor = self._read_flavor(workload.flavor_name, workload)
        grant = Grant(
            granted_at=self._clock(),
            flavor=flavor,
            members=workload.assigned_members,
            nodes=workload.assigned_nodes,
        )
        failpoint("kueue.before_grant")
        self._annotate(workload, grant)
        failpoint("kueue.after_grant")
        return grant

    def _read_flavor(self, name: str, workload: KueueWorkload) -> AssignedFlavor:
        flavor = self._api.get(KUEUE_FLAVORS, None, name) if name else None
        if flavor is None:
            raise StoreError(
                f"Kueue assigned the ResourceFlavor {name!r} to {workload.name}, which does not exist "
                f"or is not one for {workload.request.resource}; look at the flavors of its ClusterQueue"
            )
        return build_assigned_flavor(flavor, workload.manifest)

    def _return_reservation(self, workload: KueueWorkload) -> Deferred:
        """End an eviction before the grant, as Kueue's integrations do once their pods are gone; no pod exists yet."""
        eviction = workload.eviction
        reason, message = (eviction.reason, eviction.message) if eviction else ("", "")
        self._replace_status(workload.manifest, without_reservation(workload.manifest, reason, message, self._clock()))
        return Deferred(
            AdmissionReason.WAITING_FOR_QUOTA, f"Kueue took the GPUs back before the start ({reason}: {message})", 1
        )

    def explain(self, workload: KueueWorkload) -> Deferred:
        """Why Kueue has not admitted a Workload, and its position."""
        reason, message = describe_wait(workload)
        if workload.is_reserved:  # it has left the line: only its admission checks hold it up
            return Deferred(reason, message, 1, (DeferralReason(reason, message),))
        position, where = self._positions.find(workload)
        message = f"{where}; {message}"
        return Deferred(reason, message, position, (DeferralReason(reason, message),))

    def restore(
        self,
        lease: str,  # noqa: ARG002  part of the protocol; the name is derived from the attempt
        request: LeaseRequest,
        gpu_type: str | None,
        nodes: tuple[str, ...] = (),
        running_members: int | None = None,  # noqa: ARG002
    ) -> int:
        """Record the lease of live pods whose Workload was deleted: it is created as admitted, beyond any quota.

        ``gpu_type`` is the name of the flavor, see `AdmissionBackend.restore`.
        """
        return _until_done(
            request.namespace, _describe(request), lambda: self._try_restore(request, gpu_type or "", nodes)
        )

    def _try_restore(self, request: LeaseRequest, flavor: str, nodes: tuple[str, ...]) -> int:
        found = self._api.get(KUEUE_WORKLOADS, request.namespace, workload_name(request))
        workload = self._parse(found) if found is not None else None
        if found is not None and (workload is None or workload.is_finished):
            self._api.delete(KUEUE_WORKLOADS, request.namespace, found["metadata"]["name"])
            raise ConflictError("the Workload had ended and is deleted now, so that another can be created")
        if workload is not None and workload.grant is not None:
            return request.gpus
        if workload is None:
            body = build_workload(request, is_running=True)
            workload = parse_workload(self._api.create(KUEUE_WORKLOADS, request.namespace, body))
        queue = self._api.get(KUEUE_LOCAL_QUEUES, request.namespace, request.queue)
        if queue is None:
            raise StoreError(
                f"the lease of {_describe(request)} cannot be recorded, because its LocalQueue {request.queue} is gone"
            )
        assigned = self._read_flavor(flavor, workload)
        if not workload.manifest.get("status", {}).get("admission"):
            status = with_reservation(workload, queue["spec"]["clusterQueue"], flavor, request, self._clock())
            workload = parse_workload(self._replace_status(workload.manifest, status))
        members = request.members
        self._annotate(workload, Grant(granted_at=self._clock(), flavor=assigned, members=members, nodes=nodes))
        return request.gpus

    def withdraw(self, uid: str) -> None:
        for workload in self._list(f"{MANAGED_BY},{WORKFLOW_UID_LABEL}={uid}"):
            if workload.grant is None:
                with contextlib.suppress(ConflictError):  # granted or repeated meanwhile: the next sweep looks again
                    self._delete(workload)

    def release(self, lease: str) -> None:
        namespace, name = split_lease_id(lease)
        if namespace:
            _until_done(namespace, f"Workload {lease}", lambda: self._try_release(namespace, name))

    def _try_release(self, namespace: str, name: str) -> None:
        manifest = self._api.get(KUEUE_WORKLOADS, namespace, name)
        if manifest is not None and not condition_is_true(manifest, "Finished"):
            message = "the attempt has ended, and its pods are gone"
            conditions = with_condition(manifest, "Finished", True, "Released", message, self._clock())
            failpoint("kueue.before_finish")
            self._replace_status(manifest, {**manifest.get("status", {}), "conditions": conditions})
            failpoint("kueue.after_finish")

    def grow(self, lease: str, made: int) -> Lease | None:  # noqa: ARG002  part of the protocol
        """None: a Workload has reserved its quota once, and Kueue cannot reserve more for it."""
        return None

    def shrink(self, lease: str, members: int, nodes: tuple[str, ...] = (), made: int | None = None) -> None:  # noqa: ARG002
        namespace, name = split_lease_id(lease)
        if namespace:
            _until_done(namespace, f"Workload {lease}", lambda: self._try_shrink(namespace, name, members, nodes))

    def _try_shrink(self, namespace: str, name: str, members: int, nodes: tuple[str, ...]) -> None:
        manifest = self._api.get(KUEUE_WORKLOADS, namespace, name)
        workload = parse_workload(manifest) if manifest is not None else None
        grant = workload.grant if workload is not None else None
        if workload is None or grant is None or workload.is_finished or grant.members <= members:
            return
        # Kueue counts the pod set without its reclaimable pods (Kueue, "Dynamic Reclaim"). To it, those of the pod set
        # that it did not admit are reclaimable, too.
        lost = {"name": POD_SET, "count": workload.manifest["spec"]["podSets"][0]["count"] - members}
        written = self._replace_status(workload.manifest, {**workload.manifest["status"], "reclaimablePods": [lost]})
        self._annotate(parse_workload(written), grant.model_copy(update={"members": members, "nodes": nodes}))

    def release_workflow(self, uid: str) -> None:
        self.withdraw(uid)
        with self._lock:
            self._next_check = self._clock()

    def mark_preempted(
        self,
        preemptor: tuple[str, str],  # noqa: ARG002  part of the protocol
        grace_seconds: Mapping[str, float],  # noqa: ARG002
    ) -> tuple[Lease, ...]:
        """None: Kueue chooses the victims, and its evictions mark them."""
        return ()

    def release_dead_leases(
        self, is_gone: Callable[[Lease], bool], leases: Sequence[Lease] | None = None
    ) -> list[Lease]:
        now = self._clock()
        with self._lock:
            if leases is None and now < self._next_check:
                return []
            self._next_check = now + _CHECK_EVERY if leases is None else self._next_check
        gone = [lease for lease in (self.snapshot().leases if leases is None else leases) if is_gone(lease)]
        for lease in gone:
            self.release(lease.id)
        return gone

    def snapshot(self) -> LedgerState:
        return self.snapshot_of(self.workloads())

    @staticmethod
    def snapshot_of(workloads: Sequence[KueueWorkload]) -> LedgerState:
        """Leases and pending requests among ``workloads``."""
        return LedgerState(tuple(find_leases(workloads)), tuple(find_pending(workloads)))

    def workloads(self) -> list[KueueWorkload]:
        """All Workloads of Tiphys.

        Raises:
            StoreError: Kueue did not answer.
        """
        return self._list(MANAGED_BY)

    def sweep(self) -> None:
        """Delete finished Workloads after a while, and those whose step has asked no more since Kueue admitted it.

        Raises:
            StoreError: Kueue did not answer.
        """
        now = self._clock()
        for workload in self.workloads():
            # Not what is reserved and waits for admission checks: its step is told to wait, and asks on.
            finished, admitted = workload.find_true("Finished"), workload.find_true("Admitted")
            kept = _KEEP_HELD if workload.is_on_hold else _KEEP_FINISHED
            is_old = finished is not None and finished.since < now - kept
            is_unused = (
                workload.grant is None and admitted is not None and admitted.since < now - _FORGET_GRANTLESS_AFTER
            )
            if is_old or (finished is None and is_unused):
                with contextlib.suppress(ConflictError):
                    self._delete(workload)
                    _log.info("kueue.deleted", workload=workload.lease_id, finished=finished is not None)

    def report_ready(self, has_all_pods: Callable[[Lease], bool]) -> None:
        """Set `PodsReady` of each lease for which ``has_all_pods`` is true, for Kueue's ``waitForPodsReady``.

        Raises:
            StoreError: Kueue or cluster did not answer.
        """
        by_id = {
            workload.lease_id: workload for workload in self.workloads() if workload.find_true("PodsReady") is None
        }
        for lease in find_leases(list(by_id.values())):
            if lease.preemption is None and has_all_pods(lease):
                manifest = by_id[lease.id].manifest
                conditions = with_condition(
                    manifest, "PodsReady", True, "Started", "all pods of the attempt run", self._clock()
                )
                with contextlib.suppress(ConflictError, NotFoundError):  # the next round looks again
                    self._replace_status(manifest, {**manifest["status"], "conditions": conditions})

    def _list(self, labels: str) -> list[KueueWorkload]:
        namespaces = [None] if self._namespaces is None else self._namespaces
        found = []
        for namespace in namespaces:
            with _explained(namespace or "all namespaces"):
                found += self._api.list(KUEUE_WORKLOADS, namespace, labels=labels).items
        return [workload for workload in map(self._parse, found) if workload is not None]

    @staticmethod
    def _parse(manifest: Object) -> KueueWorkload | None:
        """None for a Workload whose annotations were changed: the pods of its attempt restore the lease."""
        try:
            return parse_workload(manifest)
        except IntegrityError as error:
            _log.warning("kueue.unreadable", error=str(error))
            return None

    def _delete(self, workload: KueueWorkload) -> None:
        version = workload.manifest["metadata"]["resourceVersion"]
        with _explained(workload.namespace):
            self._api.delete(KUEUE_WORKLOADS, workload.namespace, workload.name, workload.uid, resource_version=version)

    def _annotate(self, workload: KueueWorkload, grant: Grant) -> None:
        metadata = {
            "resourceVersion": workload.manifest["metadata"]["resourceVersion"],
            "annotations": {GRANT_ANNOTATION: grant.model_dump_json()},
        }
        self._api.patch(KUEUE_WORKLOADS, workload.namespace, workload.name, {"metadata": metadata})

    def _replace_status(self, manifest: Object, status: Object) -> Object:
        body = {**manifest, "status": status}
        return self._api.replace(KUEUE_WORKLOADS, manifest["metadata"]["namespace"], body, "status")


def find_unsupported(request: LeaseRequest) -> str | None:
    """What ``request`` asks for and Kueue cannot do, with what to do instead; None if it can do all."""
    if request.min_gpu_memory_mb is not None:
        return (
            f"{request.step_name} asks for GPUs of {request.min_gpu_memory_mb} MB, and Kueue does not know the memory "
            "of GPUs; name a GPU type"
        )
    if request.resource != GPU_RESOURCE and request.type_text:
        return (
            f"{request.step_name} asks for {request.resource} of the type {request.type_text}, and types are known to "
            f"Kueue by the label {GPU_TYPE_LABEL} only; leave `gpu_type` out, and name a queue of that type"
        )
    if request.tensor_parallel > 1:
        return (
            f"{request.step_name} asks for groups of {request.tensor_parallel} members within one NVLink domain, and "
            "Kueue does not place them; leave `tensor_parallel` out, or use the ledger of Tiphys"
        )
    if request.within is not None:
        return (
            f"{request.step_name} asks for pods within one {request.within}, which Tiphys does not ask of Kueue; leave "
            "`within` out, or use the ledger of Tiphys"
        )
    return None


def _until_done(namespace: str, workload: str, attempt: Callable[[], _T]) -> _T:
    """The result of ``attempt``, which is repeated after a `ConflictError`."""
    for _ in range(_MAX_TRIES):
        with contextlib.suppress(ConflictError), _explained(namespace):
            return attempt()
    raise StoreError(f"{workload} was changed by others {_MAX_TRIES} times in a row; ask again")


@contextlib.contextmanager
def _explained(namespace: str) -> Iterator[None]:
    """Errors that last until a person acts: they say which part of Kueue is missing, and what to do."""
    try:
        yield
    except NotFoundError as error:
        raise LedgerLostError(
            "GPUs are kept by Kueue in this installation (`ledger.kind: kueue`), and the API server knows no Workload "
            f"of kueue.x-k8s.io/v1beta2, or {namespace} is gone; install Kueue 0.15 or newer, or install Tiphys with "
            f"`ledger.kind: tiphys` ({error})"
        ) from error
    except ForbiddenError as error:
        raise LedgerLostError(
            f"the service may not use Kueue in {namespace}; upgrade the chart with `ledger.kind: kueue`, which grants "
            f"the rights ({error})"
        ) from error


def _describe(request: LeaseRequest) -> str:
    return f"Workload {request.namespace}/{workload_name(request)} of {request.run}/{request.step_name}"
