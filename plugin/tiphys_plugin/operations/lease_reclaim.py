"""Reconciles the ledger with the cluster: releases leases that nothing can use, and restores lost ones.

A lease is released once its attempt is over and no pod of it lives or can come.
A node that is cut off keeps its pods in the API server until the node is
declared gone, and nothing shows whether these pods still run. Their leases are
released only if the queue file sets ``force_release_after_seconds``. The attempt
is fenced first, so that its later commits do not count, and each forced release
is counted, logged and recorded as an event.

The ledger can get lost, for example with its file. An empty ledger would grant
GPUs that are in use. The pods show which attempts live, and the claim of an
attempt names its lease, so `recover_leases` restores these leases.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial

import structlog

from tiphys.errors import IntegrityError, NotFoundError, StoreError, UsageError
from tiphys.protocol.compiled_workflow import CompiledPipeline
from tiphys.protocol.step_spec import ATTEMPT_LABEL, RUN_LABEL, STEP_LABEL, GpuRequest
from tiphys.records import AttemptClaim, Event, SubmissionBinding
from tiphys.store import RunLayout, Store, append_events, fence_attempt, read_current_workflow, read_record
from tiphys.store.layout import parse_attempt
from tiphys.store.runs import read_concurrently
from tiphys_plugin.attempts import pods
from tiphys_plugin.attempts.liveness import is_attempt_over, is_lease_abandoned
from tiphys_plugin.cluster.interface import Cluster, PodStatus
from tiphys_plugin.operations import pod_patch
from tiphys_plugin.quota.lease import AdmissionBackend, Lease, LeaseRequest
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.runtime.context import PluginContext

_log = structlog.get_logger()


def reclaim_leases(context: PluginContext) -> list[Lease]:
    """Release the leases that nothing can use any more, among those whose check is due; returns the released ones.

    Raises:
        StoreError: the ledger or the cluster did not answer.
    """
    sweep = _LeaseSweep(context)
    released = context.ledger.release_dead_leases(sweep.is_reclaimable)
    for lease in released:
        if lease.id in sweep.forced_lease_ids:
            _record_forced_reclaim(context, lease, sweep.limit_seconds or 0.0)
    return released


class _LeaseSweep:
    """One sweep; ``forced_lease_ids`` are the ids of leases that were released while a pod still seemed to live."""

    def __init__(self, context: PluginContext) -> None:
        self._context = context
        self.forced_lease_ids: set[str] = set()

    def is_reclaimable(self, lease: Lease) -> bool:
        services, key = self._context, f"lease/{lease.id}"
        if is_lease_abandoned(services.stores, services.cluster, lease):
            services.wait_tracker.clear(key)
            return True
        limit = self.limit_seconds
        if limit is None or not is_attempt_over(services.stores, services.cluster, lease):
            services.wait_tracker.clear(key)
            return False
        if not services.wait_tracker.is_overdue(key, services.clock(), limit) or not self._fence_attempt(lease):
            return False
        services.wait_tracker.clear(key)
        self.forced_lease_ids.add(lease.id)
        return True

    @cached_property
    def limit_seconds(self) -> float | None:
        """Seconds after which an overdue lease is released by force; None: never."""
        queues = self._context.ledger.snapshot().queues
        return queues.force_release_after_seconds if isinstance(queues, Queues) else None

    def _fence_attempt(self, lease: Lease) -> bool:
        """Fence the attempt of the lease; False if its store does not allow that now."""
        try:
            fence_lease_holder(self._context.stores.store(lease.request.namespace), lease.request)
        except (IntegrityError, StoreError, UsageError) as error:
            _log.warning("lease.not_forced", **_lease_log_fields(lease), error=str(error))
            return False
        return True


def fence_lease_holder(store: Store, request: LeaseRequest) -> None:
    """Fence the attempt that holds the lease; one that was never claimed has nothing to commit."""
    fence_attempt(
        store,
        request.run,
        request.step,
        request.attempt,
        "its pods were not seen to end in time, so its GPUs were released by force",
    )


def _record_forced_reclaim(context: PluginContext, lease: Lease, limit_seconds: float) -> None:
    request = lease.request
    context.metrics.forced_leases.inc()
    _log.warning("lease.forced", **_lease_log_fields(lease), gpus=request.gpus, nodes=list(lease.nodes))
    event = Event(
        name="lease.forced",
        at=context.clock(),
        step=request.step,
        attempt=request.attempt,
        message=f"its {request.gpus} GPUs were released by force, because its pods were not seen to end within "
        f"{limit_seconds:g} s after it was over; check the nodes of these pods",
        data={"gpus": request.gpus, "nodes": list(lease.nodes)},
    )
    try:
        append_events(context.stores.store(request.namespace), request.run, "plugin", [event])
    except StoreError as error:
        _log.warning("event.not_stored", **_lease_log_fields(lease), error=str(error))


def _lease_log_fields(lease: Lease) -> dict[str, object]:
    return {"run": lease.request.run, "step": lease.request.step, "attempt": lease.request.attempt}


def recover_leases(store: Store, cluster: Cluster, ledger: AdmissionBackend, namespace: str | None = None) -> None:
    """Restore the lease of every live attempt that has one and that ``ledger`` lacks.

    Reads nothing from storage if the ledger has them all. A run whose records
    are damaged is skipped and logged. With ``namespace`` only pods of that
    namespace are considered, because ``store`` is its tenant's.

    Raises:
        StoreError: storage, cluster or ledger did not answer.
    """
    for run, live_pods in find_unleased_pods(cluster, ledger, namespace).items():
        try:
            for claim, gpu in _live_claims(store, run, live_pods):
                bound = read_record(store, RunLayout(run).submission_binding(claim.submission), SubmissionBinding)
                gpu_type = claim.flavor or pod_patch.gpu_type_of_patch(claim.pod_patch)
                ledger.restore(claim.lease, rebuild_lease_request(claim, gpu, bound), gpu_type, claim.nodes)
                _log.warning("lease.recovered", run=run, step=claim.step, attempt=claim.attempt, gpus=gpu.gpus)
        except (IntegrityError, NotFoundError, UsageError) as error:
            _log.error("lease.not_recovered", run=run, error=str(error))


def rebuild_lease_request(claim: AttemptClaim, gpu: GpuRequest, bound: SubmissionBinding) -> LeaseRequest:
    """The lease request of the attempt of ``claim``."""
    return LeaseRequest.from_gpu_request(
        gpu,
        uid=claim.uid,
        step=claim.step,
        node=claim.node,
        namespace=bound.namespace,
        workflow=bound.workflow_name,
        instance=claim.instance,
        run=claim.run,
        attempt=claim.attempt,
        members=claim.members,
    )


def find_unleased_pods(
    cluster: Cluster, ledger: AdmissionBackend, namespace: str | None = None
) -> dict[str, list[PodStatus]]:
    """Live pods of attempts without a lease in ``ledger``, by run."""
    requests = [lease.request for lease in ledger.snapshot().leases]
    instances = _instances_by_attempt((request.uid, request.attempt, request.instance) for request in requests)
    unleased: dict[str, list[PodStatus]] = defaultdict(list)
    for pod in cluster.attempt_pods(namespace):
        has_lease = any(map(partial(pods.belongs_to_instance, pod), instances[_attempt_key(pod)]))
        if not pod.finished and not has_lease and RUN_LABEL in pod.labels:
            unleased[pod.labels[RUN_LABEL]].append(pod)
    return unleased


def _live_claims(store: Store, run: str, live_pods: Sequence[PodStatus]) -> Iterator[tuple[AttemptClaim, GpuRequest]]:
    """Claims of the attempts with GPUs that ``live_pods`` belong to and that have no end record."""
    steps = CompiledPipeline.from_manifest(read_current_workflow(store, run)).steps
    requests = {name: spec.gpu for name, spec in steps.items() if spec.gpu is not None}
    live_attempts = {(pod.labels.get(STEP_LABEL), pod.labels.get(ATTEMPT_LABEL)) for pod in live_pods}
    layout = RunLayout(run)
    record_keys = {record for info in store.list(layout.attempts) if (record := parse_attempt(info.key))}
    open_attempts = [
        (step, number)
        for step, number, is_end in sorted(record_keys)
        if not is_end and (step, number, True) not in record_keys
        if (name := step.partition(".")[0]) in requests and (name, str(number)) in live_attempts
    ]
    for opened in read_concurrently(
        lambda attempt: read_record(store, layout.attempt(*attempt), AttemptClaim), open_attempts
    ):
        attempt_pods = [pod for pod in live_pods if _attempt_key(pod) == (opened.uid, str(opened.attempt))]
        if opened.lease and any(pods.belongs_to_instance(pod, opened.instance) for pod in attempt_pods):
            yield opened, requests[opened.step.partition(".")[0]]


def _instances_by_attempt(rows: Iterable[tuple[str, int, str]]) -> dict[tuple[str, str], list[str]]:
    instances: dict[tuple[str, str], list[str]] = defaultdict(list)
    for uid, attempt, instance in rows:
        instances[uid, str(attempt)].append(instance)
    return instances


def _attempt_key(pod: PodStatus) -> tuple[str, str]:
    return pod.workflow_uid, pod.labels.get(ATTEMPT_LABEL, "")
