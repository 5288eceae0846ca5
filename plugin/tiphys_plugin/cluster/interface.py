"""What the plugin may know of the cluster: the Workflow object, and the pods of an attempt.

`DirectoryCluster` is the embedded one. The local engine writes workflows and
pods into it as an API server would hold them, and the plugin reads them.
"""

import json
import os
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict

from tiphys.protocol.gang import GANG_LABEL, Backend, FirstFailure, Stage
from tiphys.protocol.step_spec import ATTEMPT_LABEL


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
    trouble_at: datetime | None = None
    """When its end began: its deletion, its eviction or the end of its program, whichever came first."""
    rank: int | None = None
    """Which one it is of the pods of a gang."""
    uid: str = ""
    grace_seconds: float | None = None
    """How long it may go on after it was told to end; None: not known."""
    ending: bool = False
    """Whether it was told to end."""
    told: str = ""
    """What its program left as termination message, or the end of its log where the container asks for that."""
    host: str = ""
    """Name of its node; empty while it has none, or nobody knows."""

    @property
    def finished(self) -> bool:
        return self.phase in ("Succeeded", "Failed")


@dataclass(frozen=True)
class GangStatus:
    """The object that makes the pods of a gang."""

    backend: Backend
    namespace: str
    name: str
    uid: str
    stage: Stage
    first_failure: FirstFailure | None = None
    remaining: int | None = None
    """How many members are not lost for good, where it may lose some; None where it may not, or nobody knows."""


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

    def pods(self, namespace: str, run: str, workflow_uid: str, attempt: str) -> list[PodStatus]:
        """Pods of a workflow of ``run`` whose label ``tiphys.dev/attempt`` is ``attempt``. Deleted pods are absent.

        Raises:
            ConflictError: this plugin does not look into that namespace.
        """

    def attempt_pods(self, namespace: str | None = None) -> list[PodStatus]:
        """Pods of all workflows that have the label ``tiphys.dev/attempt``, of one namespace or of all served."""

    def end_pod(self, pod: PodStatus) -> None:
        """Have it end as ``kubectl delete pod`` does: SIGTERM, its own grace period, SIGKILL; nothing if it is gone.

        Raises:
            ConflictError: this plugin does not look into its namespace.
        """

    def gang(self, backend: Backend, namespace: str, name: str) -> GangStatus | None:
        """The object that makes the pods of a gang; None if there is none, or it is of a kind that is not there."""

    def end_gang(self, gang: GangStatus) -> None:
        """Delete it, and with it its pods, which get their grace period; nothing if it is gone."""


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

    def pods(self, namespace: str, run: str, workflow_uid: str, attempt: str) -> list[PodStatus]:  # noqa: ARG002
        return [pod for pod in self.pods_of(workflow_uid) if pod.labels.get(ATTEMPT_LABEL) == attempt]

    def attempt_pods(self, namespace: str | None = None) -> list[PodStatus]:
        return [pod for pod in self._pods() if ATTEMPT_LABEL in pod.labels and namespace in (None, pod.namespace)]

    def end_pod(self, pod: PodStatus) -> None:
        path = self._end_of(pod.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def is_ending(self, pod: str) -> bool:
        """Whether the pod was told to end. The engine that runs it asks."""
        return self._end_of(pod).exists()

    def gang(self, backend: Backend, namespace: str, name: str) -> GangStatus | None:
        # The engine that runs the pods is what makes them: it ends them all, and makes no more.
        found = [pod for pod in self._pods() if pod.labels.get(GANG_LABEL) == name]
        if not found:
            return None
        stage = Stage.OVER if all(pod.finished for pod in found) else Stage.ENDING
        lost = sum(pod.phase == "Failed" for pod in found)
        # All are there before one can fail; none is ever made again.
        return GangStatus(backend, namespace, name, name, stage, remaining=len(found) - lost if lost else None)

    def end_gang(self, gang: GangStatus) -> None:
        """The engine does that."""

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
        for found in self._objects("pods"):
            pod = PodStatus.model_validate(found)
            yield pod.model_copy(update={"ending": True}) if self.is_ending(pod.name) else pod

    def _end_of(self, pod: str) -> Path:
        # Beside what the engine writes, and not in it: each file has one writer.
        return self._path / "pods" / f"{pod}.end"

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
