"""Put leases back that the ledger does not know although their pods live.

The ledger is a file, and files get lost. Starting from an empty one would hand
out GPUs that are in use. Pods say which attempts live, and the claim of an
attempt says which lease it was given.

Leases that nothing can use any more come back: those seen to be gone, and overdue ones after a declared time.

A node that is cut off keeps its pods in the API for as long as nobody says that
it is gone, and with them the GPUs of attempts that are over. Nobody can see
whether these still run. So no time takes their lease away unless the queue file
says after which (``force_release_after_seconds``); then the attempt is fenced
first, so that what it may still commit does not count, and each case is counted
and told.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial

import structlog

from tiphys.errors import IntegrityError, NotFoundError, StoreError, UsageError
from tiphys.protocol.compiled_workflow import CompiledPipeline
from tiphys.protocol.step_spec import ATTEMPT_LABEL, RUN_LABEL, STEP_LABEL, GpuRequest
from tiphys.records import AttemptClaim, AttemptEnd, Event, Outcome, SubmissionBound
from tiphys.store import RunLayout, Store, append_events, claim, current_workflow, find_record, read_record
from tiphys.store.layout import parse_attempt
from tiphys.store.runs import concurrently
from tiphys_plugin.attempts import pods
from tiphys_plugin.attempts.liveness import attempt_is_over, lease_is_gone
from tiphys_plugin.cluster.interface import Cluster, PodStatus
from tiphys_plugin.operations import pod_patch as destination
from tiphys_plugin.quota.lease import AdmissionBackend, Lease, LeaseRequest, asked_for
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.runtime.context import Services

_FEWEST_LOOKS = 5
"""As often at least a lease is found overdue before it is taken back, whatever the clock says."""
_log = structlog.get_logger()


def sweep(services: Services) -> list[Lease]:
    """Have the leases looked at whose check is due; those that came back.

    Raises:
        StoreError: the ledger or the cluster did not answer.
    """
    look = _Look(services)
    back = services.ledger.sweep(look.is_over)
    for lease in back:
        if lease.id in look.forced:
            _tell(services, lease, look.limit_seconds or 0.0)
    return back


class _Look:
    """One sweep; ``forced`` are the ids of leases of which no pod was seen to end."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self.forced: set[str] = set()

    def is_over(self, lease: Lease) -> bool:
        services, what = self._services, f"lease/{lease.id}"
        if lease_is_gone(services.stores, services.cluster, lease):
            services.waits.over(what)
            return True
        limit = self.limit_seconds
        if limit is None or not attempt_is_over(services.stores, services.cluster, lease):
            services.waits.over(what)
            return False
        if services.waits.seconds(what, services.clock(), limit / _FEWEST_LOOKS) < limit or not self._fence(lease):
            return False
        services.waits.over(what)
        self.forced.add(lease.id)
        return True

    @cached_property
    def limit_seconds(self) -> float | None:
        """After so long an overdue lease is taken back; None: never."""
        queues = self._services.ledger.snapshot().queues
        return queues.force_release_after_seconds if isinstance(queues, Queues) else None

    def _fence(self, lease: Lease) -> bool:
        """Whether nothing that the attempt still commits can count."""
        try:
            fence(self._services.stores.store(lease.request.namespace), lease.request)
        except (IntegrityError, StoreError, UsageError) as error:
            _log.warning("lease.not_forced", **_whose(lease), error=str(error))
            return False
        return True


def fence(store: Store, held: LeaseRequest) -> None:
    """End the attempt as fenced, unless it has an end; one that was never claimed has nothing to commit."""
    layout = RunLayout(held.run)
    claimed = find_record(store, layout.attempt(held.step, held.attempt), AttemptClaim)
    if claimed is None:
        return
    wanted = AttemptEnd(
        run=held.run,
        step=held.step,
        attempt=held.attempt,
        submission=claimed.submission,
        outcome=Outcome.FENCED,
        message="nobody saw its pods end, and its GPUs were taken back",
        step_key=claimed.step_key,
    )
    claim(store, layout.attempt_end(held.step, held.attempt), wanted)


def _tell(services: Services, lease: Lease, limit_seconds: float) -> None:
    held = lease.request
    services.metrics.forced_leases.inc()
    _log.warning("lease.forced", **_whose(lease), gpus=held.gpus, nodes=list(lease.nodes))
    event = Event(
        name="lease.forced",
        at=services.clock(),
        step=held.step,
        attempt=held.attempt,
        message=f"its {held.gpus} GPUs were taken back although nobody saw its pods end within {limit_seconds:g} s "
        "after it was over; look at their nodes",
        data={"gpus": held.gpus, "nodes": list(lease.nodes)},
    )
    try:
        append_events(services.stores.store(held.namespace), held.run, "plugin", [event])
    except StoreError as error:
        _log.warning("event.not_stored", **_whose(lease), error=str(error))


def _whose(lease: Lease) -> dict[str, object]:
    return {"run": lease.request.run, "step": lease.request.step, "attempt": lease.request.attempt}


def recover(store: Store, cluster: Cluster, ledger: AdmissionBackend, namespace: str | None = None) -> None:
    """Record the lease of every live attempt that has one and that ``ledger`` does not hold.

    Costs nothing of storage while the ledger knows them all. A run whose
    records are damaged is left out, and logged. With ``namespace`` only pods of
    that one speak, because ``store`` is its tenant's.

    Raises:
        StoreError: storage, cluster or ledger did not answer.
    """
    for run, live in unknown(cluster, ledger, namespace).items():
        try:
            for claim, gpu in _live_claims(store, run, live):
                bound = read_record(store, RunLayout(run).submission_bound(claim.submission), SubmissionBound)
                kind = claim.flavor or destination.chosen_type(claim.pod_patch)
                ledger.restore(claim.lease, request_of(claim, gpu, bound), kind, claim.nodes)
                _log.warning("lease.recovered", run=run, step=claim.step, attempt=claim.attempt, gpus=gpu.gpus)
        except (IntegrityError, NotFoundError, UsageError) as error:
            _log.error("lease.not_recovered", run=run, error=str(error))


def request_of(claim: AttemptClaim, gpu: GpuRequest, bound: SubmissionBound) -> LeaseRequest:
    """What the attempt of ``claim`` had asked for."""
    return LeaseRequest(
        uid=claim.uid,
        step=claim.step,
        node=claim.node,
        namespace=bound.namespace,
        workflow=bound.workflow_name,
        instance=claim.instance,
        run=claim.run,
        attempt=claim.attempt,
        **asked_for(gpu, claim.members),
    )


def unknown(cluster: Cluster, ledger: AdmissionBackend, namespace: str | None = None) -> dict[str, list[PodStatus]]:
    """Live pods of attempts that no lease is for, by run."""
    held = [lease.request for lease in ledger.snapshot().leases]
    instances = _by_attempt((request.uid, request.attempt, request.instance) for request in held)
    found: dict[str, list[PodStatus]] = defaultdict(list)
    for pod in cluster.attempt_pods(namespace):
        known = any(map(partial(pods.is_of_instance, pod), instances[_attempt(pod)]))
        if not pod.finished and not known and RUN_LABEL in pod.labels:
            found[pod.labels[RUN_LABEL]].append(pod)
    return found


def _live_claims(store: Store, run: str, live: Sequence[PodStatus]) -> Iterator[tuple[AttemptClaim, GpuRequest]]:
    """Claims of the attempts with GPUs that ``live`` pods belong to and that nobody has ended."""
    steps = CompiledPipeline.from_manifest(current_workflow(store, run)).steps
    requests = {name: spec.gpu for name, spec in steps.items() if spec.gpu is not None}
    wanted = {(pod.labels.get(STEP_LABEL), pod.labels.get(ATTEMPT_LABEL)) for pod in live}
    layout = RunLayout(run)
    places = {place for info in store.list(layout.attempts) if (place := parse_attempt(info.key))}
    open_places = [
        (step, number)
        for step, number, is_end in sorted(places)
        if not is_end and (step, number, True) not in places
        if (name := step.partition(".")[0]) in requests and (name, str(number)) in wanted
    ]
    for opened in concurrently(lambda place: read_record(store, layout.attempt(*place), AttemptClaim), open_places):
        theirs = [pod for pod in live if _attempt(pod) == (opened.uid, str(opened.attempt))]
        if opened.lease and any(pods.is_of_instance(pod, opened.instance) for pod in theirs):
            yield opened, requests[opened.step.partition(".")[0]]


def _by_attempt(rows: Iterable[tuple[str, int, str]]) -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for uid, attempt, instance in rows:
        found[uid, str(attempt)].append(instance)
    return found


def _attempt(pod: PodStatus) -> tuple[str, str]:
    return pod.workflow_uid, pod.labels.get(ATTEMPT_LABEL, "")
