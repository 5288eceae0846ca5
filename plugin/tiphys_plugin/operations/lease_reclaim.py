"""Reconciles the ledger with the cluster: releases leases that nothing can use, and restores lost ones.

A lease is released once its attempt is over and no pod of it lives or can come.
A node that is cut off keeps its pods in the API server until the node is
declared gone, and nothing shows whether these pods still run. Their leases are
released only if the queue file sets ``force_release_after_seconds``. The attempt
is fenced first, so that its later commits do not count, and each forced release
is counted, logged and recorded as an event.

The ledger can get lost, for example with its file. An empty ledger would grant
GPUs that are in use. The pods show which attempts live and the GPUs that they
request, and the claim of an attempt names its lease, so `recover_leases` restores
these leases.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import structlog

from tiphys.errors import IntegrityError, NotFoundError, StoreError, UsageError
from tiphys.lineage.run_history import RunHistory
from tiphys.protocol.step_spec import ATTEMPT_LABEL, RUN_LABEL, STEP_LABEL, GpuRequest
from tiphys.records import AttemptClaim, Event, SubmissionBinding, task_name
from tiphys.store import (
    Attempt,
    RunLayout,
    Store,
    append_events,
    fence_attempt,
    read_record,
    read_step_attempts,
)
from tiphys.store.layout import parse_attempt
from tiphys.store.runs import read_concurrently
from tiphys_plugin.attempts import pods
from tiphys_plugin.attempts.liveness import is_attempt_over, is_lease_abandoned
from tiphys_plugin.cluster.interface import Cluster, PodStatus
from tiphys_plugin.quota.admission_backend import AdmissionBackend
from tiphys_plugin.quota.lease import Lease, LeaseRequest, StepAttempt, hash_node_name
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.runtime.context import PluginContext

_log = structlog.get_logger()


def reclaim_leases(context: PluginContext, uid: str = "") -> list[Lease]:
    """Release the leases that nothing can use any more; returns the released ones.

    Those of the Workflow with this uid are checked, or all whose check is due.

    Raises:
        StoreError: the ledger or the cluster did not answer.
    """
    sweep = _LeaseSweep(context)
    leases = [lease for lease in context.ledger.snapshot().leases if lease.request.uid == uid] if uid else None
    released = context.ledger.release_dead_leases(sweep.is_reclaimable, leases)
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
            _log.warning("lease.not_forced", **lease.request.log_fields, error=str(error))
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
    _log.warning("lease.forced", **lease.request.log_fields, gpus=request.gpus, nodes=list(lease.nodes))
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
        _log.warning("event.not_stored", **lease.request.log_fields, error=str(error))


def recover_leases(context: PluginContext, namespace: str | None = None) -> None:
    """Restore the lease of every live attempt that has one and that the ledger lacks.

    The GPUs are those that the live pods request: stored records may be forged. Reads nothing from storage if the
    ledger has all leases. A run whose records are damaged is skipped, logged and counted. With ``namespace`` only
    pods of that namespace are considered, because the store is its tenant's.

    Raises:
        StoreError: storage, cluster or ledger did not answer.
    """
    attempts: list[_LiveAttempt] = []
    for run, live_pods in find_unleased_pods(context.cluster, context.ledger, namespace).items():
        with _count_damage(context, run):
            attempts += _live_attempts(context.store, run, live_pods)
    # Those that run count in any case, so they come first: the others get what the quota has left.
    for attempt in sorted(attempts, key=lambda attempt: not any(pod.holds_gpus for pod in attempt.pods)):
        with _count_damage(context, attempt.claim.run):
            _restore_lease(context, attempt)


@contextlib.contextmanager
def _count_damage(context: PluginContext, run: str) -> Iterator[None]:
    """Log and count a run whose leases cannot be restored: its GPUs are in use and seem free."""
    try:
        yield
    except (IntegrityError, NotFoundError, UsageError) as error:
        context.metrics.unrecovered_runs.inc()
        _log.error("lease.not_recovered", run=run, error=str(error))


class _LiveAttempt(NamedTuple):
    """An attempt with GPUs that has no end, and its live pods that request GPUs, the running ones first."""

    claim: AttemptClaim
    gpu: GpuRequest
    pods: list[PodStatus]

    @property
    def gpus_of_pods(self) -> int:
        return sum(pod.resources.get(self.gpu.resource, 0) for pod in self.pods)


def _restore_lease(context: PluginContext, attempt: _LiveAttempt) -> None:
    claim, recorded, gpus = attempt.claim, attempt.gpu.gpus_for(attempt.claim.members), 0
    fields = {"run": claim.run, "step": claim.step, "attempt": claim.attempt}
    if attempt.pods:
        bound = read_record(context.store, RunLayout(claim.run).submission_binding(claim.submission), SubmissionBinding)
        gpu_type = claim.flavor or claim.gpu_type or None
        running = sum(pod.holds_gpus for pod in attempt.pods)
        earlier = [
            step_attempt
            for step_attempt in read_step_attempts(context.store, claim.run, claim.step)
            if step_attempt.claim.attempt < claim.attempt
        ]
        request = rebuild_lease_request(attempt, bound, earlier)
        gpus = context.ledger.restore(claim.lease, request, gpu_type, _nodes_of_members(attempt), running)
    if gpus:
        _log.warning("lease.recovered", **fields, gpus=gpus)
    if gpus < recorded:
        context.metrics.capped_leases.inc()
        requested = attempt.gpus_of_pods
        _log.warning("lease.capped", **fields, gpus=gpus, recorded=recorded, requested_by_pods=requested)


def attained_service(gpu: GpuRequest, attempts: Sequence[Attempt]) -> tuple[float, float | None]:
    """GPU-seconds that attempts of a step held until their ends, and when the first of them got its GPUs.

    The second is in seconds of Unix time; None if none has held GPUs.
    """
    holders = [attempt for attempt in attempts if attempt.claim.lease]
    held = [
        gpu.gpus_for(claim.members) * max(0.0, (end.ended_at - claim.written_at).total_seconds())
        for claim, end in holders
        if end is not None
    ]
    return sum(held), min((holder.claim.written_at.timestamp() for holder in holders), default=None)


def rebuild_lease_request(
    attempt: _LiveAttempt, bound: SubmissionBinding, earlier: Sequence[Attempt] = ()
) -> LeaseRequest:
    """The lease request of a live attempt, with the members, GPUs and namespace of its pods.

    ``earlier`` are the attempts of the step before it.
    """
    claim, members = attempt.claim, len(attempt.pods)
    attained, first_start = attained_service(attempt.gpu, earlier)
    workflow = (claim.uid, attempt.pods[0].namespace, bound.workflow_name)
    claimed = StepAttempt(*workflow, claim.run, claim.step, claim.instance, claim.node, claim.attempt)
    recorded = LeaseRequest.from_gpu_request(attempt.gpu, claimed, claim.members)
    gpus_per_member = attempt.gpus_of_pods // members
    return replace(
        recorded,
        members=members,
        gpus=gpus_per_member * members,
        tensor_parallel=recorded.tensor_parallel if members % recorded.tensor_parallel == 0 else 1,
        attained=attained,
        first_start=first_start,
    )


def _nodes_of_members(attempt: _LiveAttempt) -> tuple[str, ...]:
    """The node that each member was sent to; empty where no nodes were declared, or they are not known of all."""
    if all(pod.planned_host for pod in attempt.pods):
        return tuple(pod.planned_host for pod in attempt.pods)
    planned = attempt.claim.nodes
    ranks = [pod.rank or 0 for pod in attempt.pods]
    return tuple(planned[rank] for rank in ranks) if all(rank < len(planned) for rank in ranks) else ()


def find_unleased_pods(
    cluster: Cluster, ledger: AdmissionBackend, namespace: str | None = None
) -> dict[str, list[PodStatus]]:
    """Live pods of attempts without a lease in ``ledger``, by run."""
    requests = [lease.request for lease in ledger.snapshot().leases]
    leased = {(request.uid, str(request.attempt), request.instance_hash) for request in requests}
    unleased: dict[str, list[PodStatus]] = defaultdict(list)
    for pod in cluster.attempt_pods(namespace):
        has_lease = (*_attempt_key(pod), pods.hash_instance(pod)) in leased
        if not pod.finished and not has_lease and RUN_LABEL in pod.labels:
            unleased[pod.labels[RUN_LABEL]].append(pod)
    return unleased


def _live_attempts(store: Store, run: str, live_pods: Sequence[PodStatus]) -> Iterator[_LiveAttempt]:
    """The attempts with GPUs that ``live_pods`` belong to and that have no end record; each pod counts for one."""
    steps = RunHistory(store, run).pipeline.steps
    requests = {name: spec.gpu for name, spec in steps.items() if spec.gpu is not None}
    live_steps = {(pod.labels.get(STEP_LABEL), pod.labels.get(ATTEMPT_LABEL)) for pod in live_pods}
    layout = RunLayout(run)
    record_keys = {record for info in store.list(layout.attempts) if (record := parse_attempt(info.key))}
    open_attempts = [
        (step, number)
        for step, number, is_end in sorted(record_keys)
        if not is_end and (step, number, True) not in record_keys
        if (name := task_name(step)) in requests and (name, str(number)) in live_steps
    ]
    unclaimed = {(pod.namespace, pod.name): pod for pod in live_pods}
    for opened in read_concurrently(
        lambda attempt: read_record(store, layout.attempt(*attempt), AttemptClaim), open_attempts
    ):
        instance = (opened.uid, str(opened.attempt), hash_node_name(opened.instance))
        own = [pod for pod in unclaimed.values() if (*_attempt_key(pod), pods.hash_instance(pod)) == instance]
        if opened.lease and own:
            for pod in own:
                del unclaimed[pod.namespace, pod.name]
            gpu = requests[task_name(opened.step)]
            showing = (pod for pod in own if pod.resources.get(gpu.resource))
            yield _LiveAttempt(opened, gpu, sorted(showing, key=lambda pod: (not pod.holds_gpus, pod.rank or 0)))


def _attempt_key(pod: PodStatus) -> tuple[str, str]:
    return pod.workflow_uid, pod.labels.get(ATTEMPT_LABEL, "")
