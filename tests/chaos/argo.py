"""Argo's part: its workflow controller walks the tasks of each Workflow, asks the plugin and runs the pods.

It keeps its state in the Workflow, so that a pause is all that a restart of it means here. It repeats a call that was
not answered, to any replica, and sometimes one that was.
"""

import json
import re
from typing import Any

from tiphys_plugin import PodStatus

from chaos.cluster import ClusterState
from chaos.programs import GRACE_SECONDS, Pod, prepare, training
from chaos.scheduler import Process
from chaos.services import GPUS, Replica
from chaos.world import NAMESPACE, World
from tiphys.protocol.execute_api import ExecuteReply
from tiphys.protocol.operations import ADMIT_OUTPUTS
from tiphys.protocol.step_spec import ATTEMPT_LABEL, RUN_LABEL, STEP_LABEL
from tiphys.records import CheckpointRef

_MOST_TRIES = 60
_SHUTDOWN_MESSAGE = "Stopped with strategy 'Stop'"
_REF = re.compile(r"(?:(.+)/)?(\d+)-(\d+)")


class WorkflowGoneError(Exception):
    """The Workflow was deleted."""


class WorkflowStoppedError(Exception):
    """``argo stop`` was requested: no more nodes, and the exit handler at once, whatever the pods do."""


class Argo:
    """Argo's workflow controller, its agents, and the kubelets.

    Attributes:
        pods: Every pod that was ever started, by name.
        ends: Status of the last Workflow of each run that stands still, because that came to its end.
    """

    def __init__(self, world: World, state: ClusterState, replicas: list[Replica]) -> None:
        self._world = world
        self._state = state
        self._replicas = replicas
        self.process = Process("argo")
        self.pods: dict[str, Pod] = {}
        self.ends: dict[str, str] = {}
        self._newest: dict[str, int] = {}
        """Number of the last submission of each run."""
        state.on_create = self._begin

    def delete_workflow(self, name: str) -> None:
        """Delete a Workflow, as a person does: its pods get SIGTERM, and are gone after their grace period."""
        self._world.record("workflow deleted", name=name, uid=self._state.workflows[name]["metadata"]["uid"])
        uid = self._state.workflows.pop(name)["metadata"]["uid"]
        for pod in self.pods.values():
            if pod.status is not None and pod.status.workflow_uid == uid:
                self._world.scheduler.spawn(self.process, f"delete-{pod.name}", lambda pod=pod: self.delete_pod(pod))
        self._world.scheduler.changed()

    def stop_workflow(self, name: str) -> None:
        """``argo stop``: pods get SIGTERM and their grace period, and nothing waits for them."""
        workflow = self._state.workflows[name]
        workflow["spec"]["shutdown"] = "Stop"
        for pod in self.pods.values():
            if pod.status is not None and pod.status.workflow_uid == workflow["metadata"]["uid"]:
                self._world.scheduler.spawn(self.process, f"stop-{pod.name}", lambda pod=pod: self.terminate_pod(pod))
        self._world.scheduler.changed()

    def delete_pod(self, pod: Pod, message: str = "pod deleted") -> None:
        """Delete a pod with its grace period."""
        self.terminate_pod(pod, "Deleted", message)
        self._state.pods.pop(pod.name, None)
        self._world.scheduler.changed()

    def terminate_pod(self, pod: Pod, reason: str = "", message: str = "") -> None:
        """SIGTERM, and SIGKILL after the grace period."""
        if pod.has_ended:
            return
        pod.terminate()
        self._world.scheduler.wait_for(lambda: pod.has_ended, GRACE_SECONDS)
        if not pod.has_ended:
            pod.kill(137, reason, message)

    def _begin(self, workflow: dict[str, Any]) -> None:
        name = workflow["metadata"]["name"]
        self._world.scheduler.spawn(self.process, name, lambda: self._walk(workflow), expected=(WorkflowGoneError,))

    def _walk(self, workflow: dict[str, Any]) -> None:
        walk = WorkflowWalk(self, self._world, self._state, workflow)
        self._newest[walk.run] = max(walk.submission, self._newest.get(walk.run, 0))
        self.ends.pop(walk.run, None)
        status, failures = "Succeeded", "null"
        try:
            for task in [task["name"] for task in workflow["spec"]["templates"][0]["dag"]["tasks"]]:
                if not (walk.train(task) if task == "fit" else walk.step(task)):
                    status = "Failed"
                    break
        except WorkflowStoppedError:
            status, failures = "Failed", json.dumps([{"displayName": walk.name, "message": _SHUTDOWN_MESSAGE}])
        walk.finalize(status, json.dumps(failures))
        workflow["status"] |= {"phase": status, "finished": self._world.scheduler.now}
        if walk.submission == self._newest[walk.run]:
            self.ends[walk.run] = status
        self._world.record("workflow ended", name=workflow["metadata"]["name"], uid=walk.uid, status=status)

    def choose_replica(self) -> Replica:
        """The replica that the Service leads the next call to."""
        return self._world.random.choice(self._replicas)


class WorkflowWalk:
    """One Workflow on its way."""

    def __init__(self, argo: Argo, world: World, state: ClusterState, workflow: dict[str, Any]) -> None:
        self._argo = argo
        self._world = world
        self._state = state
        self._workflow = workflow
        self.name, self.uid = workflow["metadata"]["name"], workflow["metadata"]["uid"]
        given = {entry["name"]: entry["value"] for entry in workflow["spec"]["arguments"]["parameters"]}
        self.run, self.submission = given["tiphys-run"], int(given["tiphys-submission"] or "1")
        self._given_submission = given["tiphys-submission"]
        self._is_finalizing = False

    def step(self, task: str) -> bool:
        """A step with a gate: admit, run, conclude."""
        admitted = self._call({"op": "admit", "step": task, "node": f"{self.name}.{task}.admit", "item": ""})
        if admitted.phase != "Succeeded":
            return False
        status, code = "Skipped", ""
        if (values := _outputs(admitted))["run"] == "true":
            for number in range(4):  # the container's own retries
                pod = self._start_pod(task, values, f"{self.name}.{task}.run({number})", number, outputs=f"/{number}")
                pod.start(prepare)
                status, code = self._await_pod(pod)
                if status == "Succeeded":
                    break
            self._set_phase(f"{self.name}.{task}.run", status)
        body = {"op": "conclude", "step": task, "node": f"{self.name}.{task}.conclude", "item": ""}
        return self._call({**body, "status": status, "exit_code": code}).phase == "Succeeded"

    def train(self, task: str) -> bool:
        """The tries of a training, each with its own admit and conclude."""
        for number in range(_MOST_TRIES):
            admitted = self._call({"op": "admit", "step": task, "node": self._node(task, number, "admit"), "item": ""})
            if admitted.phase == "Error":
                self._world.scheduler.sleep(5.0)
                continue
            if admitted.phase != "Succeeded":
                return False
            status, code = "Skipped", ""
            if (values := _outputs(admitted))["run"] == "true":
                start = _parse_ref(values["lineage"], values["resume-from"])
                pod = self._start_pod(task, values, f"{self.name}.{task}({number}).run", 0, gpus=GPUS)
                pod.start(training(self._world, start, asynchronous=self._world.random.random() < 0.5))
                status, code = self._await_pod(pod)
                self._set_phase(f"{self.name}.{task}({number}).run", status)
            body = {"op": "conclude", "step": task, "node": self._node(task, number, "conclude"), "item": ""}
            concluded = self._call({**body, "status": status, "exit_code": code})
            if concluded.phase != "Error":
                return concluded.phase == "Succeeded"
            self._world.scheduler.sleep(5.0)
        return False

    def finalize(self, status: str, failures: str) -> None:
        """The exit handler."""
        self._is_finalizing = True
        self._call({"op": "finalize", "node": f"{self.name}.onExit", "status": status, "failures": failures})

    def _set_phase(self, node: str, phase: str) -> None:
        """Show the end of a program in the Workflow."""
        self._workflow["status"].setdefault("nodes", {})[node] = {"name": node, "phase": phase}

    def _node(self, task: str, number: int, part: str) -> str:
        return f"{self.name}.{task}({number}).{part}"

    def _start_pod(
        self, task: str, values: dict[str, str], node: str, number: int, *, gpus: int = 0, outputs: str = ""
    ) -> Pod:
        self._check()
        self._world.scheduler.sleep(self._world.random.uniform(0.5, 5.0))
        self._check()
        labels = {RUN_LABEL: values["run-id"], STEP_LABEL: task, ATTEMPT_LABEL: values["attempt"]}
        name = f"{self.name}-{task}-{values['attempt']}-{number}-{self._world.random.randbytes(2).hex()}"
        status = PodStatus(
            name=name,
            namespace=NAMESPACE,
            workflow_uid=self.uid,
            node=node,
            labels=labels,
            resources={"nvidia.com/gpu": gpus} if gpus else {},
        )
        pod = self._argo.pods[name] = Pod(self._world, self._state, status, values["outputs"] + outputs)
        return pod

    def _await_pod(self, pod: Pod) -> tuple[str, str]:
        """Argo's status and exit code of the pod."""
        self._world.scheduler.wait_for(lambda: pod.has_ended or self._is_stopped)
        self._world.scheduler.sleep(self._world.random.uniform(0.1, 3.0))
        self._check()
        status = pod.status
        if status is None:
            return "Error", ""
        code = "" if status.exit_code is None else str(status.exit_code)
        return ("Succeeded" if status.phase == "Succeeded" else "Failed"), code

    def _call(self, body: dict[str, Any]) -> ExecuteReply:
        """The final reply to a node, after as many calls as it takes."""
        document = {
            "workflow": {"metadata": {"name": self.name, "namespace": NAMESPACE, "uid": self.uid}},
            "template": {
                "name": "any",
                "inputs": {"artifacts": []},
                "outputs": {
                    "parameters": [{"name": name} for name in (*ADMIT_OUTPUTS, "rows")],
                    "artifacts": [{"name": "model"}],
                },
                "plugin": {
                    "tiphys": {"run": self.run, "submission": self._given_submission, "uid": self.uid, **body},
                },
            },
        }
        while True:
            self._check()
            reply = self._ask(document)
            if reply is None:
                self._world.scheduler.sleep(self._world.random.uniform(1.0, 5.0))
            elif reply.phase == "Pending":
                requeue = reply.requeue or "5s"
                self._world.scheduler.sleep(float(requeue.removesuffix("s")))
            else:
                return reply

    def _ask(self, document: dict[str, Any]) -> ExecuteReply | None:
        """One call; None without an answer."""
        world = self._world
        answering = self._argo.choose_replica().call(document)
        if world.meets("calls doubled", self._argo.process, 0.3):
            self._argo.choose_replica().call(document)
        if answering is None:
            return None
        world.scheduler.wait_for(lambda: answering.has_ended, 30.0)
        if world.meets("answers of the service lost", self._argo.process, 0.4):
            return None
        reply: ExecuteReply | None = answering.result
        return reply

    def _check(self) -> None:
        if self._state.workflows.get(self.name, {}).get("metadata", {}).get("uid") != self.uid:
            raise WorkflowGoneError
        if self._is_stopped and not self._is_finalizing:
            raise WorkflowStoppedError

    @property
    def _is_stopped(self) -> bool:
        return bool(self._workflow["spec"].get("shutdown"))


def _outputs(reply: ExecuteReply) -> dict[str, str]:
    assert reply.node is not None and reply.node.outputs is not None, reply
    return {parameter.name: parameter.value for parameter in reply.node.outputs.parameters}


def _parse_ref(lineage: str, text: str) -> CheckpointRef | None:
    match = _REF.fullmatch(text)
    if match is None:
        return None
    return CheckpointRef(lineage=match[1] or lineage, attempt=int(match[2]), global_step=int(match[3]))
