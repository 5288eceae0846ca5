"""Checks of an installation whose GPUs Kueue grants. Pure."""

from tiphys_controller.doctor.finding import DoctorFinding, failed_finding, ok_finding, unknown_finding, warning_finding
from tiphys_controller.doctor.observed import ClusterObservation, DeploymentSearch, UnknownValue

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
    findings = [] if _is_ready(kueue.controller) else [_controller_finding(kueue.controller)]
    findings += [
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


def _is_ready(controller: DeploymentSearch) -> bool:
    return any((one.get("status") or {}).get("readyReplicas") for one in controller.found)


def _controller_finding(controller: DeploymentSearch) -> DoctorFinding:
    if not controller.found and controller.unseen_reason:
        return unknown_finding("kueue", controller.unseen_reason)
    waits = "every step with GPUs waits"
    if not controller.found:
        sentence = (
            f"no Deployment has the label app.kubernetes.io/name=kueue; unless its controller runs elsewhere, {waits}"
        )
        return warning_finding("kueue", sentence, "install Kueue")
    place = "{namespace}/{name}".format(**controller.found[0]["metadata"])
    return failed_finding(
        "kueue",
        f"no pod of Kueue's Deployment {place} is ready: {waits}",
        f"kubectl describe pods -n {controller.found[0]['metadata']['namespace']} -l app.kubernetes.io/name=kueue",
    )
