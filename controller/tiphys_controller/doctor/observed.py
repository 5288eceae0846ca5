"""Reading Deployments: which container matters, what it is told, its version, the mode of Tiphys. Pure.

What was seen of a cluster. What may not be read is `Unknown`, with the reason, and never guessed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from tiphys.kube import Object


@dataclass(frozen=True)
class Unknown:
    """Could not be read, and why."""

    reason: str


class Right(NamedTuple):
    """A verb on a kind, such as ``patch workflowtasksets/status``."""

    verb: str
    resource: str
    group: str = "argoproj.io"

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}"


class Deployments(NamedTuple):
    """Deployments that were looked for. ``unseen`` says why there may be more; empty if there are not."""

    found: tuple[Object, ...]
    unseen: str = ""


class PodSeen(NamedTuple):
    """A pod of plugin or controller. ``trouble`` is empty for one that is ready.

    ``complaints`` are what a ready one says does not work: the store of a
    namespace, or the ledger. It serves everything else.
    """

    component: str
    namespace: str
    name: str
    trouble: str = ""
    complaints: tuple[str, ...] = ()


class Clock(NamedTuple):
    """How far the clock of a node is ahead of the API server's; negative: behind."""

    node: str
    ahead_seconds: float


@dataclass(frozen=True)
class WorkflowNamespace:
    """A namespace in which workflows run. Names are those of the objects that Tiphys and Argo look for there."""

    name: str
    exists: bool | Unknown
    accounts: frozenset[str] | Unknown
    config_maps: frozenset[str] | Unknown
    secrets: Mapping[str, frozenset[str] | Unknown]
    """Of each Secret that is looked for, the keys that it has; empty if it is not there."""
    rights: Mapping[Right, bool] | Unknown
    """Of the account of workflows."""


@dataclass(frozen=True)
class Observed:
    """Everything that the checks look at."""

    server: str
    version: str | Unknown
    argo_kinds: frozenset[str] | Unknown
    """Plurals of the group argoproj.io; empty if there is no such group."""
    tiphys_kinds: frozenset[str] | Unknown
    argo: Deployments
    """Controllers of Argo Workflows."""
    argo_settings: Mapping[str, str] | Unknown
    """The top level of the controller's ConfigMap."""
    tiphys: Deployments
    pods: tuple[PodSeen, ...] | Unknown
    namespaces: tuple[WorkflowNamespace, ...]
    clocks: tuple[Clock, ...] | Unknown


ARGO_CONTROLLER = "workflow-controller"
_VERSION = re.compile(r":v?(\d+)\.(\d+)")


class Mode(StrEnum):
    """Who answers Argo's plugin steps."""

    SIDECAR = "sidecar"
    AGENT = "agent"


def is_argo_controller(deployment: Object) -> bool:
    """Whether it runs Argo's workflow-controller."""
    return any(ARGO_CONTROLLER in text for container in _containers(deployment) for text in _texts(container))


def argo_container(deployment: Object) -> Object:
    """The container of Argo's controller."""
    containers = _containers(deployment)
    return next((one for one in containers if any(ARGO_CONTROLLER in text for text in _texts(one))), containers[0])


def variable(container: Object, name: str) -> str | None:
    """Value of a variable; None if it is not set, empty if it comes from elsewhere."""
    for one in container.get("env") or []:
        if one.get("name") == name:
            return str(one.get("value") or "")
    return None


def has_flag(container: Object, flag: str) -> bool:
    """Whether the program is started with ``flag``, or ``flag=true``."""
    given = [*(container.get("command") or []), *(container.get("args") or [])]
    return any(one in (flag, f"{flag}=true") for one in given)


def version_of(container: Object) -> tuple[int, int] | None:
    """Major and minor version by the tag of the image; None for an image without one."""
    found = _VERSION.search(str(container.get("image") or ""))
    return (int(found[1]), int(found[2])) if found else None


def component(deployment: Object) -> str:
    """``plugin`` or ``controller``."""
    labels = deployment["metadata"].get("labels") or {}
    return str(labels.get("app.kubernetes.io/component", ""))


def mode_of(deployments: tuple[Object, ...]) -> Mode | None:
    """The mode of the installation; None where there is no plugin."""
    plugins = [one for one in deployments if component(one) == "plugin"]
    if not plugins:
        return None
    given = [argument for container in _containers(plugins[0]) for argument in container.get("args") or []]
    return Mode.AGENT if "agent" in given else Mode.SIDECAR


def place(deployment: Object) -> str:
    """``-n NAMESPACE deployment/NAME`` for a command."""
    metadata = deployment["metadata"]
    return f"-n {metadata['namespace']} deployment/{metadata['name']}"


def _containers(deployment: Object) -> list[Object]:
    spec = ((deployment.get("spec") or {}).get("template") or {}).get("spec") or {}
    found: list[Object] = spec.get("containers") or [{}]
    return found


def _texts(container: Object) -> list[str]:
    return [str(container.get("image") or ""), *(container.get("command") or []), *(container.get("args") or [])]
