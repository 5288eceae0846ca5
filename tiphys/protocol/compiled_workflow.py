"""Reading a compiled Workflow: which steps it gates and how they hang together.

Where Argo's placeholders stand in a manifest.

compile, pruning and the local engine all look for them. If one of them missed a
place, a Workflow would wait for a value that nobody makes.

How Argo says that somebody wanted the end: it writes so at the nodes that it ends, and in two ways.

Source: Argo Workflows ``workflow/controller/exec_control.go`` for pods (``workflow
shutdown with strategy:  Stop``), ``operator.go`` for plugin steps, retries and the
Workflow itself (``Stopped with strategy 'Stop'``).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import ValidationError

from tiphys.errors import UsageError
from tiphys.protocol.operations import PLUGIN
from tiphys.protocol.step_spec import PIPELINE_ANNOTATION, STEP_ANNOTATION, STORE_ANNOTATION, StepSpec

Manifest = dict[str, Any]
"""An Argo Workflow, or a part of one, as parsed from YAML."""


@dataclass(frozen=True)
class CompiledPipeline:
    """A Workflow that `hera_pipelines.compile` made."""

    manifest: Manifest
    name: str
    store: str
    steps: Mapping[str, StepSpec]
    """Gated steps by name; the name is also that of the DAG task and of its template."""

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> "CompiledPipeline":
        """Read ``manifest``.

        Raises:
            UsageError: Tiphys did not compile it, or a step's annotation is damaged.
        """
        annotations = manifest.get("metadata", {}).get("annotations") or {}
        if PIPELINE_ANNOTATION not in annotations:
            raise UsageError(
                f"the Workflow has no annotation {PIPELINE_ANNOTATION}, so Tiphys did not compile it; "
                "compile the pipeline with `tiphys compile` and submit that"
            )
        return cls(
            manifest=manifest,
            name=annotations[PIPELINE_ANNOTATION],
            store=annotations.get(STORE_ANNOTATION, ""),
            steps={spec.name: spec for spec in _specs(manifest)},
        )

    @property
    def run_name(self) -> str:
        """Name of its runs as the plugin gets it, with Argo's placeholders; empty in a document without operations."""
        bodies = ((one.get("plugin") or {}).get(PLUGIN) for one in self.manifest["spec"].get("templates", []))
        return next((body["run"] for body in bodies if body and body.get("run")), "")

    def tasks(self) -> list[Manifest]:
        """Tasks of the entry DAG, in the order written."""
        entry = template(self.manifest, self.manifest["spec"]["entrypoint"])
        tasks: list[Manifest] = entry.get("dag", {}).get("tasks", [])
        return tasks

    def step(self, name: str) -> StepSpec:
        """The spec of a step; `UsageError` if the workflow has no such step."""
        if name not in self.steps:
            known = ", ".join(sorted(self.steps)) or "none"
            raise UsageError(f"pipeline {self.name} has no step {name!r}; its steps are: {known}")
        return self.steps[name]

    def volume(self, name: str) -> str:
        """URL of the store of its own that a step keeps its checkpoints in; empty for that of the run."""
        spec = self.steps.get(name)
        store = spec.checkpoints.store if spec and spec.checkpoints else ""
        return "" if store == self.store else store


def template(manifest: Manifest, name: str) -> Manifest:
    """The template called ``name``; `UsageError` if there is none."""
    for candidate in manifest["spec"].get("templates", []):
        if candidate.get("name") == name:
            found: Manifest = candidate
            return found
    raise UsageError(f"the Workflow has no template {name!r}")


def parameters_of(manifest: Manifest) -> dict[str, str]:
    """Workflow parameters and their values, as text; those without a value are left out."""
    given = (manifest["spec"].get("arguments") or {}).get("parameters") or []
    return {p["name"]: str(p["value"]) for p in given if p.get("value") is not None}


def _specs(manifest: Manifest) -> Iterator[StepSpec]:
    for candidate in manifest["spec"].get("templates", []):
        text = ((candidate.get("metadata") or {}).get("annotations") or {}).get(STEP_ANNOTATION)
        if text is not None:
            try:
                yield StepSpec.model_validate_json(text)
            except ValidationError as error:
                raise UsageError(
                    f"template {candidate.get('name')!r}: annotation {STEP_ANNOTATION} is damaged "
                    f"({error.errors()[0]['msg']}); compile the pipeline again"
                ) from error


TAG = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
"""One ``{{…}}``; its first group is what stands inside."""

_EXPRESSION_FIELDS = ("expression", "fromExpression")


class Placeholder(NamedTuple):
    """One text that Argo evaluates: the inside of a tag, or a whole field that is an expression."""

    text: str
    is_expression: bool
    """Whether expr-lang decides what it means; else it is the plain name of a variable."""


def placeholders(part: Any, field: str = "") -> Iterator[Placeholder]:
    """Every placeholder in ``part`` of a manifest. ``field`` is the name of the field that holds it."""
    if isinstance(part, dict):
        for name, value in part.items():
            yield from placeholders(value, name)
    elif isinstance(part, list):
        for value in part:
            yield from placeholders(value, field)
    elif isinstance(part, str) and field in _EXPRESSION_FIELDS:
        yield Placeholder(part, is_expression=True)
    elif isinstance(part, str):
        for tag in TAG.findall(part):
            yield Placeholder(tag, is_expression=tag.startswith("="))


_SAID = re.compile(r"(shutdown|Stopped) with strategy")


def tells_of_shutdown(message: str) -> bool:
    """Whether a message of a node, or one that is made of such, says that ``spec.shutdown`` was the reason."""
    return bool(_SAID.search(message))
