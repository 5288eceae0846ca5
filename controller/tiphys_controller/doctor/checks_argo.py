"""Checks whether the settings of Argo's controller suit Tiphys. Each is pure."""

from collections.abc import Callable

from tiphys.errors import UsageError
from tiphys.kube import Object
from tiphys.protocol.quantities import parse_go_duration_seconds
from tiphys_controller.doctor.finding import DoctorFinding, failed_finding, ok_finding, unknown_finding, warning_finding
from tiphys_controller.doctor.observed import (
    ClusterObservation,
    PluginMode,
    UnknownValue,
    find_argo_container,
    find_plugin_mode,
    format_kubectl_target,
    has_flag,
    read_environment_value,
    read_image_version,
)

_REQUEUE_VARIABLE = "DEFAULT_REQUEUE_TIME"
_FINALIZER_VARIABLE = "ARGO_POD_STATUS_CAPTURE_FINALIZER"
_PLUGINS_VARIABLE = "ARGO_EXECUTOR_PLUGINS"
_WORKFLOW_PLUGINS_VARIABLE = "ARGO_WORKFLOW_LEVEL_EXECUTOR_PLUGINS"
_DISABLE_AGENT_SETTING = "disableAgentPodCreation"
_DEFAULT_REQUEUE_SECONDS = 10.0
_SLOW_REQUEUE_SECONDS = 2.0
_WAITS_OF_A_TRAINING = 5
"""Requeues that a training with one attempt waits for: one for admit, which has a timer, two for settle, two for
conclude."""
_NEEDED_KINDS = ("workflows", "workflowtasksets", "workflowtaskresults", "workflowtemplates")
FIRST_AGENT_VERSION = (4, 1)


def check_requeue_time(observed: ClusterObservation) -> list[DoctorFinding]:
    """Each plugin step takes one or two requeues of Argo's controller, which decide how fast a run is."""
    return _check_each_controller("requeue-time", observed, _check_deployment_requeue_time)


def _check_deployment_requeue_time(deployment: Object) -> DoctorFinding:
    setting = read_environment_value(find_argo_container(deployment), _REQUEUE_VARIABLE)
    try:
        seconds = _DEFAULT_REQUEUE_SECONDS if setting is None else parse_go_duration_seconds(setting)
    except UsageError:
        return unknown_finding(
            "requeue-time",
            f"{_REQUEUE_VARIABLE} of {format_kubectl_target(deployment)} is no plain duration ({setting!r})",
        )
    if seconds <= _SLOW_REQUEUE_SECONDS:
        return ok_finding(
            "requeue-time", f"{_REQUEUE_VARIABLE} is {seconds:g} s: a step waits for it once, a training five times"
        )
    state = "is not set, which means 10 s" if setting is None else f"is {seconds:g} s"
    return warning_finding(
        "requeue-time",
        f"{_REQUEUE_VARIABLE} of Argo's controller {state}: each step waits {seconds:g} s for nothing, each training "
        f"{_WAITS_OF_A_TRAINING * seconds:g} s",
        f"kubectl set env {format_kubectl_target(deployment)} {_REQUEUE_VARIABLE}=1s",
    )


def check_argo_kinds(observed: ClusterObservation) -> list[DoctorFinding]:
    """The custom resources of Argo Workflows exist."""
    if isinstance(observed.argo_kinds, UnknownValue):
        return [unknown_finding("argo-kinds", observed.argo_kinds.reason)]
    if missing := [kind for kind in _NEEDED_KINDS if kind not in observed.argo_kinds]:
        return [
            failed_finding(
                "argo-kinds",
                f"the cluster has no {', '.join(missing)} (argoproj.io/v1alpha1): Argo Workflows is not installed, "
                "or only in part",
                "helm install argo argo-workflows --repo https://argoproj.github.io/argo-helm -n argo "
                "--create-namespace",
            )
        ]
    return [ok_finding("argo-kinds", "the kinds of Argo Workflows are there")]


def check_argo_version(observed: ClusterObservation) -> list[DoctorFinding]:
    """Agent mode and plugins inside a Workflow need Argo 4.1."""
    return _check_each_controller(
        "argo-version", observed, lambda one: _check_deployment_version(one, find_plugin_mode(observed.tiphys.found))
    )


def _check_deployment_version(deployment: Object, mode: PluginMode | None) -> DoctorFinding:
    version = read_image_version(find_argo_container(deployment))
    if version is None:
        return unknown_finding(
            "argo-version", f"the image of {format_kubectl_target(deployment)} has no version in its tag"
        )
    number = f"{version[0]}.{version[1]}"
    if version >= FIRST_AGENT_VERSION:
        return ok_finding("argo-version", f"Argo Workflows {number}")
    sentence = (
        f"Argo Workflows is {number}: before 4.1 there is no shared agent (mode=agent), and no Workflow can bring its "
        "executor plugin along; only sidecar mode with a plugin that the cluster has works"
    )
    if mode is PluginMode.AGENT:
        return failed_finding(
            "argo-version", sentence, "upgrade Argo Workflows to 4.1, or set mode=sidecar in the chart"
        )
    return warning_finding("argo-version", sentence, "upgrade Argo Workflows to 4.1 or later")


def check_executor_plugins(observed: ClusterObservation) -> list[DoctorFinding]:
    """In sidecar mode executor plugins must be enabled in Argo's controller."""
    if find_plugin_mode(observed.tiphys.found) is PluginMode.AGENT:
        return [ok_finding("executor-plugins", "the shared agent answers, so Argo needs no executor plugins")]
    return _check_each_controller("executor-plugins", observed, _check_deployment_plugins)


def _check_deployment_plugins(deployment: Object) -> DoctorFinding:
    container = find_argo_container(deployment)
    if read_environment_value(container, _PLUGINS_VARIABLE) == "true" or has_flag(container, "--executor-plugins"):
        return ok_finding("executor-plugins", "Argo takes executor plugins from the namespaces of workflows")
    switch_on = f"kubectl set env {format_kubectl_target(deployment)} {_PLUGINS_VARIABLE}=true"
    if read_environment_value(container, _WORKFLOW_PLUGINS_VARIABLE) == "true" or has_flag(
        container, "--workflow-level-executor-plugins"
    ):
        return warning_finding(
            "executor-plugins",
            "Argo takes executor plugins only from Workflows that bring them along: compile with --executor-plugin",
            switch_on,
        )
    return failed_finding(
        "executor-plugins",
        "executor plugins are switched off in Argo's controller: every plugin step would fail with "
        "'no plugin executed the template'",
        switch_on,
    )


def check_agent_pods(observed: ClusterObservation) -> list[DoctorFinding]:
    """Argo's ConfigMap and the plugin mode of Tiphys must agree on which process answers plugin steps."""
    mode = find_plugin_mode(observed.tiphys.found)
    if mode is None:
        return []
    if isinstance(observed.argo_settings, UnknownValue):
        return [unknown_finding("agent-pods", observed.argo_settings.reason)]
    disabled = observed.argo_settings.get(_DISABLE_AGENT_SETTING, "").lower() == "true"
    if disabled == (mode is PluginMode.AGENT):
        answering = "Argo makes none, and the shared agent answers" if disabled else "Argo makes one for each workflow"
        return [ok_finding("agent-pods", f"agent pods: {answering}")]
    patch = f"kubectl patch configmap workflow-controller-configmap{_argo_namespace(observed)} --type merge -p"
    if disabled:
        return [
            failed_finding(
                "agent-pods",
                f"Argo makes no agent pods ({_DISABLE_AGENT_SETTING}), and Tiphys runs in sidecar mode inside "
                "of them: every plugin "
                "step, and every HTTP template, stays Pending for ever",
                f"""{patch} '{{"data":{{"{_DISABLE_AGENT_SETTING}":"false"}}}}', or install with mode=agent""",
            )
        ]
    return [
        failed_finding(
            "agent-pods",
            f"Tiphys runs its shared agent, and Argo makes agent pods, too ({_DISABLE_AGENT_SETTING} is not "
            "set): both answer, and "
            "steps fail with 'no plugin executed the template'",
            f"""{patch} '{{"data":{{"{_DISABLE_AGENT_SETTING}":"true"}}}}', or install with mode=sidecar""",
        )
    ]


def check_exit_codes(observed: ClusterObservation) -> list[DoctorFinding]:
    """Without the finalizer, Argo often loses the exit code of a deleted pod."""
    return _check_each_controller("exit-codes", observed, _check_deployment_exit_codes)


def _check_deployment_exit_codes(deployment: Object) -> DoctorFinding:
    if read_environment_value(find_argo_container(deployment), _FINALIZER_VARIABLE) == "true":
        return ok_finding("exit-codes", f"{_FINALIZER_VARIABLE} keeps the exit codes of deleted pods")
    return warning_finding(
        "exit-codes",
        f"{_FINALIZER_VARIABLE} is not set: of a pod that is deleted, as in a drain, the exit code is often "
        "lost, and its "
        "attempt counts as infrastructure instead of preemption",
        f"kubectl set env {format_kubectl_target(deployment)} {_FINALIZER_VARIABLE}=true",
    )


def _check_each_controller(
    name: str, observed: ClusterObservation, check: Callable[[Object], DoctorFinding]
) -> list[DoctorFinding]:
    if observed.argo.found:
        return [check(deployment) for deployment in observed.argo.found]
    if observed.argo.unseen_reason:
        return [unknown_finding(name, f"Argo's controller was not found: {observed.argo.unseen_reason}")]
    return [unknown_finding(name, "no Deployment runs Argo's workflow-controller")]


def _argo_namespace(observed: ClusterObservation) -> str:
    found = observed.argo.found
    return f" -n {found[0]['metadata']['namespace']}" if found else ""
