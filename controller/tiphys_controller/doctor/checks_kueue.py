"""Checks of an installation whose GPUs Kueue grants. Pure."""

from tiphys_controller.doctor.finding import DoctorFinding, failed_finding, ok_finding, unknown_finding, warning_finding
from tiphys_controller.doctor.observed import ClusterObservation, UnknownValue

_NEEDED_KINDS = frozenset({"workloads", "workloads/status", "localqueues", "resourceflavors"})


def check_kueue(observed: ClusterObservation) -> list[DoctorFinding]:
    """Kueue is there, and each workflow namespace has a LocalQueue. None without ``ledger.kind: kueue``."""
    kueue = observed.kueue
    if kueue is None:
        return []
    if isinstance(kueue, UnknownValue):
        return [unknown_finding("kueue", kueue.reason)]
    if missing := sorted(_NEEDED_KINDS - kueue.kinds):
        return [
            failed_finding(
                "kueue",
                f"Kueue grants the GPUs (ledger.kind: kueue), and the API server has no {missing[0]} of "
                "kueue.x-k8s.io/v1beta2: every step with GPUs waits",
                "install Kueue 0.15 or newer, or helm upgrade tiphys charts/tiphys --reuse-values --set "
                "ledger.kind=tiphys",
            )
        ]
    findings = [
        warning_finding(
            f"{namespace}/local-queues",
            f"namespace {namespace} has no LocalQueue of Kueue: its steps with GPUs are rejected",
            f"create a LocalQueue in {namespace}, see docs/kueue.md",
        )
        for namespace, queues in kueue.local_queues.items()
        if not queues
    ]
    named = sorted(f"{namespace}/{name}" for namespace, queues in kueue.local_queues.items() for name in queues)
    return [*findings, ok_finding("kueue", f"Kueue grants the GPUs; LocalQueues: {', '.join(named) or 'none'}")]
