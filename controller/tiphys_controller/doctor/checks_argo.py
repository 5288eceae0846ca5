"""Checks whether the settings of Argo's controller suit Tiphys. Each is pure."""

from collections.abc import Iterator

from tiphys.errors import UsageError
from tiphys.kube import Object
from tiphys.protocol.quantities import parse_go_duration_seconds
from tiphys_controller.doctor.check import Finding, UnknownValue, check, failed, known, not_checked, passed, warning
from tiphys_controller.doctor.observed import (
    CLEAR_ANSWERS,
    ArgoVersion,
    ClusterObservation,
    PluginMode,
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


@check("requeue-time")
def check_requeue_time(observed: ClusterObservation) -> Iterator[Finding]:
    """Requeues of Argo's controller decide how soon a step follows another, and how soon a late answer counts."""
    for deployment in _find_controllers(observed):
        setting = _read_seconds(deployment, _REQUEUE_VARIABLE)
        if isinstance(setting, UnknownValue):
            yield not_checked(setting.reason)
        elif setting is not None and setting <= _SLOW_REQUEUE_SECONDS:
            yield passed(
                f"{_REQUEUE_VARIABLE} is {setting:g} s: a step waits for it once at most, a training twice for each "
                "late answer of the plugin",
            )
        else:
            seconds = _DEFAULT_REQUEUE_SECONDS if setting is None else setting
            state = "is not set, which means 10 s" if setting is None else f"is {seconds:g} s"
            yield warning(
                f"{_REQUEUE_VARIABLE} of Argo's controller {state}: each step waits up to {seconds:g} s for nothing, a "
                f"training {_WAITS_FOR_A_LATE_ANSWER * seconds:g} s for each late answer of the plugin",
                f"kubectl set env {format_kubectl_target(deployment)} {_REQUEUE_VARIABLE}=1s",
            )


@check("patch-rate")
def check_agent_patch_rate(observed: ClusterObservation) -> Iterator[Finding]:
    """In sidecar mode Argo's agent pod hands answers on at this interval; by default at the requeue time."""
    is_sidecar = find_plugin_mode(observed.tiphys.found) is not PluginMode.AGENT
    for deployment in observed.argo.found if is_sidecar else ():
        seconds = _read_seconds(deployment, _PATCH_RATE_VARIABLE)
        if isinstance(seconds, UnknownValue):
            yield not_checked(seconds.reason)
        elif seconds is not None and seconds <= _SLOW_PATCH_SECONDS:
            yield passed(f"Argo's agent pods hand answers on every {seconds:g} s")
        else:
            unset = f"{_REQUEUE_VARIABLE}, since {_PATCH_RATE_VARIABLE} is not set"
            interval = unset if seconds is None else f"{seconds:g} s"
            yield warning(
                f"Argo's agent pods hand answers on only once per {interval}: each plugin step waits for it",
                f"kubectl set env {format_kubectl_target(deployment)} {_PATCH_RATE_VARIABLE}=200ms",
            )


def _read_seconds(deployment: Object, variable: str) -> float | UnknownValue | None:
    """A variable of Argo's controller that is a duration; None if it is not set."""
    setting = read_environment_value(find_argo_container(deployment), variable)
    try:
        return None if setting is None else parse_go_duration_seconds(setting)
    except UsageError:
        return UnknownValue(f"{variable} of {format_kubectl_target(deployment)} is no plain duration ({setting!r})")


@check("task-set-rights")
def check_task_set_rights(observed: ClusterObservation) -> Iterator[Finding]:
    """Argo's controller deletes the answers of finished plugin steps, for which its own manifests give it no right.

    Source: argo-workflows #13341; the Helm chart has it from 0.45.26 on.
    """
    keeps_answers = known(observed.keeps_answers)
    if not observed.argo.found:
        return
    if keeps_answers:
        namespace, account = find_account(observed.argo.found[0])
        yield warning(
            f"Argo's controller may not {CLEAR_ANSWERS} in {', '.join(sorted(keeps_answers))}, so a run keeps the "
            "answers of all its plugin steps in one object: each further step is slower, and some 1,600 answers are "
            "too many for it",
            "kubectl create clusterrole argo-task-set-status --verb=patch "
            "--resource=workflowtasksets.argoproj.io/status && kubectl create clusterrolebinding argo-task-set-status "
            f"--clusterrole=argo-task-set-status --serviceaccount={namespace}:{account}",
        )
    else:
        yield passed("Argo's controller deletes the answers of finished plugin steps")


@check("argo-kinds")
def check_argo_kinds(observed: ClusterObservation) -> Iterator[Finding]:
    """The custom resources of Argo Workflows exist."""
    kinds = known(observed.argo_kinds)
    if missing := [kind for kind in _NEEDED_KINDS if kind not in kinds]:
        yield failed(
            f"the cluster has no {', '.join(missing)} (argoproj.io/v1alpha1): Argo Workflows is not installed, or "
            "only in part",
            "helm install argo argo-workflows --repo https://argoproj.github.io/argo-helm -n argo --create-namespace",
        )
    else:
        yield passed("the kinds of Argo Workflows are there")


@check("argo-version")
def check_argo_version(observed: ClusterObservation) -> Iterator[Finding]:
    """Argo must be one of the versions that compiled Workflows and the plugin mode work with."""
    mode = find_plugin_mode(observed.tiphys.found)
    for deployment in _find_controllers(observed):
        yield _judge_version(deployment, mode)


def is_supported(version: ArgoVersion, mode: PluginMode | None) -> bool:
    """Whether Tiphys works with a version of Argo. Versions newer than the tested ones count as supported."""
    if mode is PluginMode.AGENT:
        return version >= FIRST_AGENT_VERSION
    same_minor = (first for first in FIRST_VERSIONS if first[:2] == version[:2])
    return version >= next(same_minor, max(FIRST_VERSIONS))


def _judge_version(deployment: Object, mode: PluginMode | None) -> Finding:
    version = read_argo_version(deployment)
    if version is None:
        target = format_kubectl_target(deployment)
        return not_checked(f"neither the image tag nor a label of {target} has the version of Argo")
    if is_supported(version, mode):
        newer = ", newer than the tested versions" if version[:2] > max(FIRST_VERSIONS)[:2] else ""
        return passed(f"Argo Workflows {version}{newer}")
    if mode is PluginMode.AGENT:
        return failed(
            f"Argo Workflows is {version}: the shared agent (mode=agent) needs {FIRST_AGENT_VERSION} or newer",
            "upgrade Argo Workflows, or set mode=sidecar in the chart",
        )
    *earlier, last = map(str, FIRST_VERSIONS)
    return failed(
        f"Argo Workflows is {version}: Tiphys needs at least {', '.join(earlier)} or {last}", "upgrade Argo Workflows"
    )


@check("write-back")
def check_informer_write_back(observed: ClusterObservation) -> Iterator[Finding]:
    """A controller that writes its updates back to its own cache does not see them as events, and stops too early.

    Source: Argo ``workflow/controller/operator.go`` (``persistUpdates``); 4.0 changed the default, 4.1 removed the
    variable.
    """
    for deployment in observed.argo.found:
        version = read_argo_version(deployment)
        if version is None or version >= (4, 1):
            continue
        default = "true" if version.major < 4 else "false"
        if (read_environment_value(find_argo_container(deployment), _WRITE_BACK_VARIABLE) or default) == "false":
            yield passed("Argo's controller sees each of its own updates")
        else:
            yield failed(
                f"Argo {version} does not see its own updates ({_WRITE_BACK_VARIABLE}): a step can hang after its "
                "answer",
                f"kubectl set env {format_kubectl_target(deployment)} {_WRITE_BACK_VARIABLE}=false",
            )


@check("executor-plugins")
def check_executor_plugins(observed: ClusterObservation) -> Iterator[Finding]:
    """In sidecar mode executor plugins must be enabled in Argo's controller."""
    if find_plugin_mode(observed.tiphys.found) is PluginMode.AGENT:
        yield passed("the shared agent answers, so Argo needs no executor plugins")
        return
    for deployment in _find_controllers(observed):
        container = find_argo_container(deployment)
        switch_on = f"kubectl set env {format_kubectl_target(deployment)} {_PLUGINS_VARIABLE}=true"
        if _is_switched_on(container, _PLUGINS_VARIABLE, "--executor-plugins"):
            yield passed("Argo takes executor plugins from the namespaces of workflows")
        elif _is_switched_on(container, _WORKFLOW_PLUGINS_VARIABLE, "--workflow-level-executor-plugins"):
            yield warning(
                "Argo takes executor plugins only from Workflows that bring them along (spec.executorPlugins)",
                switch_on,
            )
        else:
            yield failed(
                "executor plugins are switched off in Argo's controller: every plugin step would fail with 'no plugin "
                "executed the template'",
                switch_on,
            )


def _is_switched_on(container: Object, variable: str, flag: str) -> bool:
    return read_environment_value(container, variable) == "true" or has_flag(container, flag)


@check("agent-pods")
def check_agent_pods(observed: ClusterObservation) -> Iterator[Finding]:
    """Argo's ConfigMap and the plugin mode of Tiphys must agree on which process answers plugin steps."""
    mode = find_plugin_mode(observed.tiphys.found)
    versions = [version for deployment in observed.argo.found if (version := read_argo_version(deployment))]
    if mode is None or not all(is_supported(version, mode) for version in versions):
        return  # a setting that such an Argo does not know would stop its controller
    disabled = known(observed.argo_settings).get(_DISABLE_AGENT_SETTING, "").lower() == "true"
    found = observed.argo.found
    namespace = f" -n {found[0]['metadata']['namespace']}" if found else ""
    patch = f"kubectl patch configmap workflow-controller-configmap{namespace} --type merge -p"
    if disabled == (mode is PluginMode.AGENT):
        answering = "Argo makes none, and the shared agent answers" if disabled else "Argo makes one for each workflow"
        yield passed(f"agent pods: {answering}")
    elif disabled:
        yield failed(
            f"Argo makes no agent pods ({_DISABLE_AGENT_SETTING}), and Tiphys runs in sidecar mode inside of them: "
            "every plugin step, and every HTTP template, stays Pending for ever",
            f"""{patch} '{{"data":{{"{_DISABLE_AGENT_SETTING}":"false"}}}}', or install with mode=agent""",
        )
    else:
        yield failed(
            f"Tiphys runs its shared agent, and Argo makes agent pods, too ({_DISABLE_AGENT_SETTING} is not set): both "
            "answer, and steps fail with 'no plugin executed the template'",
            f"""{patch} '{{"data":{{"{_DISABLE_AGENT_SETTING}":"true"}}}}', or install with mode=sidecar""",
        )


@check("exit-codes")
def check_exit_codes(observed: ClusterObservation) -> Iterator[Finding]:
    """Without the finalizer, Argo often loses the exit code of a deleted pod."""
    for deployment in _find_controllers(observed):
        if read_environment_value(find_argo_container(deployment), _FINALIZER_VARIABLE) == "true":
            yield passed(f"{_FINALIZER_VARIABLE} keeps the exit codes of deleted pods")
        else:
            yield warning(
                f"{_FINALIZER_VARIABLE} is not set: of a pod that is deleted, as in a drain, the exit code is often "
                "lost, and its attempt counts as infrastructure instead of preemption",
                f"kubectl set env {format_kubectl_target(deployment)} {_FINALIZER_VARIABLE}=true",
            )


def _find_controllers(observed: ClusterObservation) -> tuple[Object, ...]:
    """Deployments of Argo's controller. Ends the check if there is none."""
    unseen = observed.argo.unseen_reason
    reason = f"Argo's controller was not found: {unseen}" if unseen else "no Deployment runs Argo's workflow-controller"
    return known(observed.argo.found or UnknownValue(reason))
