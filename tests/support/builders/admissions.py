"""Live Workflows with many steps that are ready to be admitted, and their task sets, as real as compile makes them."""

from typing import Any

from support.fakes.task_sets import task_set
from support.stories.plugin import prep, workflow
from tiphys.protocol.operations import ADMIT_OUTPUTS
from tiphys.protocol.step_spec import STORE_ANNOTATION


def live_workflow(name: str, namespace: str, store: str, steps: int) -> dict[str, Any]:
    """To be created; every step is a `Step` of its own."""
    found = workflow([prep(name=f"s{number}", template=f"t{number}") for number in range(steps)], name)
    annotations = {**found["metadata"]["annotations"], STORE_ANNOTATION: store}
    return {
        "apiVersion": found["apiVersion"],
        "kind": found["kind"],
        "metadata": {"name": name, "namespace": namespace, "annotations": annotations},
        "spec": found["spec"],
        "status": {"phase": "Running"},
    }


def admit_task(workflow_name: str, uid: str, step: int) -> dict[str, Any]:
    """The template as Argo resolves it: with all outputs that compile declares."""
    node = f"{workflow_name}.s{step}.admit"
    body = {"op": "admit", "run": "", "submission": "", "uid": uid, "node": node, "step": f"s{step}", "item": ""}
    outputs = [{"name": name, "valueFrom": {"default": "", "supplied": {}}} for name in ADMIT_OUTPUTS]
    plugin = {"tiphys": {**body, "inputs": {}}}
    return {
        "name": f"s{step}-admit",
        "inputs": {},
        "outputs": {"parameters": outputs},
        "metadata": {},
        "plugin": plugin,
    }


def open_task_set(workflow_name: str, namespace: str, uid: str, steps: int) -> dict[str, Any]:
    """Every step of the workflow waits for its admission."""
    tasks = {f"{workflow_name}-{step}": admit_task(workflow_name, uid, step) for step in range(steps)}
    return task_set(tasks, workflow_name, namespace, uid)
