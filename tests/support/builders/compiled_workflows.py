"""Workflows in the shape that compile emits, reduced to what the controller reads, and histories of their runs."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from tiphys.protocol.compiled_workflow import Manifest, is_fan_out
from tiphys.protocol.step_spec import (
    ITEM_PARAMETER,
    PIPELINE_ANNOTATION,
    STEP_ANNOTATION,
    STORE_ANNOTATION,
    StepKind,
    StepSpec,
)
from tiphys.records import AttemptClaim, AttemptEnd, AttemptEndOutcome, Cause, Output, OutputKind, OutputObject
from tiphys.records import json_digest as digest_of
from tiphys.store import RunLayout, Store, outputs_digest, read_record
from tiphys.store.workflow_layout import pod_outputs


def gated(
    name: str,
    *,
    kind: StepKind = StepKind.STEP,
    cache: bool = True,
    gate: bool = True,
    plain: bool = False,
    **task: Any,
) -> Manifest:
    """A step with a gate, with what its templates are made from; ``pipeline_of`` takes it apart."""
    return {"name": name, "template": name, "_kind": kind, "_cache": cache, "_gate": gate, "_plain": plain, **task}


def ungated(
    name: str,
    *,
    parameters: Sequence[str] = (),
    artifacts: Sequence[str] = (),
    program: Manifest | None = None,
    spec: Mapping[str, Any] | None = None,
    **task: Any,
) -> Manifest:
    """A step without a gate, with these outputs. ``program`` are fields of its template, ``spec`` of its settings."""
    declared = {"parameters": tuple(parameters), "artifacts": tuple(artifacts), **(spec or {})}
    if is_fan_out(task):
        given = task.get("arguments") or {}
        item = {"name": ITEM_PARAMETER, "value": "{{item}}"}
        task["arguments"] = {**given, "parameters": [*(given.get("parameters") or []), item]}
    return gated(name, gate=False, **task) | {"_spec": declared, "_program": program or {}}


def plain(name: str, **task: Any) -> Manifest:
    """A task that Tiphys does not know."""
    return gated(name, plain=True, **task)


def pipeline_of(*tasks: Manifest, parameters: Mapping[str, str] | None = None, **spec: Any) -> Manifest:
    """A compiled Workflow named ``digits`` with an entry DAG of ``tasks``."""
    bodies = [{field: value for field, value in task.items() if not field.startswith("_")} for task in tasks]
    given = {"tiphys-run": "", "tiphys-submission": "", **(parameters or {})}
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {
            "generateName": "digits-",
            "annotations": {PIPELINE_ANNOTATION: "digits", STORE_ANNOTATION: "file:///store"},
        },
        "spec": {
            "entrypoint": "main",
            "onExit": "tiphys-finalize",
            "arguments": {"parameters": [{"name": name, "value": value} for name, value in given.items()]},
            "templates": [
                {"name": "main", "dag": {"tasks": bodies}},
                *(template for task in tasks for template in _templates(task)),
                {
                    "name": "tiphys-finalize",
                    "plugin": {"tiphys": {"op": "finalize", "run": "{{workflow.parameters.tiphys-run}}"}},
                },
            ],
            **spec,
        },
    }


def _templates(task: Manifest) -> list[Manifest]:
    name = task["template"]
    if task["_plain"]:
        return [{"name": name, "container": {"image": "alpine", "command": ["true"]}}]
    fields = {
        "name": name,
        "kind": task["_kind"],
        "template": "t" * 64,
        "cache": task["_cache"],
        "gate": task["_gate"],
        "fan_out": is_fan_out(task),
    }
    spec = StepSpec(**fields | task.get("_spec", {}))
    annotated = {"name": name, "metadata": {"annotations": {STEP_ANNOTATION: spec.to_bytes().decode()}}}
    container = {"image": "python:3.12", "command": ["python"]}
    if not spec.is_gated:
        return [{**annotated, "container": container, **_declarations(spec, task["_program"])}]
    may_run = "{{tasks.admit.outputs.parameters.run}} == true"
    has_ended = "run.Succeeded || run.Failed || run.Errored || run.Skipped"
    tasks = [
        {"name": "admit", "template": f"{name}-admit"},
        {"name": "run", "template": f"{name}-run", "depends": "admit", "when": may_run},
        {"name": "conclude", "template": f"{name}-conclude", "depends": has_ended},
    ]
    return [
        {**annotated, "dag": {"tasks": tasks}},
        {"name": f"{name}-admit", "plugin": {"tiphys": {"op": "admit", "step": name}}},
        {"name": f"{name}-run", "container": container},
        {"name": f"{name}-conclude", "plugin": {"tiphys": {"op": "conclude", "step": name}}},
    ]


def _declarations(spec: StepSpec, program: Manifest) -> Manifest:
    """Inputs and outputs of the template of a step without a gate."""
    inputs = dict(program.get("inputs") or {})
    if spec.fan_out:
        inputs["parameters"] = [*(inputs.get("parameters") or []), {"name": ITEM_PARAMETER, "default": ""}]
    folder = pod_outputs("{{workflow.uid}}", "{{pod.name}}")
    parameters = [{"name": name, "valueFrom": {"path": f"/out/{name}"}} for name in spec.parameters]
    artifacts = [
        {"name": name, "path": f"/out/{name}", "archive": {"none": {}}, "s3": {"key": f"{folder}{name}"}}
        for name in spec.artifacts
    ]
    return {**program, "inputs": inputs, "outputs": {"parameters": parameters, "artifacts": artifacts}}


class History:
    """Writes what the plugin writes while a run goes on."""

    def __init__(self, store: Store, run: str) -> None:
        self.store = store
        self.run = run
        self.layout = RunLayout(run)

    def opened(self, step: str, attempt: int = 1, submission: int = 1) -> None:
        """An attempt that nobody has ended."""
        record = AttemptClaim(
            run=self.run,
            step=step,
            attempt=attempt,
            submission=submission,
            uid=f"uid-{submission}",
            node=f"wf.{step}.admit",
            instance=f"wf.{step}",
            step_key=digest_of(step),
        )
        self.store.create(self.layout.attempt(step, attempt), record.to_bytes())

    def failed(
        self,
        step: str,
        attempt: int = 1,
        cause: Cause = Cause.PREEMPTION,
        message: str = "",
        submission: int = 1,
    ) -> None:
        """An attempt that ended without a result."""
        self.opened(step, attempt, submission)
        self._end(step, attempt, AttemptEndOutcome.FAILED, cause=cause, message=message)

    def done(
        self,
        step: str,
        attempt: int = 1,
        parameters: Mapping[str, str] | None = None,
        artifacts: Mapping[str, bytes] | None = None,
        projection: bool = True,
        submission: int = 1,
    ) -> None:
        """An attempt that is done, with the objects it produced."""
        self.opened(step, attempt, submission)
        self.finish(step, attempt, parameters, artifacts, projection)

    def finish(
        self,
        step: str,
        attempt: int = 1,
        parameters: Mapping[str, str] | None = None,
        artifacts: Mapping[str, bytes] | None = None,
        projection: bool = True,
    ) -> None:
        """The done end of an attempt that was opened before."""
        texts = {name: value.encode() for name, value in (parameters or {}).items()}
        made = [(OutputKind.PARAMETER, name, data) for name, data in texts.items()]
        made += [(OutputKind.ARTIFACT, name, data) for name, data in (artifacts or {}).items()]
        outputs = tuple(self._output(step, attempt, kind, name, data) for kind, name, data in made)
        self._end(step, attempt, AttemptEndOutcome.DONE, outputs=outputs)
        if projection:
            prefix = self.layout.outputs(step, attempt)
            rows = [(info.key.removeprefix(prefix), info.size, info.version) for info in self.store.list(prefix)]
            self.store.create(self.layout.done_marker(step, attempt, outputs_digest(rows)), b"")

    def _output(self, step: str, attempt: int, kind: OutputKind, name: str, data: bytes) -> Output:
        key = f"{self.layout.outputs(step, attempt)}{kind.value}s/{name}"
        self.store.create(key, data)
        return Output(
            name=name,
            kind=kind,
            key=key,
            value=data.decode() if kind is OutputKind.PARAMETER else None,
            objects=(
                OutputObject(
                    key=key,
                    size=len(data),
                    sha256=hashlib.sha256(data).hexdigest(),
                    version=next(self.store.list(key)).version,
                ),
            ),
        )

    def _end(self, step: str, attempt: int, outcome: AttemptEndOutcome, **fields: Any) -> None:
        opened = read_record(self.store, self.layout.attempt(step, attempt), AttemptClaim)
        end = AttemptEnd(
            run=self.run, step=step, attempt=attempt, submission=opened.submission, outcome=outcome, **fields
        )
        self.store.create(self.layout.attempt_end(step, attempt), end.to_bytes())
