"""Checks of the Tiphys installation, the API server and the clocks of the nodes. Each is pure."""

from collections.abc import Iterator

from tiphys_controller.doctor.check import Finding, UnknownValue, check, failed, known, not_checked, passed, warning
from tiphys_controller.doctor.observed import (
    ClusterObservation,
    PluginMode,
    PodReadiness,
    find_plugin_mode,
    format_kubectl_target,
    is_kueue_ledger,
    read_component_label,
)

_INSTALL = "helm install tiphys charts/tiphys -n tiphys --create-namespace --set store.url=…,image.repository=…"
_KUEUE_REMEDY = "kubectl get crd workloads.kueue.x-k8s.io && kubectl get pods -n kueue-system"
_COMPONENTS = ("plugin", "controller")
_SKEW_WARNING_SECONDS = 60.0
_SKEW_FAILURE_SECONDS = 600.0
"""S3 refuses requests whose signature is 900 s off, and a drifting clock gets there."""


@check("tiphys-kinds")
def check_tiphys_kinds(observed: ClusterObservation) -> Iterator[Finding]:
    """The custom resources of Tiphys, one of which holds the quota ledger."""
    kinds = known(observed.tiphys_kinds)
    if missing := [kind for kind in ("gpuledgers", "gpuledgerrecords") if kind not in kinds]:
        yield failed(
            f"the cluster has no {' and no '.join(missing)} (tiphys.dev/v1beta1), in which GPU quotas and leases are "
            "kept; Helm does not install kinds with an upgrade",
            "kubectl apply --server-side -f charts/tiphys/crds",
        )
    else:
        yield passed("the kinds of Tiphys are there")


@check("plugin")
def check_plugin(observed: ClusterObservation) -> Iterator[Finding]:
    """The plugin is ready; if its pods are not, with the reason they give."""
    mode = find_plugin_mode(observed.tiphys.found)
    form = {PluginMode.AGENT: " (shared agent)", PluginMode.SIDECAR: " (service of the sidecars)", None: ""}[mode]
    yield _check_component(observed, "plugin", "every plugin step stays Pending, or fails", form)


@check("controller")
def check_controller(observed: ClusterObservation) -> Iterator[Finding]:
    """The controller is ready; if its pods are not, with the reason they give."""
    consequence = "failed agent pods stay, and Argo's pages lack Events and descriptions; runs continue"
    yield _check_component(observed, "controller", consequence)


def _check_component(observed: ClusterObservation, name: str, consequence: str, form: str = "") -> Finding:
    deployments = [deployment for deployment in observed.tiphys.found if read_component_label(deployment) == name]
    if not deployments and observed.tiphys.unseen_reason:
        return not_checked(f"no Deployment of the {name} was found: {observed.tiphys.unseen_reason}")
    if not deployments:
        return failed(f"the {name} is not installed: {consequence}", _INSTALL)
    pods = [pod for pod in known(observed.pods) if pod.component == name]
    if ready := [pod for pod in pods if not pod.not_ready_reason]:
        return _judge_ready(f"{len(ready)} of {len(pods)} pods of the {name}{form} are ready", pods)
    sentence = pods[0].not_ready_reason if pods else "it has no pods"
    remedy = _logs_command(pods[0]) if pods else f"kubectl describe {format_kubectl_target(deployments[0])}"
    return failed(f"the {name} is not ready: {sentence}; until then {consequence}", remedy)


def _judge_ready(sentence: str, pods: list[PodReadiness]) -> Finding:
    """A component of which a pod is ready; others, or some of the stores that it serves, may not be."""
    if troubled := next((pod for pod in pods if pod.not_ready_reason), None):
        return warning(f"{sentence}; {troubled.name}: {troubled.not_ready_reason}", _logs_command(troubled))
    if complaining := next((pod for pod in pods if pod.partial_failures), None):
        complaints = "; ".join(dict.fromkeys(complaint for pod in pods for complaint in pod.partial_failures))
        return warning(f"{sentence}, but not for all: {complaints}", _logs_command(complaining))
    return passed(sentence)


@check("gpu-ledger")
def check_ledger(observed: ClusterObservation) -> Iterator[Finding]:
    """The services can use the GPU ledger. Without it, every step with GPUs waits."""
    pods = [] if isinstance(observed.pods, UnknownValue) else observed.pods
    if troubled := next((pod for pod in pods if pod.ledger_failure), None):
        is_kueue = is_kueue_ledger(observed.tiphys.found)
        remedy = _KUEUE_REMEDY if is_kueue else f"tiphys queues apply -f FILE -n {troubled.namespace}"
        yield failed(f"no GPUs are granted: {troubled.ledger_failure}", remedy)
    elif observed.ledger_damage:
        homes = (deployment["metadata"]["namespace"] for deployment in observed.tiphys.found)
        remedy = f"kubectl logs -n {next(homes, 'NAMESPACE')} -l app.kubernetes.io/component=plugin"
        yield failed(observed.ledger_damage, remedy)


@check("lost-nodes")
def check_lost_nodes(observed: ClusterObservation) -> Iterator[Finding]:
    """The plugin can end the trainings of lost nodes."""
    if missing := known(observed.missing_loss_rights):
        yield warning(
            f"the plugin may not {', '.join(missing)}: a training whose node is lost waits until Kubernetes gives up "
            "the node, which takes some minutes",
            "helm upgrade … --set nodes.detectLoss=true",
        )
    elif find_plugin_mode(observed.tiphys.found) is not None:
        yield passed("the plugin may end the trainings of lost nodes")


@check("release")
def check_release_namespace(observed: ClusterObservation) -> Iterator[Finding]:
    """Pods of workflows can mount every Secret of their namespace, so the services' Secret belongs into another."""
    services = (found for found in observed.tiphys.found if read_component_label(found) in _COMPONENTS)
    homes = {deployment["metadata"]["namespace"] for deployment in services}
    for namespace in observed.namespaces:
        if namespace.name in homes:
            yield warning(
                f"namespace {namespace.name} runs workflows and the services of Tiphys: a pod of any Workflow there "
                "can mount the Secret of the services, which opens the stores of all tenants",
                "install Tiphys in a namespace of its own, and name this one among its namespaces",
                namespace.name,
            )


def _logs_command(pod: PodReadiness) -> str:
    return f"kubectl logs -n {pod.namespace} {pod.name}"


@check("api-server")
def check_api_server(observed: ClusterObservation) -> Iterator[Finding]:
    """The API server answers with its version."""
    yield passed(f"{observed.server} answers, Kubernetes {known(observed.version)}")


@check("clocks")
def check_clocks(observed: ClusterObservation) -> Iterator[Finding]:
    """Storage refuses what a machine with a wrong clock signs, and the times of records mislead people."""
    clocks = known(known(observed.clocks) or UnknownValue("no node has renewed its Lease"))
    wrong = [clock for clock in clocks if abs(clock.ahead_seconds) >= _SKEW_WARNING_SECONDS]
    for clock in sorted(wrong, key=lambda clock: -abs(clock.ahead_seconds)):
        where = "ahead of" if clock.ahead_seconds > 0 else "behind"
        sentence = f"the clock of node {clock.node} is {abs(clock.ahead_seconds):,.0f} s {where} the API server's"
        remedy = f"set up time synchronisation on {clock.node} (chronyc tracking, timedatectl timesync-status)"
        if abs(clock.ahead_seconds) < _SKEW_FAILURE_SECONDS:
            yield warning(f"{sentence}; S3 refuses requests from 900 s on", remedy)
        else:
            until_then = f"{remedy}; until then: kubectl cordon {clock.node}"
            yield failed(f"{sentence}: S3 refuses what its pods sign", until_then)
    if not wrong:
        yield passed(f"the clocks of {len(clocks)} nodes agree with the API server's within a minute")
