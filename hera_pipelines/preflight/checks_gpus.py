"""Checks whether the queues can ever serve the requests for GPUs. Pure.

The quota scheduler decides, as for an empty cluster, so the reasons are those of `tiphys why`.
"""

from collections.abc import Iterator

from tiphys_controller.doctor.check import Finding, UnknownValue, check, failed, not_checked, passed, warning
from tiphys_controller.doctor.observed import is_kueue_ledger
from tiphys_plugin.quota.kueue.backend import find_unsupported
from tiphys_plugin.quota.lease import Admitted, Deferred, LeaseRequest, LedgerState, Rejected, StepAttempt
from tiphys_plugin.quota.queues import QueueRules, Queues, format_gpus
from tiphys_plugin.quota.scheduler.decide import decide_admission

from hera_pipelines.preflight.observation import PreflightObservation
from hera_pipelines.preflight.subject import PreflightSubject
from tiphys.protocol.step_spec import GPU_RESOURCE, GpuRequest, StepSpec
from tiphys.records import utc_now

_ANY_NAMESPACE = "default"


@check("gpus")
def check_gpus(subject: PreflightSubject, observed: PreflightObservation) -> Iterator[Finding]:
    """Each request for GPUs can be granted to this namespace."""
    if subject.gpu_steps and observed.queues_note:
        yield not_checked(observed.queues_note)
    for step in subject.gpu_steps:
        request = build_request(subject, step, observed.queues)
        if not isinstance(observed.cluster, UnknownValue) and is_kueue_ledger(observed.cluster.tiphys.found):
            yield _check_kueue(subject, observed, request)
        elif isinstance(observed.queues, UnknownValue):
            if observed.unasked:
                continue
            yield not_checked(observed.queues.reason, "give the queue file with --queues FILE", step.name)
        else:
            yield _decide(observed, request)


def build_request(subject: PreflightSubject, step: StepSpec, queues: QueueRules | UnknownValue) -> LeaseRequest:
    """The request that the first attempt of ``step`` will make.

    Where the namespace is not known, it is one that may use the queue.
    """
    queue = queues.find(step.gpu.queue) if isinstance(queues, Queues) and step.gpu else None
    allowed = queue.namespaces if queue else None
    namespace, name = subject.namespace or (allowed[0] if allowed else _ANY_NAMESPACE), subject.pipeline.name
    node = f"preflight.{step.name}"
    attempt = StepAttempt("preflight", namespace, name, name, step.name, node, node, number=1)
    return LeaseRequest.from_gpu_request(step.gpu or GpuRequest(gpus=1), attempt)


def _decide(observed: PreflightObservation, request: LeaseRequest) -> Finding:
    assert not isinstance(observed.queues, UnknownValue)
    wanted = f"{format_gpus(request.gpus, request.type_text)} of queue {request.queue}"
    wants_some_nodes = request.type_text or request.min_gpu_memory_mb
    admission = decide_admission(LedgerState(queues=observed.queues), request, arrival=1, now=utc_now())
    match admission:
        case Rejected():
            remedy = "change the request, or the queues with `tiphys queues apply`"
            return failed(f"{admission.reason}: {admission.message}", remedy, request.step)
        case Deferred():
            remedy = f"see `tiphys queues show`, and after the submission `tiphys why RUN/{request.step}`"
            reasons = "; ".join(f"{reason.reason}: {reason.message}" for reason in admission.reasons)
            return warning(f"{wanted} would not be granted even if nothing else ran: {reasons}", remedy, request.step)
        case Admitted() if observed.queues is None and request.resource != GPU_RESOURCE and wants_some_nodes:
            sentence = f"no flavor says which nodes have the wanted GPUs, so any with {request.resource} may run it"
            remedy = "declare queues with a flavor of this resource, or select nodes with node_selector"
            return warning(sentence, remedy, request.step)
        case Admitted() if observed.queues is None:
            return passed(f"{format_gpus(request.gpus, request.type_text)}: no queues are declared", request.step)
        case _:
            return passed(f"{wanted} can be granted", request.step)


def _check_kueue(subject: PreflightSubject, observed: PreflightObservation, request: LeaseRequest) -> Finding:
    assert not isinstance(observed.cluster, UnknownValue)
    if (refusal := find_unsupported(request)) is not None:
        what, _, remedy = refusal.rpartition("; ")
        return failed(f"UnsupportedByKueue: {what}", remedy, request.step)
    kueue = observed.cluster.kueue
    if kueue is None or isinstance(kueue, UnknownValue):
        reason = kueue.reason if isinstance(kueue, UnknownValue) else "nothing is known of Kueue"
        return not_checked(reason, place=request.step)
    queues = kueue.local_queues.get(subject.namespace, frozenset())
    if request.queue not in queues:
        return failed(
            f"QueueUnknown: there is no LocalQueue {request.queue} in namespace {subject.namespace}; it has: "
            f"{', '.join(sorted(queues)) or 'none'}",
            f"name one of them, or create a LocalQueue {request.queue}; see docs/kueue.md",
            request.step,
        )
    return passed(f"LocalQueue {request.queue} exists; Kueue decides about quota", request.step)
