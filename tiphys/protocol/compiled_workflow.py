"""Reader of a compiled Workflow: its steps, tasks, parameters, annotations and tags.

Compiler, plugin, controller and local engine share this reader, so that they
agree on the content of a Workflow.

`is_shutdown_message` recognizes both forms in which Argo reports ``spec.shutdown``
(Argo Workflows, ``workflow/controller/exec_control.go`` for pods: ``workflow
shutdown with strategy:  Stop``; ``operator.go`` for plugin steps, retries and the
Workflow itself: ``Stopped with strategy 'Stop'``).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from tiphys.errors import UsageError, unknown_name_message
from tiphys.protocol.operations import PLUGIN_BODY_KEY, REUSE_TEMPLATE
from tiphys.protocol.step_spec import PIPELINE_ANNOTATION, RUN_PARAMETER, STEP_ANNOTATION, STORE_ANNOTATION, StepSpec
from tiphys.records import Record

RecordT = TypeVar("RecordT", bound=Record)

_CODE, _CODE_END = "# Code of the author: ", "# End of the author's code"
_CODE_BLOCK = re.compile(rf"({_CODE}[0-9a-f]{{64}}).*{_CODE_END}", re.DOTALL)

Manifest = dict[str, Any]
"""An Argo Workflow, or a part of one, as parsed from YAML."""


@dataclass(frozen=True)
class CompiledPipeline:
    """A Workflow that `hera_pipelines.compile` produced."""

    manifest: Manifest
    """Without the gate of ``reuse=True``: only Argo needs it, in a Workflow that was submitted as it is."""
    name: str
    store: str
    steps: Mapping[str, StepSpec]
    """Steps by name, which is that of the DAG task. Several steps without a gate may share a template."""

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> "CompiledPipeline":
        """Read ``manifest``.

        Raises:
            UsageError: Tiphys did not compile it, or a step's annotation is damaged.
        """
        annotations = manifest.get("metadata", {}).get("annotations") or {}
        if PIPELINE_ANNOTATION not in annotations and RUN_PARAMETER in read_workflow_parameters(manifest):
            raise UsageError(
                f"the Workflow is compiled and has no annotation {PIPELINE_ANNOTATION}: its template lacks "
                "spec.workflowMetadata, which hands annotations on; make the template with `tiphys compile --as "
                "workflowtemplate` (clusterworkflowtemplate, cronworkflow), not by a change of its kind"
            )
        if PIPELINE_ANNOTATION not in annotations:
            raise UsageError(
                f"the Workflow has no annotation {PIPELINE_ANNOTATION}, so Tiphys did not compile it; "
                "compile the pipeline with `tiphys compile` and submit that"
            )
        return cls(
            manifest=_without_reuse_gate(manifest),
            name=annotations[PIPELINE_ANNOTATION],
            store=annotations.get(STORE_ANNOTATION, ""),
            steps={spec.name: spec for spec in _read_step_specs(manifest)},
        )

    @property
    def run_name(self) -> str:
        """The run name in the plugin operations, with Argo's placeholders; empty in a Workflow without operations."""
        templates = self.manifest["spec"].get("templates", [])
        bodies = ((template.get("plugin") or {}).get(PLUGIN_BODY_KEY) for template in templates)
        return next((body["run"] for body in bodies if body and body.get("run")), "")

    def tasks(self) -> list[Manifest]:
        """Tasks of the entry DAG, in the order of the document."""
        entry = find_template(self.manifest, self.manifest["spec"]["entrypoint"])
        tasks: list[Manifest] = entry.get("dag", {}).get("tasks", [])
        return tasks

    def step(self, name: str) -> StepSpec:
        """The spec of a step.

        Raises:
            UsageError: the workflow has no such step.
        """
        if name not in self.steps:
            raise UsageError(unknown_name_message(f"pipeline {self.name}", "step", name, sorted(self.steps)))
        return self.steps[name]

    def checkpoint_volume_url(self, name: str) -> str:
        """URL of the separate store for the checkpoints of a step; empty for the run's store.

        Raises:
            UsageError: it is no volume. The services reach the buckets of all tenants, so an author may name none.
        """
        spec = self.steps.get(name)
        store = spec.checkpoints.store if spec and spec.checkpoints else ""
        if store in ("", self.store):
            return ""
        if not store.startswith("file:"):
            raise UsageError(
                f"step {name!r} keeps its checkpoints in {store}; give checkpoints the run's store, or a volume "
                "(file:///…)"
            )
        return store


def _without_reuse_gate(manifest: Manifest) -> Manifest:
    gate, spec = f"{REUSE_TEMPLATE}-", manifest["spec"]
    if not str(spec.get("entrypoint")).startswith(gate):
        return manifest
    kept = [
        template
        for template in spec.get("templates") or []
        if template.get("name") not in (spec["entrypoint"], REUSE_TEMPLATE)
    ]
    return {**manifest, "spec": {**spec, "entrypoint": spec["entrypoint"].removeprefix(gate), "templates": kept}}


def find_template(manifest: Manifest, name: str) -> Manifest:
    """The template ``name``.

    Raises:
        UsageError: the Workflow has no such template.
    """
    templates: list[Manifest] = manifest["spec"].get("templates", [])
    for template in templates:
        if template.get("name") == name:
            return template
    raise UsageError(f"the Workflow has no template {name!r}")


def read_annotation(
    manifest: Mapping[str, Any], annotation: str, kind: type[RecordT], consequence: str
) -> RecordT | None:
    """Read a policy that an annotation of the Workflow holds as JSON; None without the annotation.

    ``consequence`` ends the error message: what follows from the damage, and what to do.

    Raises:
        UsageError: the annotation is damaged.
    """
    text = ((manifest.get("metadata") or {}).get("annotations") or {}).get(annotation)
    if not text:
        return None
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise UsageError(f"annotation {annotation} is damaged ({_first_mistake(error)}){consequence}") from error


def _first_mistake(error: ValidationError) -> str:
    first = error.errors()[0]
    return ": ".join(part for part in (".".join(map(str, first["loc"])), first["msg"]) if part)


def read_workflow_parameters(manifest: Manifest) -> dict[str, str]:
    """Workflow parameters and their values as text, without parameters that have no value."""
    parameters = (manifest["spec"].get("arguments") or {}).get("parameters") or []
    return {p["name"]: str(p["value"]) for p in parameters if p.get("value") is not None}


FAN_OUT_FIELDS = ("withItems", "withParam", "withSequence")


def is_fan_out(task: Manifest) -> bool:
    return any(task.get(field) for field in FAN_OUT_FIELDS)


def _read_step_specs(manifest: Manifest) -> Iterator[StepSpec]:
    """The specs of all steps, in the order of the tasks: a template without a gate makes a step of each of its tasks.

    A gated step without a task, as in a damaged Workflow, comes last.
    """
    templates = manifest["spec"].get("templates", [])
    by_template = dict(read_template_specs(templates))
    entry: Manifest = next(
        (template for template in templates if template.get("name") == manifest["spec"].get("entrypoint")), {}
    )
    for task in (entry.get("dag") or {}).get("tasks") or []:
        spec = by_template.get(task.get("template", ""))
        if spec is None:
            continue
        yield spec if spec.is_gated else spec.model_copy(update={"name": task["name"], "fan_out": is_fan_out(task)})
    yield from (spec for spec in by_template.values() if spec.is_gated)


def read_template_specs(templates: Iterable[Manifest]) -> Iterator[tuple[str, StepSpec]]:
    """Names of the templates of steps, each with its spec; several tasks may call one without a gate.

    Raises:
        UsageError: an annotation is damaged.
    """
    for template in templates:
        text = ((template.get("metadata") or {}).get("annotations") or {}).get(STEP_ANNOTATION)
        if text is not None:
            try:
                yield template["name"], StepSpec.model_validate_json(text)
            except ValidationError as error:
                raise UsageError(
                    f"template {template.get('name')!r}: annotation {STEP_ANNOTATION} is damaged "
                    f"({_first_mistake(error)}); compile the pipeline again"
                ) from error


def split_tags(text: str, opening: str = "{{") -> Iterator[tuple[str, str | None]]:
    """Cut ``text`` into pairs of the text before a tag ``{{…}}`` and the inside of the tag.

    The last pair holds the text after the last tag, and None. A tag ends with the first ``}}``, as in Argo. Takes
    linear time, which a regular expression does not: it searches for an end behind each beginning.
    """
    done, start = 0, text.find(opening)
    while start >= 0 and (end := text.find("}}", start + len(opening))) >= 0:
        yield text[done:start], text[start + len(opening) : end]
        done = end + 2
        start = text.find(opening, done)
    yield text[done:], None


def replace_tags(text: str, change: Callable[[str], str], opening: str = "{{") -> str:
    """Return ``text`` with each tag replaced by what ``change`` returns for its inside."""
    parts = (before + ("" if tag is None else change(tag)) for before, tag in split_tags(text, opening))
    return "".join(parts)


def contains_tags(part: Any) -> bool:
    """Whether a part of a manifest holds tags that Argo would substitute."""
    if isinstance(part, dict):
        return any(contains_tags(value) for value in part.values())
    if isinstance(part, list):
        return any(contains_tags(value) for value in part)
    return isinstance(part, str) and "{{" in part


def substitute_tags(part: Any, value_of: Callable[[str], str | None]) -> Any:
    """Return ``part`` with each plain tag replaced for which ``value_of`` returns a value; other tags stay."""
    if isinstance(part, dict):
        return {name: substitute_tags(value, value_of) for name, value in part.items()}
    if isinstance(part, list):
        return [substitute_tags(value, value_of) for value in part]
    if isinstance(part, str):

        def replacement(tag: str) -> str:
            value = value_of(tag.strip())
            return f"{{{{{tag}}}}}" if value is None else value

        return replace_tags(part, replacement)
    return part


_SHUTDOWN_MESSAGE = re.compile(r"(shutdown|Stopped) with strategy")


def is_shutdown_message(message: str) -> bool:
    """Whether a node message, or a message that quotes one, names ``spec.shutdown`` as the reason."""
    return bool(_SHUTDOWN_MESSAGE.search(message))


def mark_code(block: str, digest: str) -> str:
    """The author's code in the script of a function, with the hash of what it means, SHA-256 in hex."""
    return f"{_CODE}{digest}\n{block}{_CODE_END}\n"


def program_source(text: str) -> str:
    """``text`` with the hash in place of the author's code; equal for two scripts of the same program.

    The code holds the author's comments and the lines of the file, which make no other program.
    """
    return _CODE_BLOCK.sub(r"\1", text)


STOPPED_STATUS = "Stopped"
"""Status of a Workflow that a person stopped. Argo calls it Failed."""


def shown_status(status: str, message: str) -> str:
    """The status of a Workflow that ended, for people: Argo's, or `STOPPED_STATUS`."""
    return STOPPED_STATUS if status != "Succeeded" and is_shutdown_message(message) else status
