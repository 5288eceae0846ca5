"""What was seen of a cluster. What may not be read is `Unknown`, with the reason, and never guessed."""

from collections.abc import Mapping
from dataclasses import dataclass
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
