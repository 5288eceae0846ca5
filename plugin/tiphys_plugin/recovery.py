"""Put leases back that the ledger does not know although their pods live.

The ledger is a file, and files get lost. Starting from an empty one would hand
out GPUs that are in use. Pods say which attempts live, and the claim of an
attempt says which lease it was given.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import structlog

from tiphys.errors import IntegrityError, NotFoundError, UsageError
from tiphys.protocol.pipeline import CompiledPipeline
from tiphys.protocol.policy import ATTEMPT_LABEL, RUN_LABEL, STEP_LABEL, GpuRequest
from tiphys.records import AttemptClaim, SubmissionBound
from tiphys.store import RunLayout, Store, current_workflow, read_record
from tiphys.store.layout import parse_attempt
from tiphys.store.runs import concurrently
from tiphys_plugin import destination, pods
from tiphys_plugin.cluster import Cluster, PodStatus
from tiphys_plugin.ledger import AdmissionBackend, LeaseRequest, asked_for

_log = structlog.get_logger()


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
    for claim in concurrently(lambda place: read_record(store, layout.attempt(*place), AttemptClaim), open_places):
        theirs = [pod for pod in live if _attempt(pod) == (claim.uid, str(claim.attempt))]
        if claim.lease and any(pods.is_of_instance(pod, claim.instance) for pod in theirs):
            yield claim, requests[claim.step.partition(".")[0]]


def _by_attempt(rows: Iterable[tuple[str, int, str]]) -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for uid, attempt, instance in rows:
        found[uid, str(attempt)].append(instance)
    return found


def _attempt(pod: PodStatus) -> tuple[str, str]:
    return pod.workflow_uid, pod.labels.get(ATTEMPT_LABEL, "")
