"""Says of workflows that have lost their engine that they are over.

An engine that was killed cannot say so itself, and until somebody does, its
pods look alive: the next attempt and their GPUs would wait for them for ever.
The kernel ended the processes with the engine (see `launch`).
"""

from pathlib import Path

from tiphys_plugin import DirectoryCluster

from hera_pipelines.local.changes import NodePhase
from hera_pipelines.local.lock import hold, is_held
from tiphys.errors import ConflictError
from tiphys.protocol.pipeline import Manifest

_MESSAGE = "the engine that ran this workflow is gone"


def bury_dead(cluster: DirectoryCluster, state: Path) -> list[str]:
    """Mark workflows without a live engine as failed, and their pods as lost; the names of those marked."""
    buried = []
    for workflow in cluster.workflows():
        name = workflow["metadata"]["name"]
        if _phase(workflow) == NodePhase.RUNNING and not is_held(state, name) and _bury_once(cluster, state, name):
            buried.append(name)
    return buried


def _bury_once(cluster: DirectoryCluster, state: Path, name: str) -> bool:
    """Under its lock, and by what it says then: its engine may have brought it to its end just now."""
    try:
        with hold(state, name):
            workflow = cluster.workflow("default", name)
            if workflow is None or _phase(workflow) != NodePhase.RUNNING:
                return False
            _bury(cluster, workflow)
            return True
    except ConflictError:
        return False  # somebody else buries it


def _bury(cluster: DirectoryCluster, workflow: Manifest) -> None:
    """Pods first: a workflow that is over must not have any that seem to live."""
    for pod in cluster.pods_of(workflow["metadata"]["uid"]):
        if not pod.finished:
            lost = {"phase": "Failed", "reason": "NodeLost", "message": _MESSAGE}
            cluster.write_pod(pod.model_copy(update=lost))
    status = {**workflow["status"], "phase": str(NodePhase.FAILED), "message": _MESSAGE}
    cluster.write_workflow({**workflow, "status": status})


def _phase(workflow: Manifest) -> str:
    return str((workflow.get("status") or {}).get("phase", ""))
