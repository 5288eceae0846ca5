"""Checks of the Tiphys installation, the API server and the clocks of the nodes. Each is pure."""

from tiphys_controller.doctor.finding import DoctorFinding, failed_finding, ok_finding, unknown_finding, warning_finding
from tiphys_controller.doctor.observed import (
    ClusterObservation,
    NodeClock,
    PluginMode,
    PodReadiness,
    UnknownValue,
    find_plugin_mode,
    format_kubectl_target,
    is_kueue_ledger,
    read_component_label,
)

_INSTALL = "helm install tiphys charts/tiphys -n tiphys --create-namespace --set store.url=…,image.repository=…"
_KUEUE_REMEDY = "kubectl get crd workloads.kueue.x-k8s.io && kubectl get pods -n kueue-system"
_COMPONENTS = {
    "plugin": "every plugin step stays Pending, or fails",
    "controller": "failed agent pods stay, and Argo's pages lack Events and descriptions; runs continue",
}


def check_tiphys_kinds(observed: ClusterObservation) -> list[DoctorFinding]:
    """The custom resources of Tiphys, one of which holds the quota ledger."""
    if isinstance(observed.tiphys_kinds, UnknownValue):
        return [unknown_finding("tiphys-kinds", observed.tiphys_kinds.reason)]
    if missing := [kind for kind in ("gpuledgers", "gpuledgerrecords") if kind not in observed.tiphys_kinds]:
        return [
            failed_finding(
                "tiphys-kinds",
                f"the cluster has no {' and no '.join(missing)} (tiphys.dev/v1alpha1), in which GPU quotas and leases "
                "are kept; Helm does not install kinds with an upgrade",
                "kubectl apply --server-side -f charts/tiphys/crds",
            )
        ]
    return [ok_finding("tiphys-kinds", "the kinds of Tiphys are there")]


def check_components(observed: ClusterObservation) -> list[DoctorFinding]:
    """Plugin and controller; if their pods are not ready, with the reason they give."""
    return [_check_component(name, consequence, observed) for name, consequence in _COMPONENTS.items()]


def _check_component(name: str, consequence: str, observed: ClusterObservation) -> DoctorFinding:
    deployments = [one for one in observed.tiphys.found if read_component_label(one) == name]
    if not deployments:
        return _absent_finding(name, consequence, observed.tiphys.unseen_reason)
    if isinstance(observed.pods, UnknownValue):
        return unknown_finding(name, observed.pods.reason)
    pods = [pod for pod in observed.pods if pod.component == name]
    if ready := [pod for pod in pods if not pod.not_ready_reason]:
        mode = find_plugin_mode(observed.tiphys.found) if name == "plugin" else None
        how = {PluginMode.AGENT: " (shared agent)", PluginMode.SIDECAR: " (service of the sidecars)", None: ""}[mode]
        return _ready_finding(name, f"{len(ready)} of {len(pods)} pods of the {name}{how} are ready", pods)
    sentence = pods[0].not_ready_reason if pods else "it has no pods"
    remedy = f"kubectl describe {format_kubectl_target(deployments[0])}" if not pods else _logs_command(pods[0])
    return failed_finding(name, f"the {name} is not ready: {sentence}; until then {consequence}", remedy)


def _ready_finding(name: str, sentence: str, pods: list[PodReadiness]) -> DoctorFinding:
    troubled = [pod for pod in pods if pod.not_ready_reason]
    if not troubled:
        complaints = dict.fromkeys(complaint for pod in pods for complaint in pod.partial_failures)
        if complaints:
            complaining = next(pod for pod in pods if pod.partial_failures)
            return warning_finding(
                name, f"{sentence}, but not for all: {'; '.join(complaints)}", _logs_command(complaining)
            )
        return ok_finding(name, sentence)
    return warning_finding(
        name, f"{sentence}; {troubled[0].name}: {troubled[0].not_ready_reason}", _logs_command(troubled[0])
    )


def _absent_finding(name: str, consequence: str, unseen: str) -> DoctorFinding:
    if unseen:
        return unknown_finding(name, f"no Deployment of the {name} was found: {unseen}")
    return failed_finding(name, f"the {name} is not installed: {consequence}", _INSTALL)


def check_ledger(observed: ClusterObservation) -> list[DoctorFinding]:
    """The services can use the GPU ledger. Without it, every step with GPUs waits."""
    pods = [] if isinstance(observed.pods, UnknownValue) else observed.pods
    troubled = next((pod for pod in pods if pod.ledger_failure), None)
    if troubled is None and observed.ledger_damage:
        homes = (deployment["metadata"]["namespace"] for deployment in observed.tiphys.found)
        remedy = f"kubectl logs -n {next(homes, 'NAMESPACE')} -l app.kubernetes.io/component=plugin"
        return [failed_finding("gpu-ledger", observed.ledger_damage, remedy)]
    if troubled is None:
        return []
    return [
        failed_finding(
            "gpu-ledger",
            f"no GPUs are granted: {troubled.ledger_failure}",
            _KUEUE_REMEDY
            if is_kueue_ledger(observed.tiphys.found)
            else f"tiphys queues apply -f FILE -n {troubled.namespace}",
        )
    ]


def check_release_namespace(observed: ClusterObservation) -> list[DoctorFinding]:
    """Pods of workflows can mount every Secret of their namespace, so the services' Secret belongs into another."""
    homes = {one["metadata"]["namespace"] for one in observed.tiphys.found if read_component_label(one) in _COMPONENTS}
    return [
        warning_finding(
            f"{one.name}/release",
            f"namespace {one.name} runs workflows and the services of Tiphys: a pod of any Workflow there can mount "
            "the Secret of the services, which opens the stores of all tenants",
            "install Tiphys in a namespace of its own, and name this one among its namespaces",
        )
        for one in observed.namespaces
        if one.name in homes
    ]


def _logs_command(pod: PodReadiness) -> str:
    return f"kubectl logs -n {pod.namespace} {pod.name}"


_WARN_SECONDS = 60.0
_FAIL_SECONDS = 600.0
"""S3 refuses requests whose signature is 900 s off, and a drifting clock gets there."""


def check_api_server(observed: ClusterObservation) -> list[DoctorFinding]:
    """The API server answers with its version."""
    if isinstance(observed.version, UnknownValue):
        return [unknown_finding("api-server", observed.version.reason)]
    return [ok_finding("api-server", f"{observed.server} answers, Kubernetes {observed.version}")]


def check_clocks(observed: ClusterObservation) -> list[DoctorFinding]:
    """Storage refuses what a machine with a wrong clock signs, and the times of records mislead people."""
    if isinstance(observed.clocks, UnknownValue):
        return [unknown_finding("clocks", observed.clocks.reason)]
    if not observed.clocks:
        return [unknown_finding("clocks", "no node has renewed its Lease")]
    wrong = sorted((one for one in observed.clocks if abs(one.ahead_seconds) >= _WARN_SECONDS), key=_sort_key)
    if wrong:
        return [_clock_finding(one) for one in wrong]
    return [
        ok_finding("clocks", f"the clocks of {len(observed.clocks)} nodes agree with the API server's within a minute")
    ]


def _clock_finding(clock: NodeClock) -> DoctorFinding:
    where = "ahead of" if clock.ahead_seconds > 0 else "behind"
    sentence = f"the clock of node {clock.node} is {abs(clock.ahead_seconds):,.0f} s {where} the API server's"
    remedy = f"set up time synchronisation on {clock.node} (chronyc tracking, timedatectl timesync-status)"
    if abs(clock.ahead_seconds) < _FAIL_SECONDS:
        return warning_finding("clocks", f"{sentence}; S3 refuses requests from 900 s on", remedy)
    return failed_finding(
        "clocks", f"{sentence}: S3 refuses what its pods sign", f"{remedy}; until then: kubectl cordon {clock.node}"
    )


def _sort_key(clock: NodeClock) -> float:
    return -abs(clock.ahead_seconds)
