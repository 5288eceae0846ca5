"""Workflows as Hera builds them, before compile: small, and easy to bend."""

from typing import Any

from hera_pipelines.compile import StepSettings
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.step_spec import STEP_ANNOTATION, CheckpointPolicy, StepKind

STORE = "s3://ml-runs/tiphys"


def settings(kind: StepKind = StepKind.STEP, **asked: Any) -> Manifest:
    """Metadata that makes a template a step."""
    return {"annotations": {STEP_ANNOTATION: StepSettings(kind=kind, **asked).model_dump_json()}}


def step(
    name: str = "prep", *, container: Manifest | None = None, asked: Manifest | None = None, **fields: Any
) -> Manifest:
    """A container template that asks to be a `Step`."""
    program = {"image": "prep:1", "command": ["prep"], **(container or {})}
    return {"name": name, "metadata": settings(**(asked or {})), "container": program, **fields}


def gated(name: str = "prep", *, asked: Manifest | None = None, **fields: Any) -> Manifest:
    """A container template that asks to be a `Step` with a gate."""
    return step(name, asked={"gate": True, **(asked or {})}, **fields)


def train(
    name: str = "fit", *, container: Manifest | None = None, asked: Manifest | None = None, **fields: Any
) -> Manifest:
    """A container template that asks to be a `Train` with checkpoints."""
    program = {"image": "fit:1", "command": ["fit"], **(container or {})}
    wanted = {"checkpoints": CheckpointPolicy(), **(asked or {})}
    return {"name": name, "metadata": settings(StepKind.TRAIN, **wanted), "container": program, **fields}


def plain(name: str, **fields: Any) -> Manifest:
    """A container template that Tiphys leaves alone."""
    return {"name": name, "container": {"image": "plain:1"}, **fields}


def task(name: str, template: str = "", **fields: Any) -> Manifest:
    return {"name": name, "template": template or name, **fields}


def workflow(
    *templates: Manifest, tasks: list[Manifest] | None = None, entry: Manifest | None = None, **spec: Any
) -> Manifest:
    """A Workflow ``digits-…`` whose entry DAG runs ``tasks``, by default one for each template, with its inputs."""
    calls = [task(t["name"], **_arguments(t)) for t in templates] if tasks is None else tasks
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"generateName": "digits-"},
        "spec": {
            "entrypoint": "main",
            "templates": [{"name": "main", "dag": {"tasks": calls}, **(entry or {})}, *templates],
            **spec,
        },
    }


def _arguments(template: Manifest) -> Manifest:
    """Arguments for all inputs of ``template``, as a field of its task."""
    inputs = template.get("inputs") or {}
    arguments = {
        "parameters": [{"name": p["name"], "value": p["name"]} for p in inputs.get("parameters") or []],
        "artifacts": [{"name": a["name"], "raw": {"data": ""}} for a in inputs.get("artifacts") or []],
    }
    return {"arguments": {kind: given for kind, given in arguments.items() if given}} if any(arguments.values()) else {}


def parameters(*names: str) -> Manifest:
    return {"parameters": [{"name": name} for name in names]}


def output_parameter(name: str, **source: Any) -> Manifest:
    return {"name": name, "valueFrom": {"path": f"/tmp/{name}", **source}}


def artifact(name: str, **fields: Any) -> Manifest:
    return {"name": name, "path": f"/tmp/{name}", **fields}


def by_name(manifest: Manifest) -> dict[str, Manifest]:
    """Templates of a compiled Workflow."""
    return {t["name"]: t for t in manifest["spec"]["templates"]}
