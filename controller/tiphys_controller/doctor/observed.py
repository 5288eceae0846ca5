"""Types of the cluster observation, and readers of Deployments.

Values that the account may not read are `UnknownValue`, with the reason, and
never guessed. Deployments are read as they are: which container matters, its
flags, its version, and the plugin mode. Pure.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from tiphys.kube import Object
from tiphys_controller.doctor.check import Finding, UnknownValue
from tiphys_controller.doctor.obstacles import Obstacle


@dataclass(frozen=True)
class UnreadSecret:
    """A Secret that exists, and whose content was not asked for."""


class Permission(NamedTuple):
    """A verb on a kind, such as ``patch workflowtasksets/status``."""

    verb: str
    resource: str
    group: str = "argoproj.io"

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}"


class DeploymentSearch(NamedTuple):
    """Result of a search for Deployments. ``unseen_reason`` says why there may be more; empty for a full search."""

    found: tuple[Object, ...]
    unseen_reason: str = ""


class PodReadiness(NamedTuple):
    """A pod of plugin or controller. ``not_ready_reason`` is empty for a ready pod.

    ``partial_failures`` are failures that a ready pod reports, such as the store
    of one namespace; it serves everything else. ``ledger_failure`` is why it cannot
    use the GPU ledger; empty if it can.
    """

    component: str
    namespace: str
    name: str
    not_ready_reason: str = ""
    partial_failures: tuple[str, ...] = ()
    ledger_failure: str = ""


class ServedStore(NamedTuple):
    """Arguments of a plugin: where it keeps the runs of the namespaces that it serves."""

    url: str
    """May contain ``{namespace}``."""
    namespaces: tuple[str, ...]
    """Empty: all."""


class ArtifactSettings(NamedTuple):
    """Where a namespace declares Argo's artifact repository. ``config_map`` is None if it does not exist."""

    store_url: str
    """Store of the runs of the namespace."""
    config_map: Object | None


class NodeClock(NamedTuple):
    """Offset of a node's clock from the API server's in seconds; negative: behind."""

    node: str
    ahead_seconds: float


@dataclass(frozen=True)
class WorkflowNamespace:
    """A namespace in which workflows run, with the names of objects that Tiphys and Argo need there."""

    name: str
    exists: bool | UnknownValue
    accounts: frozenset[str] | UnknownValue
    config_maps: frozenset[str] | UnknownValue
    secrets: Mapping[str, frozenset[str] | UnreadSecret | UnknownValue]
    """Keys of each needed Secret; empty if the Secret does not exist."""
    permissions: Mapping[tuple[str, Permission], bool] | UnknownValue
    """Whether an account has a permission."""
    store_access: Sequence[Finding] | UnknownValue | None = None
    """Of the credentials of the store in its Secret; None without a Secret, or if the store is not in S3."""
    artifact_settings: ArtifactSettings | UnknownValue | None = None
    """None if its store is not in a bucket, or not known."""


@dataclass(frozen=True)
class KueueObservation:
    """Kueue, in an installation whose GPUs it grants."""

    kinds: frozenset[str]
    """Kinds of kueue.x-k8s.io/v1beta2, in the plural, and their subresources; empty without Kueue."""
    local_queues: Mapping[str, frozenset[str]]
    """Names of the LocalQueues of each workflow namespace."""
    controller: DeploymentSearch
    """Deployments of Kueue."""


@dataclass(frozen=True)
class ClusterObservation:
    """Everything that the checks examine."""

    server: str
    version: str | UnknownValue
    argo_kinds: frozenset[str] | UnknownValue
    """Plural names of the kinds of argoproj.io; empty if the group does not exist."""
    tiphys_kinds: frozenset[str] | UnknownValue
    argo: DeploymentSearch
    """Controllers of Argo Workflows."""
    argo_settings: Mapping[str, str] | UnknownValue
    """The top level of the controller's ConfigMap."""
    tiphys: DeploymentSearch
    pods: tuple[PodReadiness, ...] | UnknownValue
    namespaces: tuple[WorkflowNamespace, ...]
    clocks: tuple[NodeClock, ...] | UnknownValue
    kueue: KueueObservation | UnknownValue | None = None
    """None if the GPUs are granted by the ledger of Tiphys."""
    keeps_answers: frozenset[str] | UnknownValue = frozenset()
    """Workflow namespaces in which Argo's controller lacks `CLEAR_ANSWERS`."""
    missing_loss_rights: tuple[str, ...] | UnknownValue = ()
    """Of the plugin, each with its namespace: without `LIST_NODE_LEASES` and `FAIL_PODS` it cannot tell lost nodes."""
    obstacles: tuple[Obstacle, ...] | UnknownValue = ()
    """Of the Workflows that have not ended."""
    ledger_damage: str = ""
    """Which record of the ledger's log is missing or damaged; empty if none is, or the ledger may not be read."""


CLEAR_ANSWERS = Permission("patch", "workflowtasksets/status")
"""The right to delete the answers of finished plugin steps."""
LIST_NODE_LEASES = Permission("list", "leases", "coordination.k8s.io")
FAIL_PODS = Permission("patch", "pods/status", "")


def find_account(deployment: Object) -> tuple[str, str]:
    """Namespace and name of the service account of a Deployment's pods."""
    name = deployment["spec"]["template"]["spec"].get("serviceAccountName") or "default"
    return deployment["metadata"]["namespace"], str(name)


ARGO_CONTROLLER = "workflow-controller"
_VERSION_LABEL = "app.kubernetes.io/version"
_VERSION = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")
_TAG = re.compile(f":{_VERSION.pattern}")


class ArgoVersion(NamedTuple):
    """A version of Argo Workflows."""

    major: int
    minor: int
    patch: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


class PluginMode(StrEnum):
    """Which process answers Argo's plugin steps."""

    SIDECAR = "sidecar"
    AGENT = "agent"


def is_argo_controller(deployment: Object) -> bool:
    """Whether a Deployment runs Argo's workflow-controller."""
    return any(ARGO_CONTROLLER in text for container in _containers(deployment) for text in _container_texts(container))


def find_argo_container(deployment: Object) -> Object:
    """The container of Argo's controller."""
    containers = _containers(deployment)
    return next(
        (container for container in containers if any(ARGO_CONTROLLER in text for text in _container_texts(container))),
        containers[0],
    )


def read_environment_value(container: Object, name: str) -> str | None:
    """Value of a variable; None if it is not set, empty if it has a ``valueFrom``."""
    for variable in container.get("env") or []:
        if variable.get("name") == name:
            return str(variable.get("value") or "")
    return None


def has_flag(container: Object, flag: str) -> bool:
    """Whether the program is started with ``flag``, or ``flag=true``."""
    arguments = [*(container.get("command") or []), *(container.get("args") or [])]
    return any(argument in (flag, f"{flag}=true") for argument in arguments)


def read_argo_version(deployment: Object) -> ArgoVersion | None:
    """Version in the image tag of Argo's controller, or in the label that Helm charts set; None without both."""
    image = str(find_argo_container(deployment).get("image") or "")
    label = str((deployment["metadata"].get("labels") or {}).get(_VERSION_LABEL) or "")
    found = _TAG.search(image) or _VERSION.match(label)
    return ArgoVersion(*map(int, found.groups())) if found else None


def read_component_label(deployment: Object) -> str:
    """``plugin`` or ``controller``."""
    labels = deployment["metadata"].get("labels") or {}
    return str(labels.get("app.kubernetes.io/component", ""))


def find_plugin_mode(deployments: tuple[Object, ...]) -> PluginMode | None:
    """Plugin mode of the installation; None without a plugin."""
    plugins = [deployment for deployment in deployments if read_component_label(deployment) == "plugin"]
    if not plugins:
        return None
    return PluginMode.AGENT if "agent" in _arguments(plugins[0]) else PluginMode.SIDECAR


def is_kueue_ledger(deployments: tuple[Object, ...]) -> bool:
    """Whether the plugin was installed with ``ledger.kind: kueue``."""
    return any("--ledger-kind=kueue" in _arguments(deployment) for deployment in deployments)


def find_served_store(deployments: tuple[Object, ...], namespace: str) -> ServedStore | None:
    """The store of the plugin that serves ``namespace``; None if no such plugin was found."""
    for deployment in deployments:
        arguments = _arguments(deployment)
        options = [argument.partition("=") for argument in arguments]
        url = next((value for option, _, value in options if option == "--store"), "")
        served = tuple(value for option, _, value in options if option == "--namespace")
        if url and (namespace in served or "--all-namespaces" in arguments):
            return ServedStore(url, served)
    return None


def format_kubectl_target(deployment: Object) -> str:
    """``-n NAMESPACE deployment/NAME`` for a command."""
    metadata = deployment["metadata"]
    return f"-n {metadata['namespace']} deployment/{metadata['name']}"


def _containers(deployment: Object) -> list[Object]:
    spec = ((deployment.get("spec") or {}).get("template") or {}).get("spec") or {}
    containers: list[Object] = spec.get("containers") or [{}]
    return containers


def _arguments(deployment: Object) -> list[str]:
    return [argument for container in _containers(deployment) for argument in container.get("args") or []]


def _container_texts(container: Object) -> list[str]:
    return [str(container.get("image") or ""), *(container.get("command") or []), *(container.get("args") or [])]
