"""Checks of Argo Workflows: what its controller is set to, and whether that suits Tiphys. Each is pure."""

import re
from collections.abc import Callable

from tiphys.kube import Object
from tiphys_controller.doctor.finding import Finding, failed, ok, unknown, warning
from tiphys_controller.doctor.observed import (
    Mode,
    Observed,
    Unknown,
    argo_container,
    has_flag,
    mode_of,
    place,
    variable,
    version_of,
)

_REQUEUE = "DEFAULT_REQUEUE_TIME"
_FINALIZER = "ARGO_POD_STATUS_CAPTURE_FINALIZER"
_PLUGINS = "ARGO_EXECUTOR_PLUGINS"
_WORKFLOW_LEVEL = "ARGO_WORKFLOW_LEVEL_EXECUTOR_PLUGINS"
_NO_AGENT = "disableAgentPodCreation"
_DEFAULT_REQUEUE_SECONDS = 10.0
_SLOW_REQUEUE_SECONDS = 2.0
_NEEDED_KINDS = ("workflows", "workflowtasksets", "workflowtaskresults", "workflowtemplates")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
FIRST_VERSION = (4, 1)


def requeue_time(observed: Observed) -> list[Finding]:
    """A plugin step takes two ticks of Argo's controller, so that its tick decides how fast a run is."""
    return _of_controllers("requeue-time", observed, _requeue_time)


def _requeue_time(deployment: Object) -> Finding:
    given = variable(argo_container(deployment), _REQUEUE)
    seconds = _DEFAULT_REQUEUE_SECONDS if given is None else duration_seconds(given)
    if seconds is None:
        return unknown("requeue-time", f"{_REQUEUE} of {place(deployment)} is no plain duration ({given!r})")
    if seconds <= _SLOW_REQUEUE_SECONDS:
        return ok("requeue-time", f"{_REQUEUE} is {seconds:g} s, so a plugin step takes about {2 * seconds:g} s")
    told = "is not set, which means 10 s" if given is None else f"is {seconds:g} s"
    return warning(
        "requeue-time",
        f"{_REQUEUE} of Argo's controller {told}: each plugin step takes {2 * seconds:g} s for nothing",
        f"kubectl set env {place(deployment)} {_REQUEUE}=500ms",
    )


def kinds(observed: Observed) -> list[Finding]:
    """Without Argo's kinds there are no Workflows."""
    if isinstance(observed.argo_kinds, Unknown):
        return [unknown("argo-kinds", observed.argo_kinds.reason)]
    if missing := [kind for kind in _NEEDED_KINDS if kind not in observed.argo_kinds]:
        return [
            failed(
                "argo-kinds",
                f"the cluster has no {', '.join(missing)} (argoproj.io/v1alpha1): Argo Workflows is not installed, "
                "or only in part",
                "helm install argo argo-workflows --repo https://argoproj.github.io/argo-helm -n argo "
                "--create-namespace",
            )
        ]
    return [ok("argo-kinds", "the kinds of Argo Workflows are there")]


def version(observed: Observed) -> list[Finding]:
    """Agent mode and plugins that a Workflow brings along came with Argo 4.1."""
    return _of_controllers("argo-version", observed, lambda one: _version(one, mode_of(observed.tiphys.found)))


def _version(deployment: Object, mode: Mode | None) -> Finding:
    found = version_of(argo_container(deployment))
    if found is None:
        return unknown("argo-version", f"the image of {place(deployment)} has no version in its tag")
    number = f"{found[0]}.{found[1]}"
    if found >= FIRST_VERSION:
        return ok("argo-version", f"Argo Workflows {number}")
    sentence = (
        f"Argo Workflows is {number}: before 4.1 there is no shared agent (mode=agent), and no Workflow can bring its "
        "executor plugin along; only sidecar mode with a plugin that the cluster has works"
    )
    if mode is Mode.AGENT:
        return failed("argo-version", sentence, "upgrade Argo Workflows to 4.1, or set mode=sidecar in the chart")
    return warning("argo-version", sentence, "upgrade Argo Workflows to 4.1 or later")


def executor_plugins(observed: Observed) -> list[Finding]:
    """In sidecar mode Argo must be told to look at executor plugins at all."""
    if mode_of(observed.tiphys.found) is Mode.AGENT:
        return [ok("executor-plugins", "the shared agent answers, so Argo needs no executor plugins")]
    return _of_controllers("executor-plugins", observed, _executor_plugins)


def _executor_plugins(deployment: Object) -> Finding:
    container = argo_container(deployment)
    if variable(container, _PLUGINS) == "true" or has_flag(container, "--executor-plugins"):
        return ok("executor-plugins", "Argo takes executor plugins from the namespaces of workflows")
    switch_on = f"kubectl set env {place(deployment)} {_PLUGINS}=true"
    if variable(container, _WORKFLOW_LEVEL) == "true" or has_flag(container, "--workflow-level-executor-plugins"):
        return warning(
            "executor-plugins",
            "Argo takes executor plugins only from Workflows that bring them along: compile with --executor-plugin",
            switch_on,
        )
    return failed(
        "executor-plugins",
        "executor plugins are switched off in Argo's controller: every plugin step would fail with "
        "'no plugin executed the template'",
        switch_on,
    )


def agent_pods(observed: Observed) -> list[Finding]:
    """Who answers plugin steps is said in two places, which must agree: Argo's ConfigMap and our mode."""
    mode = mode_of(observed.tiphys.found)
    if mode is None:
        return []
    if isinstance(observed.argo_settings, Unknown):
        return [unknown("agent-pods", observed.argo_settings.reason)]
    disabled = observed.argo_settings.get(_NO_AGENT, "").lower() == "true"
    if disabled == (mode is Mode.AGENT):
        who = "Argo makes none, and the shared agent answers" if disabled else "Argo makes one for each workflow"
        return [ok("agent-pods", f"agent pods: {who}")]
    patch = f"kubectl patch configmap workflow-controller-configmap{_argo_namespace(observed)} --type merge -p"
    if disabled:
        return [
            failed(
                "agent-pods",
                f"Argo makes no agent pods ({_NO_AGENT}), and Tiphys runs in sidecar mode inside of them: every plugin "
                "step, and every HTTP template, stays Pending for ever",
                f"""{patch} '{{"data":{{"{_NO_AGENT}":"false"}}}}', or install with mode=agent""",
            )
        ]
    return [
        failed(
            "agent-pods",
            f"Tiphys runs its shared agent, and Argo makes agent pods, too ({_NO_AGENT} is not set): both answer, and "
            "steps fail with 'no plugin executed the template'",
            f"""{patch} '{{"data":{{"{_NO_AGENT}":"true"}}}}', or install with mode=sidecar""",
        )
    ]


def exit_codes(observed: Observed) -> list[Finding]:
    """Without the finalizer the exit code of a deleted pod is lost half of the time."""
    return _of_controllers("exit-codes", observed, _exit_codes)


def _exit_codes(deployment: Object) -> Finding:
    if variable(argo_container(deployment), _FINALIZER) == "true":
        return ok("exit-codes", f"{_FINALIZER} keeps the exit codes of deleted pods")
    return warning(
        "exit-codes",
        f"{_FINALIZER} is not set: of a pod that is deleted, as in a drain, the exit code is often lost, and its "
        "attempt counts as infrastructure instead of preemption",
        f"kubectl set env {place(deployment)} {_FINALIZER}=true",
    )


def duration_seconds(text: str) -> float | None:
    """A duration of Go, such as ``500ms`` or ``1m30s``; None for anything else."""
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|s|m|h)", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def _of_controllers(name: str, observed: Observed, check: Callable[[Object], Finding]) -> list[Finding]:
    if observed.argo.found:
        return [check(deployment) for deployment in observed.argo.found]
    if observed.argo.unseen:
        return [unknown(name, f"Argo's controller was not found: {observed.argo.unseen}")]
    return [unknown(name, "no Deployment runs Argo's workflow-controller")]


def _argo_namespace(observed: Observed) -> str:
    found = observed.argo.found
    return f" -n {found[0]['metadata']['namespace']}" if found else ""
