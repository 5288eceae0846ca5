"""The plugin's view of a cluster: Workflows, the pods of attempts, and the workloads of gangs.

A narrow interface lets the same operations run against Kubernetes and against
`DirectoryCluster`, a folder for one machine. The local engine writes workflows
and pods into that folder as an API server would store them, and the plugin
reads them.
"""

import json
import os
import re
import secrets
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict

from tiphys.protocol.gang import GANG_LABEL, FirstFailure, GangBackend, GangPhase
from tiphys.protocol.phases import is_final_pod_phase
from tiphys.protocol.step_spec import ATTEMPT_LABEL
from tiphys.records.names import LOCAL_CLUSTER_PREFIX

_QUANTITY = re.compile(r"(\d{1,18})([kMGTPE]?)")
"""The API server writes 2000 as ``2k``, and stores no fraction of an extended resource."""
_THOUSANDS = {unit: 1000**power for power, unit in enumerate(("", *"kMGTPE"))}


def extended_resources(quantities: dict[str, Any] | None) -> Counter[str]:
    """The resources that device plugins offer, such as GPUs, by name; Kubernetes: IsExtendedResourceName."""
    found = Counter[str]()
    for name, quantity in (quantities or {}).items():
        digits = _QUANTITY.fullmatch(str(quantity)) if "/" in name and "kubernetes.io/" not in name else None
        if digits and int(digits[1]):
            found[name] = int(digits[1]) * _THOUSANDS[digits[2]]
    return found


def requested_resources(pod: dict[str, Any]) -> Counter[str]:
    """Extended resources that the scheduler counts for a pod.

    Source: Kubernetes, ``component-helpers/resource``, PodRequests.
    """
    spec = pod.get("spec") or {}
    containers = sum(map(_container_resources, spec.get("containers") or ()), Counter[str]())
    sidecars, startup_peak = Counter[str](), Counter[str]()
    for container in spec.get("initContainers") or ():
        if container.get("restartPolicy") == "Always":
            sidecars += _container_resources(container)
            startup_peak |= sidecars
        else:
            startup_peak |= sidecars + _container_resources(container)
    return (containers + sidecars) | startup_peak


def _container_resources(container: dict[str, Any]) -> Counter[str]:
    resources: dict[str, Any] = container.get("resources") or {}
    return extended_resources({**(resources.get("limits") or {}), **(resources.get("requests") or {})})


class PodStatus(BaseModel):
    """The part of a pod's status that decides whether an attempt lives and how it ended."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    namespace: str = "default"
    workflow_uid: str
    node: str
    """Unique name of the workflow node that the pod belongs to."""
    labels: dict[str, str] = {}
    phase: str = "Running"
    """Phase of Kubernetes: Pending, Running, Succeeded, Failed, or Unknown for a pod of a lost node."""
    exit_code: int | None = None
    reason: str = ""
    """Such as ``OOMKilled``, ``Evicted`` or ``Deleted``."""
    message: str = ""
    trouble_at: datetime | None = None
    """When the end of the pod began: its deletion, its eviction or the end of its program, whichever came first."""
    rank: int | None = None
    """Rank of the pod in its gang; None for a single pod."""
    uid: str = ""
    grace_seconds: float | None = None
    ending: bool = False
    """Whether the deletion of the pod was requested."""
    termination_message: str = ""
    """Termination message of the program, or the end of its log if the container is configured to use that."""
    host: str = ""
    """Name of the pod's node; empty while it has none, or if it is unknown."""
    is_gated: bool = False
    """Whether it waits until it is sent to a node (`Cluster.place_pod`)."""
    planned_host: str = ""
    """Host name label of the node that it was sent to; empty for others."""
    version: str = ""
    """Resource version."""
    resources: dict[str, int] = {}
    """Extended resources, such as GPUs, that its containers request, by name."""

    @property
    def finished(self) -> bool:
        """Whether no container of the pod runs any more."""
        return is_final_pod_phase(self.phase)

    @property
    def holds_gpus(self) -> bool:
        """Whether its GPUs are surely in use. A pod that waits for a node may request any number of them."""
        return bool(self.resources) and self.phase in ("Running", "Unknown")

    @property
    def occupies_gpus(self) -> bool:
        """Whether GPUs of a node are set aside for it: it runs, or waits on its node for its image."""
        return self.holds_gpus or (bool(self.resources) and bool(self.host))


@dataclass(frozen=True)
class GangStatus:
    """The workload that creates the pods of a gang."""

    backend: GangBackend
    namespace: str
    name: str
    uid: str
    stage: GangPhase
    first_failure: FirstFailure | None = None
    remaining: int | None = None
    """Members of an elastic gang that are not lost for good; None for other gangs, or if unknown."""
    succeeded: bool = False
    """Whether its controller says that it is complete."""
    made: int = 0
    """Members that an elastic gang has been given, lost ones included."""
    has_waiting_pods: bool = False
    """Whether pods of an elastic gang do not run yet."""
    version: str = ""
    """Resource version of the workload."""


class Cluster(Protocol):
    """Access to the cluster. Every method raises `StoreError` if the cluster does not answer."""

    @property
    def name(self) -> str:
        """Identity of the cluster, recorded in the binding of each submission."""

    def workflow(self, namespace: str, name: str) -> dict[str, Any] | None:
        """The live Workflow object; None if it does not exist."""

    def workflow_summary(self, namespace: str, name: str) -> dict[str, Any] | None:
        """Only ``metadata.uid``, ``spec.shutdown`` and ``status.phase`` of the live Workflow object.

        Waiting steps check repeatedly whether their workflow still runs, so the
        summary of a running workflow may be some seconds old.
        """

    def pods(self, namespace: str, run: str, workflow_uid: str, attempt: str) -> list[PodStatus]:
        """Pods of a workflow of ``run`` whose label ``tiphys.dev/attempt`` is ``attempt``. Deleted pods are absent.

        Raises:
            ConflictError: this plugin does not serve the namespace.
        """

    def attempt_pods(self, namespace: str | None = None, *, pending_only: bool = False) -> list[PodStatus]:
        """Pods with the label ``tiphys.dev/attempt``, of one namespace or of all that are served.

        ``pending_only`` selects those in the phase Pending, which are few where thousands run or have ended.
        """

    def delete_pod(self, pod: PodStatus) -> None:
        """Delete the pod as ``kubectl delete pod`` does: SIGTERM, its grace period, SIGKILL; nothing if it is gone.

        Raises:
            ConflictError: this plugin does not serve the pod's namespace.
        """

    def gang(self, backend: GangBackend, namespace: str, name: str, workflow_uid: str) -> GangStatus | None:
        """The workload of a gang, if the Workflow with this uid made it; None without one.

        The name is a function of run, step and attempt, so another Workflow can have made a workload of this name.
        """

    def delete_gang(self, gang: GangStatus) -> None:
        """Delete the workload and its pods, which get their grace period; nothing if it is gone."""

    def grow_gang(self, gang: GangStatus, made: int, min_members: int) -> None:
        """Have the workload of an elastic gang make members up to the number ``made``; nothing if it has changed since.

        The gang still ends when fewer than ``min_members`` are left.
        """

    def place_pod(self, pod: PodStatus, node: str) -> None:
        """Send a gated pod to a node, by its host name label; nothing if the pod has changed or is gone."""


class DirectoryCluster:
    """A folder in place of an API server: ``workflows/<name>.json``, ``pods/<name>.json``."""

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()

    @property
    def name(self) -> str:
        # Host and folder: storage may be shared with other machines, which cannot see the pods of this one.
        return f"{LOCAL_CLUSTER_PREFIX}{socket.gethostname()}:{self._path}"

    def workflow(self, namespace: str, name: str) -> dict[str, Any] | None:  # noqa: ARG002  one namespace here
        return self._read(self._path / "workflows" / f"{name}.json")

    def workflow_summary(self, namespace: str, name: str) -> dict[str, Any] | None:
        return self.workflow(namespace, name)

    def pods(self, namespace: str, run: str, workflow_uid: str, attempt: str) -> list[PodStatus]:  # noqa: ARG002
        return [pod for pod in self.workflow_pods(workflow_uid) if pod.labels.get(ATTEMPT_LABEL) == attempt]

    def attempt_pods(self, namespace: str | None = None, *, pending_only: bool = False) -> list[PodStatus]:
        return [
            pod
            for pod in self._pods()
            if ATTEMPT_LABEL in pod.labels and namespace in (None, pod.namespace)
            if not pending_only or pod.phase == "Pending"
        ]

    def delete_pod(self, pod: PodStatus) -> None:
        path = self._deletion_marker(pod.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def is_terminating(self, pod: str) -> bool:
        """Whether the deletion of the pod was requested; the engine that runs the pod polls it."""
        return self._deletion_marker(pod).exists()

    def gang(self, backend: GangBackend, namespace: str, name: str, workflow_uid: str) -> GangStatus | None:
        # The local engine is the workload: it creates all pods at once, ends them all, and creates no more.
        members = [pod for pod in self.workflow_pods(workflow_uid) if pod.labels.get(GANG_LABEL) == name]
        if not members:
            return None
        stage = GangPhase.FINISHED if all(pod.finished for pod in members) else GangPhase.ENDING
        lost = sum(pod.phase == "Failed" for pod in members)
        # All members exist before one can fail, and none is created again, so the count is complete.
        return GangStatus(backend, namespace, name, name, stage, remaining=len(members) - lost if lost else None)

    def delete_gang(self, gang: GangStatus) -> None:
        """Does nothing: the local engine ends the pods of a gang itself."""

    def grow_gang(self, gang: GangStatus, made: int, min_members: int) -> None:
        """Does nothing: the local engine creates all pods of a gang at once, and no others."""

    def place_pod(self, pod: PodStatus, node: str) -> None:
        """Does nothing: no pod of the local engine waits for a node."""

    def workflows(self) -> list[dict[str, Any]]:
        """All Workflow objects, by name."""
        return list(self._objects("workflows"))

    def workflow_pods(self, workflow_uid: str) -> list[PodStatus]:
        """All pods of one workflow, by name."""
        return [pod for pod in self._pods() if pod.workflow_uid == workflow_uid]

    def create_workflow(self, workflow: dict[str, Any]) -> bool:
        """Create a Workflow object; False if one of this name exists, which then stays unchanged."""
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
        for document in self._objects("pods"):
            pod = PodStatus.model_validate(document)
            yield pod.model_copy(update={"ending": True}) if self.is_terminating(pod.name) else pod

    def _deletion_marker(self, pod: str) -> Path:
        # A file of its own, so that each file has one writer: the engine writes the pod's own file.
        return self._path / "pods" / f"{pod}.end"

    def _objects(self, kind: str) -> Iterator[dict[str, Any]]:
        for path in sorted((self._path / kind).glob("*.json")):
            if (document := self._read(path)) is not None:
                yield document

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
