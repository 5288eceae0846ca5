"""A Workflow whose nodes a test writes as Argo does, with a store in memory for the recorder.

Names, ids and pods of the nodes are those that Argo makes (``generateNodeName``, ``NodeID`` and ``GeneratePodName``);
what a node holds is what ``initializeNode``, ``assessNodeStatus`` and ``processNodeRetries`` write. Each change takes a
minute.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from hera_pipelines.local.nodes import attempt_name, format_rfc3339, item_name, node_id, pod_name
from support.fakes.memory_store import MemoryStore
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.execute_api import WorkflowMetadata
from tiphys.protocol.step_spec import PIPELINE_ANNOTATION, STEP_ANNOTATION, STORE_ANNOTATION, StepKind, StepSpec
from tiphys.protocol.workflow_nodes import read_nodes
from tiphys.recording import RecordedSteps, RunBinding, WorkflowRecorder, bind_workflow
from tiphys.recording.node_outputs import HashObjects
from tiphys.records import AttemptClaim, AttemptEnd, SubmissionClaim, SubmissionKind
from tiphys.store import RunLayout, Store, claim_record, find_attempt_end, find_record
from tiphys.store.workflow_layout import pod_outputs

RUN = "digits"
START = datetime(2026, 1, 1, tzinfo=UTC)
FAILED = "main: Error (exit code 1): ValueError: no rows"


def ungated(name: str = "prep", **fields: Any) -> StepSpec:
    """A `Step` without a gate, with one artifact and one parameter."""
    declared = {"kind": StepKind.STEP, "parameters": ("rows",), "artifacts": ("data",), "template": f"t-{name}"}
    return StepSpec(name=name, **{**declared, **fields})


def bare(name: str = "prep", **fields: Any) -> StepSpec:
    """A `Step` without a gate and without outputs."""
    return ungated(name, **{"parameters": (), "artifacts": (), **fields})


class Reader(NamedTuple):
    """A cluster with one Workflow."""

    manifest: Manifest
    name: str = "west"

    def workflow(self, namespace: str, name: str) -> Manifest | None:
        return self.manifest


@dataclass
class ArgoWorkflow:
    """A live Workflow. ``place`` of a node is its name within the Workflow: ``prep``, ``sweep(0:0.1)``."""

    store: MemoryStore
    specs: Sequence[StepSpec]
    depends: Mapping[str, str] = field(default_factory=dict)
    """Of each task that comes after others."""
    name: str = "digits-abc"
    uid: str = "uid-1"
    submission: int = 1
    parameters: Mapping[str, str] = field(default_factory=dict)
    templates: Mapping[str, Manifest] = field(default_factory=dict)
    """Fields of the template of a task."""
    nodes: dict[str, Manifest] = field(default_factory=dict)
    """By name."""
    now: datetime = START

    @property
    def manifest(self) -> Manifest:
        tasks = [
            {
                "name": spec.name,
                "template": spec.name,
                **({"withItems": ["any"]} if spec.fan_out else {}),
                **({"depends": self.depends[spec.name]} if spec.name in self.depends else {}),
            }
            for spec in self.specs
        ]
        templates: list[Manifest] = [{"name": "main", "dag": {"tasks": tasks}}]
        for spec in self.specs:
            annotation = spec.model_copy(update={"fan_out": False}).model_dump_json(exclude_defaults=True)
            program = {"container": {"image": "python:3.12"}, **self.templates.get(spec.name, {})}
            templates.append({"name": spec.name, "metadata": {"annotations": {STEP_ANNOTATION: annotation}}, **program})
        values = {"tiphys-run": RUN, "tiphys-submission": str(self.submission), **self.parameters}
        return {
            "apiVersion": "argoproj.io/v1alpha1",
            "kind": "Workflow",
            "metadata": {
                "name": self.name,
                "namespace": "ml",
                "uid": self.uid,
                "annotations": {PIPELINE_ANNOTATION: "digits", STORE_ANNOTATION: self.store.url},
            },
            "spec": {
                "entrypoint": "main",
                "templates": templates,
                "arguments": {"parameters": [{"name": name, "value": value} for name, value in values.items()]},
            },
            "status": {"nodes": {node["id"]: node for node in self.nodes.values()}},
        }

    def bind(self, store: Store | None = None) -> RunBinding:
        """The run and submission; claims the submission as the controller does."""
        if self.submission > 1:
            claim_submission(self.store, self.submission, self.name)
        metadata = WorkflowMetadata(name=self.name, namespace="ml", uid=self.uid)
        return bind_workflow(store or self.store, Reader(self.manifest), metadata, RUN, str(self.submission))

    def recorder(
        self, store: Store | None = None, on_end: Callable[[AttemptEnd], object] = lambda _: None, **fields: Any
    ) -> WorkflowRecorder:
        return WorkflowRecorder(store or self.store, self.bind(store), on_end=on_end, **fields)

    def record(
        self, recorder: WorkflowRecorder | None = None, hash_objects: HashObjects | None = None, **fields: Any
    ) -> RecordedSteps:
        """Record the nodes as they are, through what Argo would store of them."""
        workflow = json.loads(json.dumps(self.manifest))
        return (recorder or self.recorder()).record(workflow, read_nodes(workflow), hash_objects, **fields)

    def write(self, place: str, kind: str = "Pod", phase: str = "Running", **fields: Any) -> Manifest:
        """Write a node as it is initialized, or change one."""
        name = f"{self.name}.{place}"
        template = place.partition("(")[0].partition(".")[0]
        self.now += timedelta(minutes=1)
        node = self.nodes.setdefault(
            name,
            {
                "id": node_id(self.name, name),
                "name": name,
                "displayName": place,
                "type": kind,
                "templateName": template,
                "templateScope": f"local/{self.name}",
                "boundaryID": self.name,
                "startedAt": format_rfc3339(self.now),
                "finishedAt": None,
                **({"taskResultSynced": True} if kind == "Pod" else {}),
            },
        )
        node.update({"phase": phase, **fields})
        if phase in ("Succeeded", "Failed", "Error", "Skipped", "Omitted") and node["finishedAt"] is None:
            node["finishedAt"] = format_rfc3339(self.now)
        return node

    def start(
        self,
        place: str = "prep",
        attempt: int | None = None,
        *,
        item: str | None = None,
        parameters: Mapping[str, str] | None = None,
        artifacts: Sequence[Manifest] = (),
    ) -> str:
        """Argo makes a pod; with a number it is that try of a node with a retryStrategy. Returns its place."""
        values = {**(parameters or {}), **({"tiphys-item": item} if item is not None else {})}
        inputs: Manifest = {"inputs": {"parameters": [{"name": name, "value": text} for name, text in values.items()]}}
        inputs["inputs"] |= {"artifacts": list(artifacts)} if artifacts else {}
        if attempt is None:
            self.write(place, **inputs)
            return place
        self.write(place, "Retry", **inputs)
        self.write(attempt_name(place, attempt), nodeFlag={"retried": True}, **inputs)
        return attempt_name(place, attempt)

    def start_item(self, task: str, index: int, item: str, label: str | None = None, **fields: Any) -> str:
        """Start an item of a fan-out; ``label`` is how Argo prints a map in the name of its node."""
        return self.start(item_name(task, index, item if label is None else label), item=item, **fields)

    def pod(self, place: str = "prep") -> str:
        """Name of the pod of a node."""
        node = self.nodes[f"{self.name}.{place}"]
        return pod_name(self.name, node["name"], node["templateName"])

    def folder(self, place: str = "prep") -> str:
        """Prefix of the outputs of a pod."""
        return pod_outputs(self.uid, self.pod(place))

    def finish(
        self,
        place: str = "prep",
        parameters: Mapping[str, str] | None = None,
        artifacts: Mapping[str, bytes | Mapping[str, bytes]] | None = None,
        **outputs: Any,
    ) -> None:
        """The pod ends well: argoexec stores its artifacts and reports all outputs, and Argo takes them over."""
        located = []
        for name, data in (artifacts or {}).items():
            key = f"{self.folder(place)}{name}"
            files = {key: data} if isinstance(data, bytes) else {f"{key}/{path}": part for path, part in data.items()}
            for file, part in files.items():
                self.store.create(file, part)
            located.append({"name": name, "path": f"/tmp/{name}", "s3": {"key": self.store.artifact_key(key)}})
        values = [{"name": name, "value": value} for name, value in (parameters or {}).items()]
        reported = {"parameters": values, "artifacts": located, "exitCode": "0", **outputs}
        self.succeed(place, {side: value for side, value in reported.items() if value not in ([], None)})

    def succeed(self, place: str, outputs: Manifest) -> None:
        """The pod ended well and reported these outputs."""
        self.write(place, phase="Succeeded", outputs=outputs)
        if (retry := self._retry(place)) is not None:
            self.write(retry, "Retry", phase="Succeeded", outputs=outputs)

    def fail(
        self,
        place: str = "prep",
        message: str = FAILED,
        exit_code: int | None = None,
        phase: str = "Failed",
        retry_message: str | None = None,
        **fields: Any,
    ) -> None:
        """The pod fails; with ``retry_message`` no try follows, and this is the message of the node of all tries."""
        outputs = {"outputs": {"exitCode": str(exit_code)}} if exit_code is not None else {}
        self.write(place, phase=phase, message=message, **outputs, **fields)
        if retry_message is not None and (retry := self._retry(place)) is not None:
            self.write(retry, "Retry", phase=phase, message=retry_message, **outputs)

    def _retry(self, place: str) -> str | None:
        parent = place.rpartition("(")[0]
        return parent if self.nodes.get(f"{self.name}.{parent}", {}).get("type") == "Retry" else None

    def claim(self, step: str = "prep", attempt: int = 1) -> AttemptClaim | None:
        return find_record(self.store, RunLayout(RUN).attempt(step, attempt), AttemptClaim)

    def end(self, step: str = "prep", attempt: int = 1) -> AttemptEnd | None:
        return find_attempt_end(self.store, RUN, step, attempt)

    def resumed(self, **fields: Any) -> "ArgoWorkflow":
        """The Workflow of the next submission, on the same store."""
        number = self.submission + 1
        given = {"specs": self.specs, "depends": self.depends, "parameters": self.parameters, **fields}
        return ArgoWorkflow(
            self.store, name=f"digits-{number}", uid=f"uid-{number}", submission=number, now=self.now, **given
        )


def claim_submission(store: Store, submission: int, workflow: str = "") -> None:
    """Claim a later submission, as a resume does before its Workflow exists."""
    claim = SubmissionClaim(
        run=RUN,
        submission=submission,
        kind=SubmissionKind.RESUME,
        workflow_name=workflow or f"digits-{submission}",
        namespace="ml",
    )
    claim_record(store, RunLayout(RUN).submission(submission), claim)


def end_of(workflow: ArgoWorkflow, step: str = "prep", attempt: int = 1) -> AttemptEnd:
    """The end of an attempt that has one."""
    end = workflow.end(step, attempt)
    assert end is not None
    return end


def claim_of(workflow: ArgoWorkflow, step: str = "prep", attempt: int = 1) -> AttemptClaim:
    """The claim of an attempt that has one."""
    claim = workflow.claim(step, attempt)
    assert claim is not None
    return claim


def attempt_keys(store: Store) -> list[str]:
    """Keys of all claims and ends, below the folder of attempts."""
    prefix = RunLayout(RUN).attempts
    return [info.key.removeprefix(prefix) for info in store.list(prefix)]
