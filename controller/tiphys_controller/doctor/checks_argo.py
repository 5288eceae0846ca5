"""Checks whether the settings of Argo's controller suit Tiphys. Each is pure."""

from collections.abc import Callable

from tiphys.errors import UsageError
from tiphys.kube import Object
from tiphys.protocol.quantities import parse_go_duration_seconds
from tiphys_controller.doctor.finding import DoctorFinding, failed_finding, ok_finding, unknown_finding, warning_finding
from tiphys_controller.doctor.observed import (
    CLEAR_ANSWERS,
    ArgoVersion,
    ClusterObservation,
    PluginMode,
    UnknownValue,
    find_account,
    find_argo_container,
    find_plugin_mode,
    format_kubectl_target,
    has_flag,
    read_argo_version,
    read_environment_value,
)

_REQUEUE_VARIABLE = "DEFAULT_REQUEUE_TIME"
_PATCH_RATE_VARIABLE = "ARGO_AGENT_PATCH_RATE"
_FINALIZER_VARIABLE = "ARGO_POD_STATUS_CAPTURE_FINALIZER"
_PLUGINS_VARIABLE = "ARGO_EXECUTOR_PLUGINS"
_WRITE_BACK_VARIABLE = "INFORMER_WRITE_BACK"
_WORKFLOW_PLUGINS_VARIABLE = "ARGO_WORKFLOW_LEVEL_EXECUTOR_PLUGINS"
_DISABLE_AGENT_SETTING = "disableAgentPodCreation"
_DEFAULT_REQUEUE_SECONDS = 10.0
_SLOW_REQUEUE_SECONDS = 2.0
_SLOW_PATCH_SECONDS = 0.5
_WAITS_FOR_A_LATE_ANSWER = 2
"""Requeues until Argo goes on after an answer that came later than the timers beside its call: Argo takes the answer at
the first one, and starts what depends on the answer at the second."""
_NEEDED_KINDS = ("workflows", "workflowtasksets", "workflowtaskresults", "workflowtemplates")
FIRST_VERSIONS = (ArgoVersion(3, 7, 16), ArgoVersion(4, 0, 7), ArgoVersion(4, 1, 0))
"""The first usable patch of each tested minor version. Before 3.7.16 and 4.0.7 a step that refers to an output of a
skipped step can hang (Argo, ``docs/upgrading.md``)."""
FIRST_AGENT_VERSION = ArgoVersion(4, 1, 0)
"""Before it, Argo always makes agent pods, and its controller does not start with ``disableAgentPodCreation``."""


def check_requeue_time(observed: ClusterObservation) -> list[DoctorFinding]:
    """Requeues of Argo's controller decide how soon a step follows another, and how soon a late answer counts."""
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
            "requeue-time",
            f"{_REQUEUE_VARIABLE} is {seconds:g} s: a step waits for it once at most, a training twice for each late "
            "answer of the plugin",
        )
    state = "is not set, which means 10 s" if setting is None else f"is {seconds:g} s"
    return warning_finding(
        "requeue-time",
        f"{_REQUEUE_VARIABLE} of Argo's controller {state}: each step waits up to {seconds:g} s for nothing, a "
        f"training {_WAITS_FOR_A_LATE_ANSWER * seconds:g} s for each late answer of the plugin",
        f"kubectl set env {format_kubectl_target(deployment)} {_REQUEUE_VARIABLE}=1s",
    )


def check_agent_patch_rate(observed: ClusterObservation) -> list[DoctorFinding]:
    """In sidecar mode Argo's agent pod hands answers on at this interval; by default at the requeue time."""
    if find_plugin_mode(observed.tiphys.found) is PluginMode.AGENT:
        return []
    return [_check_deployment_patch_rate(one) for one in observed.argo.found]


def _check_deployment_patch_rate(deployment: Object) -> DoctorFinding:
    setting = read_environment_value(find_argo_container(deployment), _PATCH_RATE_VARIABLE)
    try:
        seconds = None if setting is None else parse_go_duration_seconds(setting)
    except UsageError:
        return unknown_finding(
            "patch-rate",
            f"{_PATCH_RATE_VARIABLE} of {format_kubectl_target(deployment)} is no plain duration ({setting!r})",
        )
    if seconds is not None and seconds <= _SLOW_PATCH_SECONDS:
        return ok_finding("patch-rate", f"Argo's agent pods hand answers on every {seconds:g} s")
    interval = f"DEFAULT_REQUEUE_TIME, since {_PATCH_RATE_VARIABLE} is not set" if seconds is None else f"{seconds:g} s"
    return warning_finding(
        "patch-rate",
        f"Argo's agent pods hand answers on only once per {interval}: each plugin step waits for it",
        f"kubectl set env {format_kubectl_target(deployment)} {_PATCH_RATE_VARIABLE}=200ms",
    )


def check_task_set_rights(observed: ClusterObservation) -> list[DoctorFinding]:
    """Argo's controller deletes the answers of finished plugin steps, for which its own manifests give it no right.

    Source: argo-workflows #13341; the Helm chart has it from 0.45.26 on.
    """
    if isinstance(observed.keeps_answers, UnknownValue):
        return [unknown_finding("task-set-rights", observed.keeps_answers.reason)]
    if not observed.argo.found:
        return []
    if not observed.keeps_answers:
        return [ok_finding("task-set-rights", "Argo's controller deletes the answers of finished plugin steps")]
    namespace, account = find_account(observed.argo.found[0])
    where = ", ".join(sorted(observed.keeps_answers))
    return [
        warning_finding(
            "task-set-rights",
            f"Argo's controller may not {CLEAR_ANSWERS} in {where}, so a run keeps the answers of all its plugin steps "
            "in one object: each further step is slower, and some 1,600 answers are too many for it",
            "kubectl create clusterrole argo-task-set-status --verb=patch "
            "--resource=workflowtasksets.argoproj.io/status && kubectl create clusterrolebinding argo-task-set-status "
            f"--clusterrole=argo-task-set-status --serviceaccount={namespace}:{account}",
        )
    ]


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
    """Argo must be one of the versions that compiled Workflows and the plugin mode work with."""
    return _check_each_controller(
        "argo-version", observed, lambda one: _check_deployment_version(one, find_plugin_mode(observed.tiphys.found))
    )


def is_supported(version: ArgoVersion, mode: PluginMode | None) -> bool:
    """Whether Tiphys works with a version of Argo. Versions newer than the tested ones count as supported."""
    if mode is PluginMode.AGENT:
        return version >= FIRST_AGENT_VERSION
    same_minor = (first for first in FIRST_VERSIONS if first[:2] == version[:2])
    return version >= next(same_minor, max(FIRST_VERSIONS))


def _check_deployment_version(deployment: Object, mode: PluginMode | None) -> DoctorFinding:
    version = read_argo_version(deployment)
    if version is None:
        return unknown_finding(
            "argo-version",
            f"neither the image tag nor a label of {format_kubectl_target(deployment)} has the version of Argo",
        )
    if is_supported(version, mode):
        newer = ", newer than the tested versions" if version[:2] > max(FIRST_VERSIONS)[:2] else ""
        return ok_finding("argo-version", f"Argo Workflows {version}{newer}")
    if mode is PluginMode.AGENT:
        return failed_finding(
            "argo-version",
            f"Argo Workflows is {version}: the shared agent (mode=agent) needs {FIRST_AGENT_VERSION} or newer",
            "upgrade Argo Workflows, or set mode=sidecar in the chart",
        )
    *earlier, last = map(str, FIRST_VERSIONS)
    return failed_finding(
        "argo-version",
        f"Argo Workflows is {version}: Tiphys needs at least {', '.join(earlier)} or {last}",
        "upgrade Argo Workflows",
    )


def check_informer_write_back(observed: ClusterObservation) -> list[DoctorFinding]:
    """A controller that writes its updates back to its own cache does not see them as events, and stops too early.

    Source: Argo ``workflow/controller/operator.go`` (``persistUpdates``); 4.0 changed the default, 4.1 removed the
    variable.
    """
    return [finding for one in observed.argo.found for finding in _check_deployment_write_back(one)]


def _check_deployment_write_back(deployment: Object) -> list[DoctorFinding]:
    version = read_argo_version(deployment)
    if version is None or version >= (4, 1):
        return []
    default = "true" if version.major < 4 else "false"
    if (read_environment_value(find_argo_container(deployment), _WRITE_BACK_VARIABLE) or default) == "false":
        return [ok_finding("write-back", "Argo's controller sees each of its own updates")]
    return [
        failed_finding(
            "write-back",
            f"Argo {version} does not see its own updates ({_WRITE_BACK_VARIABLE}): a step can hang after its answer",
            f"kubectl set env {format_kubectl_target(deployment)} {_WRITE_BACK_VARIABLE}=false",
        )
    ]


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
    versions = [version for one in observed.argo.found if (version := read_argo_version(one))]
    if mode is None or not all(is_supported(version, mode) for version in versions):
        return []  # a setting that such an Argo does not know would stop its controller
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
