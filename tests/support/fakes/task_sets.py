"""Task sets as Argo's controller writes them, and the few moves it makes with them."""

import threading
from collections.abc import Callable
from typing import Any

from tiphys.kube import KubeApi
from tiphys.kube.resources import WORKFLOW_TASK_SETS
from tiphys.protocol.execute_api import ExecuteReply, succeeded_reply


def task(name: str = "prep", op: str = "admit", uid: str = "uid-1", **body: Any) -> dict[str, Any]:
    """A task of ours; ``name`` tells the core of a test which node it is."""
    node = f"flow.{name}"
    return {"name": name, "plugin": {"tiphys": {"op": op, "uid": uid, "node": node, "step": name, **body}}}


def task_set(
    tasks: dict[str, Any], name: str = "flow", namespace: str = "ml", uid: str = "uid-1", **entries: Any
) -> dict[str, Any]:
    """The object, to be created. ``entries`` are answers that it holds already."""
    owner = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": name, "uid": uid}
    found: dict[str, Any] = {
        "metadata": {"name": name, "namespace": namespace, "ownerReferences": [owner]},
        "spec": {"tasks": tasks},
    }
    return {**found, "status": {"nodes": entries}} if entries else found


class Controller:
    """Argo's controller as far as task sets see it (``workflow/controller/taskset.go``)."""

    def __init__(self, api: KubeApi, namespace: str = "ml") -> None:
        self.api = api
        self.namespace = namespace

    def create(self, tasks: dict[str, Any], name: str = "flow", uid: str = "uid-1") -> None:
        self.api.create(WORKFLOW_TASK_SETS, self.namespace, task_set(tasks, name, self.namespace, uid))

    def add(self, tasks: dict[str, Any], name: str = "flow", labels: dict[str, str] | None = None) -> None:
        """Put tasks into the task set that is there."""
        body = {"metadata": {"labels": labels or {}}, "spec": {"tasks": tasks}}
        self.api.patch(WORKFLOW_TASK_SETS, self.namespace, name, body)

    def remove(self, *nodes: str, name: str = "flow") -> None:
        """What it does about finished nodes: first the answers, then the tasks."""
        self.remove_answers(*nodes, name=name)
        self.remove_tasks(*nodes, name=name)

    def remove_answers(self, *nodes: str, name: str = "flow") -> None:
        body = {"status": {"nodes": dict.fromkeys(nodes)}}
        self.api.patch(WORKFLOW_TASK_SETS, self.namespace, name, body, subresource="status")

    def remove_tasks(self, *nodes: str, name: str = "flow") -> None:
        self.api.patch(WORKFLOW_TASK_SETS, self.namespace, name, {"spec": {"tasks": dict.fromkeys(nodes)}})

    def entries(self, name: str = "flow") -> dict[str, Any]:
        """The answers that are stored now."""
        found = self.api.get(WORKFLOW_TASK_SETS, self.namespace, name) or {}
        entries: dict[str, Any] = (found.get("status") or {}).get("nodes") or {}
        return entries

    def messages(self, name: str = "flow") -> dict[str, str]:
        return {node: f"{entry['phase']} {entry['message']}" for node, entry in self.entries(name).items()}


class ScriptedCore:
    """A core that answers each call of a step by the next line of its script, the last one for ever."""

    def __init__(self, **scripts: list[ExecuteReply | Exception]) -> None:
        self.scripts = scripts
        self.calls: list[tuple[str, str]] = []
        """Workflow and step of each call."""
        self.requests: list[dict[str, Any]] = []
        self.before: Callable[[str], None] = lambda _: None
        self._lock = threading.Lock()

    def execute(self, namespace: str, document: dict[str, Any]) -> ExecuteReply:
        step = document["template"]["plugin"]["tiphys"]["step"]
        workflow = document["workflow"]["metadata"]["name"]
        with self._lock:
            self.calls.append((workflow, step))
            self.requests.append(document)
            script = self.scripts.get(step, [succeeded_reply(f"{step} done")])
            line = script[0] if len(script) == 1 else script.pop(0)
        self.before(step)
        if isinstance(line, Exception):
            raise line
        return line
