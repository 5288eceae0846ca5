"""Workflows that a controller has submitted, whose tasks a test runs as Argo would, with a store in memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from support.fakes.argo_workflow import START, ArgoWorkflow, Reader
from support.fakes.submitter import FakeSubmitter
from tiphys.protocol.compiled_workflow import (
    Manifest,
    find_template,
    is_fan_out,
    read_workflow_parameters,
    substitute_tags,
)
from tiphys.protocol.execute_api import WorkflowMetadata
from tiphys.protocol.fan_out import item_documents, item_variables
from tiphys.protocol.step_spec import ITEM_PARAMETER
from tiphys.recording import RunBinding, bind_workflow
from tiphys.store import Store

Outputs = Mapping[str, str]


@dataclass
class SubmittedWorkflow(ArgoWorkflow):
    """A Workflow as it was created; `run_task` writes the nodes of a task with the inputs that Argo would give them."""

    document: Manifest = field(default_factory=dict)

    @classmethod
    def of(cls, store: Store, submitter: FakeSubmitter, name: str) -> "SubmittedWorkflow":
        document = submitter.manifest(name)
        parameters = read_workflow_parameters(document)
        return cls(
            store,
            (),
            name=name,
            uid=submitter.uid(name),
            submission=int(parameters["tiphys-submission"]),
            parameters=parameters,
            document=document,
            now=START,
        )

    @property
    def manifest(self) -> Manifest:
        metadata = {**self.document["metadata"], "uid": self.uid}
        nodes = {node["id"]: node for node in self.nodes.values()}
        return {**self.document, "metadata": metadata, "status": {"phase": "Running", "nodes": nodes}}

    def bind(self, store: Store | None = None) -> RunBinding:
        namespace = self.document["metadata"]["namespace"]
        metadata = WorkflowMetadata(name=self.name, namespace=namespace, uid=self.uid)
        run = self.parameters["tiphys-run"]
        return bind_workflow(store or self.store, Reader(self.manifest), metadata, run, str(self.submission))

    @property
    def tasks(self) -> dict[str, Manifest]:
        """The tasks of the entry DAG, by name."""
        entry = find_template(self.document, self.document["spec"]["entrypoint"])
        return {task["name"]: task for task in entry["dag"]["tasks"]}

    def run_task(
        self, name: str, parameters: Outputs | None = None, artifacts: Mapping[str, bytes] | None = None
    ) -> None:
        """Run a task, or all items of a fan-out, to its end, and record it. Each item has the same outputs."""
        task = substitute_tags(self.tasks[name], self._values().get)
        for index in range(len(item_documents(task)) if is_fan_out(task) else 1):
            self.run_item(name, index, parameters, artifacts)

    def run_item(
        self,
        name: str,
        index: int = 0,
        parameters: Outputs | None = None,
        artifacts: Mapping[str, bytes] | None = None,
    ) -> None:
        """Run a task, or the item at ``index`` of a fan-out."""
        place = self.start_task(name, index)
        self.finish(place, parameters, artifacts)
        self.record()

    def start_task(self, name: str, index: int = 0) -> str:
        """Start a task, or the item at ``index`` of a fan-out; returns its place."""
        task, values = self.tasks[name], self._values()
        place = name
        if is_fan_out(task):
            document = item_documents(substitute_tags(task, values.get))[index]
            label, variables = item_variables(document)
            values |= variables
            place = f"{name}({index}:{label})"
        arguments = substitute_tags(task.get("arguments") or {}, values.get)
        declared = find_template(self.document, task["template"]).get("inputs") or {}
        given = {one["name"]: _argo_text(one["value"]) for one in arguments.get("parameters") or []}
        inputs = {
            one["name"]: given.get(one["name"], _argo_text(one.get("value", one.get("default"))))
            for one in substitute_tags(declared.get("parameters") or [], values.get)
        }
        located = {one["name"]: one for one in arguments.get("artifacts") or []}
        artifacts = substitute_tags(declared.get("artifacts") or [], values.get)
        taken = [self._locate({**one, **located.get(one["name"], {})}) for one in artifacts]
        item = inputs.pop(ITEM_PARAMETER, None)
        return self.start(place, item=item if is_fan_out(task) else None, parameters=inputs, artifacts=taken)

    def _values(self) -> dict[str, str]:
        """Values of plain tags: workflow parameters, and outputs of the tasks that have ended."""
        values = {f"workflow.parameters.{name}": value for name, value in self.parameters.items()}
        for name in self.tasks:
            for one in self._outputs(name).get("parameters", []):
                values[f"tasks.{name}.outputs.parameters.{one['name']}"] = one["value"]
        return values

    def _locate(self, artifact: Manifest) -> Manifest:
        source = str(artifact.get("from", ""))
        if not source:
            return artifact
        _, task, _, _, name = source.strip("{}").split(".")
        made = next(one for one in self._outputs(task)["artifacts"] if one["name"] == name)
        return {"name": artifact["name"], "path": artifact["path"], "s3": made["s3"]}

    def _outputs(self, task: str) -> dict[str, Sequence[Any]]:
        return self.nodes.get(f"{self.name}.{task}", {}).get("outputs") or {}


def _argo_text(value: Any) -> str:
    """How Argo reads a value of YAML (``AnyString``)."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.17f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
