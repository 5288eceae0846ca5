"""The faults: each meets the newest process of a training, or its Workflow, and returns what was seen of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.beside.judge import Note
from tiphys_controller.doctor.observed import is_argo_controller

from tiphys.kube.resources import DEPLOYMENTS, PODS, WORKFLOWS, Resource

if TYPE_CHECKING:
    from bench.beside.trial import Trial


@dataclass(frozen=True)
class Fault:
    """A fault: its name in the table, and what brings it about, which returns evidence, empty if there is none.

    Attributes:
        words: Name.
        inject: Brings it about; gets the last step before it.
        needs_checkpoints: Whether it cannot meet a contender without checkpoints.
        kills_in_save: Whether the training does it to itself, at a moment that cannot be met from outside.
        meets_process: Whether it is meant to end a process.
        resubmits: Whether a person submits again afterwards.
    """

    words: str
    inject: "Callable[[Trial, Note], str]"
    needs_checkpoints: bool = False
    kills_in_save: bool = False
    meets_process: bool = True
    resubmits: bool = False


def _kill(trial: "Trial", target: Note) -> str:
    trial.execute(target.pod, f"kill -9 {target.process}")
    return f"SIGKILL to process {target.process} after step {target.step}"


def _delete_pod(trial: "Trial", target: Note) -> str:
    deleted = trial.here.api.delete(PODS, trial.namespace, target.pod, grace_seconds=0)
    return f"pod deleted after step {target.step}" if deleted else ""


def _evict(trial: "Trial", target: Note) -> str:
    eviction = Resource("", "v1", f"pods/{target.pod}/eviction", "Eviction")
    body = {"apiVersion": "policy/v1", "metadata": {"name": target.pod, "namespace": trial.namespace}}
    trial.here.api.create(eviction, trial.namespace, body)
    pod = trial.here.api.get(PODS, trial.namespace, target.pod)
    is_ending = pod is None or "deletionTimestamp" in pod["metadata"]
    return f"pod evicted after step {target.step}" if is_ending else ""


def _announce(trial: "Trial", target: Note) -> str:
    """The training kills itself, by a thread that sees how much of a save is done; its journal has the evidence."""
    return ""


def _damage(trial: "Trial", target: Note) -> str:
    """One bit of the newest checkpoint in storage; and the pod is killed, so that no copy in its memory is left."""
    changed = trial.damage(target)
    deleted = trial.here.api.delete(PODS, trial.namespace, target.pod, grace_seconds=0)
    return f"{changed}, SIGKILL after step {target.step}, pod deleted" if changed and deleted else ""


def _delete_workflow(trial: "Trial", target: Note) -> str:
    deleted = trial.here.api.delete(WORKFLOWS, trial.namespace, trial.workflows[0], propagation="Background")
    trial.wait_for(lambda: trial.here.api.get(WORKFLOWS, trial.namespace, trial.workflows[0]) is None)
    trial.wait_for(lambda: trial.here.api.get(PODS, trial.namespace, target.pod) is None)
    return f"Workflow deleted after step {target.step}" if deleted else ""


def _submit_again(trial: "Trial", _: Note) -> str:
    trial.submit()
    return "two Workflows: " + " and ".join(trial.workflows)


def _kill_with_controller(trial: "Trial", target: Note) -> str:
    api = trial.here.api
    for deployment in filter(is_argo_controller, api.list(DEPLOYMENTS).items):
        labels = ",".join(f"{name}={value}" for name, value in deployment["spec"]["selector"]["matchLabels"].items())
        namespace = deployment["metadata"]["namespace"]
        pods = [pod["metadata"]["name"] for pod in api.list(PODS, namespace, labels).items]
        gone = [api.delete(PODS, namespace, pod, grace_seconds=0) for pod in pods]
        return f"{_kill(trial, target)}, pod of Argo's controller deleted" if any(gone) else ""
    return ""


FAULTS = {
    "kill": Fault("program killed (SIGKILL)", _kill),
    "pod": Fault("pod deleted, no grace", _delete_pod),
    "evict": Fault("pod evicted (SIGTERM, 30 s)", _evict),
    "save": Fault("killed in the middle of a save", _announce, needs_checkpoints=True, kills_in_save=True),
    "bit": Fault("one bit of the newest checkpoint, pod killed", _damage, needs_checkpoints=True),
    "delete": Fault("Workflow deleted, submitted again", _delete_workflow, resubmits=True),
    "twice": Fault("submitted twice", _submit_again, meets_process=False),
    "controller": Fault("program and Argo's controller killed", _kill_with_controller),
}
