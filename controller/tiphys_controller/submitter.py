"""The one door from the controller to whatever runs Workflows."""

from typing import Any, NamedTuple, Protocol


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
