"""The API server as one process sees it: Workflows, pods and the object of the GPU ledger."""

import copy
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

from support.builders.ledger import LedgerApi, ledger_api, queues
from tiphys_controller import LiveWorkflow
from tiphys_controller.submit.submitter import ShutdownStrategy
from tiphys_plugin import PodStatus

from chaos.scheduler import Process
from chaos.seams import EPOCH
from chaos.world import World
from tiphys.errors import ConflictError, StoreError
from tiphys.protocol.phases import is_final_workflow_phase
from tiphys.protocol.step_spec import ATTEMPT_LABEL, RUN_LABEL

GPUS_OF_QUEUE = 8
_Result = TypeVar("_Result")


class ClusterState:
    """What the API server keeps."""

    def __init__(self) -> None:
        self.workflows: dict[str, dict[str, Any]] = {}
        self.pods: dict[str, PodStatus] = {}
        self.ledger = ledger_api(queues(research={"A100": GPUS_OF_QUEUE})).store
        self.on_create: Callable[[dict[str, Any]], object] = lambda _: None
        """Told of each new Workflow, as Argo's controller is by its watch."""


class SimulatedCluster:
    """The API server for the services: `tiphys_plugin.Cluster`, and the controller's `ClusterSubmitter`."""

    name = cluster = "simulated"

    def __init__(self, world: World, state: ClusterState, process: Process) -> None:
        self._world = world
        self._state = state
        self._process = process

    def workflow(self, namespace: str, name: str) -> dict[str, Any] | None:
        return self._call("get workflow", lambda: copy.deepcopy(self._state.workflows.get(name)))

    def workflow_summary(self, namespace: str, name: str) -> dict[str, Any] | None:
        return self.workflow(namespace, name)

    def pods(self, namespace: str, run: str, workflow_uid: str, attempt: str) -> list[PodStatus]:
        return [
            pod
            for pod in self.attempt_pods()
            if (pod.workflow_uid, pod.labels[RUN_LABEL], pod.labels[ATTEMPT_LABEL]) == (workflow_uid, run, attempt)
        ]

    def attempt_pods(self, namespace: str | None = None, *, pending_only: bool = False) -> list[PodStatus]:
        pods = self._call("list pods", lambda: list(self._state.pods.values()))
        return [pod for pod in pods if not pending_only or pod.phase == "Pending"]

    def delete_pod(self, pod: PodStatus) -> None:
        raise NotImplementedError("nothing is preempted in this world")

    def gang(self, *_: Any) -> None:
        return None

    def delete_gang(self, _: Any) -> None:
        raise NotImplementedError("there is no gang in this world")

    def find(self, namespace: str, name: str) -> LiveWorkflow | None:
        found = self.workflow(namespace, name)
        return _live(found) if found is not None else None

    def read(self, namespace: str, name: str) -> dict[str, Any] | None:
        return self.workflow(namespace, name)

    def create(self, manifest: dict[str, Any]) -> LiveWorkflow:
        def effect() -> dict[str, Any]:
            metadata = manifest["metadata"]
            if metadata["name"] in self._state.workflows:
                raise ConflictError(f"a Workflow {metadata['name']} exists")
            uid = f"uid-{self._world.random.randbytes(4).hex()}"
            stored = copy.deepcopy(manifest) | {"status": {"phase": "Running"}}
            stored["metadata"]["uid"] = uid
            given = {entry["name"]: entry["value"] for entry in stored["spec"]["arguments"]["parameters"]}
            run, submission = given["tiphys-run"], int(given["tiphys-submission"] or "1")
            self._world.record("workflow created", name=metadata["name"], uid=uid, run=run, submission=submission)
            self._state.workflows[metadata["name"]] = stored
            self._state.on_create(stored)
            return stored

        return _live(self._call("create workflow", effect, is_write=True))

    def stop(self, workflow: LiveWorkflow, strategy: ShutdownStrategy = ShutdownStrategy.STOP) -> None:
        raise NotImplementedError("no alert of this world stops a Workflow")

    def watch(self, workflow: LiveWorkflow, stop: threading.Event, on_error: Any = None) -> Iterator[dict[str, Any]]:
        raise NotImplementedError("nobody of this world watches")

    def _call(self, operation: str, effect: Callable[[], _Result], *, is_write: bool = False) -> _Result:
        answer(self._world, self._process, operation, is_write=is_write)
        result = effect()
        self._world.travel("API server slow", self._process)
        if is_write and self._world.meets("API answers lost", self._process, 0.5):
            raise StoreError(f"{operation}: the answer of the API server got lost")
        return result


class SimulatedLedgerApi(LedgerApi):
    """The verbs that the ledger needs, with the faults of the API server."""

    def __init__(self, world: World, state: ClusterState, process: Process) -> None:
        super().__init__(state.ledger, self._fate)
        self._world = world
        self._process = process

    def get(self, *given: Any) -> Any:
        answer(self._world, self._process, "get ledger")
        return super().get(*given)

    def create(self, *given: Any) -> Any:
        answer(self._world, self._process, "create record", is_write=True)
        return super().create(*given)

    def replace(self, *given: Any, **options: Any) -> Any:
        answer(self._world, self._process, "replace ledger", is_write=True)
        written = super().replace(*given, **options)
        self._world.travel("API server slow", self._process)
        return written

    def list(self, *given: Any, **options: Any) -> Any:
        answer(self._world, self._process, "list records")
        return super().list(*given, **options)

    def delete(self, *given: Any) -> bool:
        answer(self._world, self._process, "delete record", is_write=True)
        return super().delete(*given)

    def _fate(self) -> str:
        return "lost" if self._world.meets("API answers lost", self._process, 0.5) else ""


def answer(world: World, process: Process, operation: str, *, is_write: bool = False) -> None:
    """The way of a request to the API server, which may not answer."""
    if is_write:
        world.before_write(process, "")
    world.travel("API server slow", process)
    for kind in ("API server down", "cut off from the API server"):
        if world.meets(kind, process):
            world.scheduler.sleep(world.random.uniform(0.2, 30.0))
            raise StoreError(f"{operation}: the API server did not answer")


def _live(workflow: dict[str, Any]) -> LiveWorkflow:
    metadata, status = workflow["metadata"], workflow["status"]
    finished = status.get("finished")
    return LiveWorkflow(
        metadata["name"],
        metadata["namespace"],
        metadata["uid"],
        status["phase"],
        not is_final_workflow_phase(status["phase"]),
        EPOCH + timedelta(seconds=finished) if finished is not None else None,
        stopped=bool(workflow["spec"].get("shutdown")),
    )
