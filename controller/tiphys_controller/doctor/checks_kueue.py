"""Checks of an installation whose GPUs Kueue grants. Pure."""

from collections.abc import Iterator

from tiphys_controller.doctor.check import Finding, UnknownValue, check, failed, known, not_checked, passed, warning
from tiphys_controller.doctor.observed import ClusterObservation, DeploymentSearch

_NEEDED_KINDS = frozenset({"workloads", "workloads/status", "localqueues", "resourceflavors"})


@check("kueue")
def check_kueue(observed: ClusterObservation) -> Iterator[Finding]:
    """Kueue is there. None without ``ledger.kind: kueue``."""
    kueue = known(observed.kueue)
    if kueue is None:
        return
    if missing := sorted(_NEEDED_KINDS - kueue.kinds):
        yield failed(
            f"Kueue grants the GPUs (ledger.kind: kueue), and the API server has no {missing[0]} of "
            "kueue.x-k8s.io/v1beta2: every step with GPUs waits",
            "install Kueue 0.15 or newer, or helm upgrade tiphys charts/tiphys --reuse-values --set ledger.kind=tiphys",
        )
        return
    yield from _check_controller(kueue.controller)
    named = sorted(f"{namespace}/{name}" for namespace, queues in kueue.local_queues.items() for name in queues)
    yield passed(f"Kueue grants the GPUs; LocalQueues: {', '.join(named) or 'none'}")


@check("local-queues")
def check_local_queues(observed: ClusterObservation) -> Iterator[Finding]:
    """Each workflow namespace has a LocalQueue of Kueue."""
    kueue = observed.kueue
    if kueue is None or isinstance(kueue, UnknownValue) or not kueue.kinds >= _NEEDED_KINDS:
        return  # which `check_kueue` says
    for namespace, queues in kueue.local_queues.items():
        if not queues:
            yield warning(
                f"namespace {namespace} has no LocalQueue of Kueue: its steps with GPUs are rejected",
                f"create a LocalQueue in {namespace}, see docs/kueue.md",
                namespace,
            )


def _check_controller(controller: DeploymentSearch) -> Iterator[Finding]:
    waits = "every step with GPUs waits"
    if not controller.found and controller.unseen_reason:
        yield not_checked(controller.unseen_reason)
    elif not controller.found:
        yield warning(
            f"no Deployment has the label app.kubernetes.io/name=kueue; unless its controller runs elsewhere, {waits}",
            "install Kueue",
        )
    elif not any((deployment.get("status") or {}).get("readyReplicas") for deployment in controller.found):
        metadata = controller.found[0]["metadata"]
        yield failed(
            f"no pod of Kueue's Deployment {metadata['namespace']}/{metadata['name']} is ready: {waits}",
            f"kubectl describe pods -n {metadata['namespace']} -l app.kubernetes.io/name=kueue",
        )
