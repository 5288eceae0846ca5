"""What the plugin may know of the cluster: the Workflow object, and the pods of an attempt.

`DirectoryCluster` is the embedded one. The local engine writes workflows and
pods into it as an API server would hold them, and the plugin reads them.
"""

import json
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict

from tiphys.protocol.policy import ATTEMPT_LABEL


class PodStatus(BaseModel):
    """The part of a pod's status from which the end of an attempt is judged."""

    model_config = ConfigDict(frozen=True)

    name: str
    namespace: str = "default"
    workflow_uid: str
    node: str
    """Unique name of the workflow node that the pod belongs to."""
    labels: dict[str, str] = {}
    phase: str = "Running"
    """Kubernetes' word: Pending, Running, Succeeded, Failed, or Unknown for a pod of a lost node."""
    exit_code: int | None = None
    reason: str = ""
    """Such as ``OOMKilled``, ``Evicted`` or ``Deleted``."""
    message: str = ""

    @property
    def finished(self) -> bool:
        return self.phase in ("Succeeded", "Failed")


class Cluster(Protocol):
    """Read access to the cluster. Raises `StoreError` when it is out of reach."""

    @property
    def name(self) -> str:
        """Identity of the cluster, for the record of who runs a submission."""

    def workflow(self, namespace: str, name: str) -> dict[str, Any] | None:
        """The live Workflow object; None if it does not exist."""

    def glance(self, namespace: str, name: str) -> dict[str, Any] | None:
        """The same, but only ``metadata.uid``, ``spec.shutdown`` and ``status.phase``.

        For the question whether it goes on, which waiting steps ask again and
        again: while it does, the answer may be some seconds old.
        """

    def pods(self, namespace: str, workflow: str, workflow_uid: str, attempt: str) -> list[PodStatus]:
        """Pods of a workflow whose label ``tiphys.dev/attempt`` is ``attempt``. Deleted pods are absent.

        Raises:
            ConflictError: this plugin does not look into that namespace.
        """

    def attempt_pods(self, namespace: str | None = None) -> list[PodStatus]:
        """Pods of all workflows that have the label ``tiphys.dev/attempt``, of one namespace or of all served."""


class DirectoryCluster:
    """A folder in the place of an API server: ``workflows/<name>.json``, ``pods/<name>.json``."""

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()

    @property
    def name(self) -> str:
        # Host and folder: storage may be shared, and from another place nobody sees what runs here.
        return f"local:{socket.gethostname()}:{self._path}"

    def workflow(self, namespace: str, name: str) -> dict[str, Any] | None:  # noqa: ARG002  one namespace here
        return self._read(self._path / "workflows" / f"{name}.json")

    def glance(self, namespace: str, name: str) -> dict[str, Any] | None:
        return self.workflow(namespace, name)

    def pods(self, namespace: str, workflow: str, workflow_uid: str, attempt: str) -> list[PodStatus]:  # noqa: ARG002
        return [pod for pod in self.pods_of(workflow_uid) if pod.labels.get(ATTEMPT_LABEL) == attempt]

    def attempt_pods(self, namespace: str | None = None) -> list[PodStatus]:
        return [pod for pod in self._pods() if ATTEMPT_LABEL in pod.labels and namespace in (None, pod.namespace)]

    def workflows(self) -> list[dict[str, Any]]:
        """All Workflow objects, by name."""
        return list(self._objects("workflows"))

    def pods_of(self, workflow_uid: str) -> list[PodStatus]:
        """All pods of one workflow, by name."""
        return [pod for pod in self._pods() if pod.workflow_uid == workflow_uid]

    def create_workflow(self, workflow: dict[str, Any]) -> bool:
        """Create a Workflow object; False, and nothing changed, if one of its name exists."""
        path = self._path / "workflows" / f"{workflow['metadata']['name']}.json"
        temporary = self._write_temporary(path, workflow)
        try:
            path.hardlink_to(temporary)
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        return True

    def write_workflow(self, workflow: dict[str, Any]) -> None:
        """Create or replace a Workflow object, by its ``metadata.name``."""
        self._write(self._path / "workflows" / f"{workflow['metadata']['name']}.json", workflow)

    def write_pod(self, pod: PodStatus) -> None:
        """Create or replace a pod, by its name."""
        self._write(self._path / "pods" / f"{pod.name}.json", pod.model_dump(mode="json"))

    def _pods(self) -> Iterator[PodStatus]:
        return (PodStatus.model_validate(pod) for pod in self._objects("pods"))

    def _objects(self, kind: str) -> Iterator[dict[str, Any]]:
        for path in sorted((self._path / kind).glob("*.json")):
            if (found := self._read(path)) is not None:
                yield found

    @staticmethod
    def _read(path: Path) -> dict[str, Any] | None:
        try:
            document: dict[str, Any] = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        return document

    def _write(self, path: Path, document: dict[str, Any]) -> None:
        self._write_temporary(path, document).replace(path)

    @staticmethod
    def _write_temporary(path: Path, document: dict[str, Any]) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}-{secrets.token_hex(4)}.tmp")
        temporary.write_text(json.dumps(document))
        return temporary
