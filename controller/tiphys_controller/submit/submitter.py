"""The one door from the controller to whatever runs Workflows."""

import threading
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from tiphys.errors import StoreError

ADDRESS = "argo-server:"
"""So begins the name of a cluster of which only an address is known."""


def is_known(cluster: str) -> bool:
    """Whether this names one cluster for good. An address does not: what it leads to may be another one tomorrow."""
    return not cluster.startswith(ADDRESS)


class Shutdown(StrEnum):
    """How a Workflow is ended; the value is Argo's ``spec.shutdown``."""

    STOP = "Stop"
    """Programs may save, and the exit handler runs."""
    TERMINATE = "Terminate"


class LiveWorkflow(NamedTuple):
    """A Workflow object that exists. ``running`` is False once its engine is done or dead."""

    name: str
    namespace: str
    uid: str
    phase: str
    running: bool


class Submitter(Protocol):
    """Creates Workflows; the local engine implements it, and Kubernetes' API server (`kubernetes.submitter`)."""

    @property
    def cluster(self) -> str:
        """Identity of the cluster that the Workflows go to."""

    def find(self, namespace: str, name: str) -> LiveWorkflow | None:
        """The live object; None if there is none."""

    def create(self, manifest: dict[str, Any]) -> LiveWorkflow:
        """Create the Workflow under its ``metadata.name``.

        Raises:
            ConflictError: an object of that name exists.
        """


class ClusterSubmitter(Submitter, Protocol):
    """A `Submitter` of a cluster with Argo, which runs Workflows by itself: they are ended and watched from afar."""

    def stop(self, workflow: LiveWorkflow, how: Shutdown = Shutdown.STOP) -> None:
        """Have Argo end this Workflow, and no other that took its name.

        Raises:
            NotFoundError: it is gone.
            ConflictError: another one has its name now.
        """

    def watch(
        self, workflow: LiveWorkflow, stop: threading.Event, lost: Callable[[StoreError], object] = lambda _: None
    ) -> Iterator[dict[str, Any]]:
        """The Workflow as it is and whenever it changes, until it is over or ``stop`` is set.

        Args:
            workflow: Which one.
            stop: Ends it at the next change.
            lost: Told when the server is out of reach; the watch goes on once it is back.

        Raises:
            NotFoundError: it was deleted, or another one has its name.
        """
