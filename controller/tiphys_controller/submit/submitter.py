"""Interface between the controller and the engines that run Workflows.

The local engine, the Kubernetes API server and an argo-server implement it.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from tiphys.errors import IntegrityError, StoreError

if TYPE_CHECKING:
    from tiphys_controller.doctor import Obstacle

ADDRESS_PREFIX = "argo-server:"
"""Prefix of the name of a cluster of which only an address is known."""


def is_stable_cluster_name(cluster: str) -> bool:
    """Whether the name identifies one cluster for good. An address does not: it may lead to another cluster later."""
    return not cluster.startswith(ADDRESS_PREFIX)


class ShutdownStrategy(StrEnum):
    """How to stop a Workflow; the values are those of Argo's ``spec.shutdown``."""

    STOP = "Stop"
    """Programs can save a checkpoint, and the exit handler runs."""
    TERMINATE = "Terminate"


class LiveWorkflow(NamedTuple):
    """An existing Workflow object. ``running`` is False once its engine has finished or died."""

    name: str
    namespace: str
    uid: str
    phase: str
    running: bool
    finished_at: datetime | None = None
    """When it finished, or the last sign of life of its engine; None while it runs, or if unknown."""
    stopped: bool = False
    """Whether a person stopped it."""


class Submitter(Protocol):
    """Finds and creates Workflows of one cluster, or of the local engine."""

    @property
    def cluster(self) -> str:
        """Identity of the cluster."""

    def find(self, namespace: str, name: str) -> LiveWorkflow | None:
        """The live object; None if there is none."""

    def read(self, namespace: str, name: str) -> dict[str, Any] | None:
        """The whole object of that name; None if there is none."""

    def create(self, manifest: dict[str, Any]) -> LiveWorkflow:
        """Create the Workflow under its ``metadata.name``.

        Raises:
            ConflictError: an object of that name exists.
        """


class ClusterSubmitter(Submitter, Protocol):
    """A `Submitter` of a cluster with Argo, which can also stop and watch Workflows there."""

    def stop(self, workflow: LiveWorkflow, strategy: ShutdownStrategy = ShutdownStrategy.STOP) -> None:
        """Have Argo stop this Workflow, and no later one of the same name.

        Raises:
            NotFoundError: the Workflow is gone.
            ConflictError: another Workflow has its name now.
        """

    def watch(
        self, workflow: LiveWorkflow, stop: threading.Event, on_error: Callable[[StoreError], object] = lambda _: None
    ) -> Iterator[dict[str, Any]]:
        """Yield the Workflow now and at each change, until it has finished or ``stop`` is set.

        ``on_error`` is called when the server is out of reach; the watch continues once it is back.

        Raises:
            NotFoundError: the Workflow was deleted, or another one has its name.
        """


@runtime_checkable
class ObstacleFinder(Protocol):
    """A submitter that sees the pods of its cluster."""

    def find_obstacles(self, workflows: Collection[str], now: datetime) -> "list[Obstacle]":
        """What keeps these Workflows, each as ``namespace/name``, from going on; costs up to three listings of each
        namespace, however many they are.

        Raises:
            StoreError: the API server does not answer, or the account may not list Workflows or pods.
        """


def find_obstacles(
    submitter: Submitter | None, workflows: Iterable[str], now: datetime
) -> "defaultdict[str, list[Obstacle]]":
    """What running Workflows wait for, by ``namespace/name``; nothing where the submitter sees no pods.

    Raises:
        StoreError: the API server does not answer, or the account may not list Workflows or pods.
    """
    found, wanted = defaultdict[str, list["Obstacle"]](list), set(workflows) - {""}
    if wanted and isinstance(submitter, ObstacleFinder):
        for obstacle in submitter.find_obstacles(wanted, now):
            found[f"{obstacle.namespace}/{obstacle.workflow}"].append(obstacle)
    return found


@dataclass
class TenantSubmitter:
    """A `ClusterSubmitter` for one namespace: whatever a record says, nothing is read or changed in another."""

    submitter: ClusterSubmitter
    namespace: str
    announce: Callable[[dict[str, Any]], object] = lambda _: None
    """Called with each Workflow right before it is created."""

    @property
    def cluster(self) -> str:
        return self.submitter.cluster

    def find(self, namespace: str, name: str) -> LiveWorkflow | None:
        self._check(namespace, name)
        return self.submitter.find(namespace, name)

    def read(self, namespace: str, name: str) -> dict[str, Any] | None:
        self._check(namespace, name)
        return self.submitter.read(namespace, name)

    def create(self, manifest: dict[str, Any]) -> LiveWorkflow:
        metadata = manifest["metadata"]
        self._check(metadata.get("namespace", ""), metadata["name"])
        self.announce(manifest)
        return self.submitter.create(manifest)

    def stop(self, workflow: LiveWorkflow, strategy: ShutdownStrategy = ShutdownStrategy.STOP) -> None:
        self._check(workflow.namespace, workflow.name)
        self.submitter.stop(workflow, strategy)

    def watch(
        self, workflow: LiveWorkflow, stop: threading.Event, on_error: Callable[[StoreError], object] = lambda _: None
    ) -> Iterator[dict[str, Any]]:
        self._check(workflow.namespace, workflow.name)
        return self.submitter.watch(workflow, stop, on_error)

    def _check(self, namespace: str, name: str) -> None:
        if namespace != self.namespace:
            raise IntegrityError(
                f"the records name Workflow {namespace}/{name}, and this store belongs to namespace "
                f"{self.namespace}; nothing was done: find out which program wrote these records"
            )
