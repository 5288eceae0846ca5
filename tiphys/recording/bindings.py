"""Finds the references between tasks, and replaces those to finished tasks by their recorded values and artifact keys.

A pruned Workflow does not contain the finished tasks, so Argo could not resolve
references to them, in its ``{{tasks.…}}`` tags and in expressions: the Workflow would
wait for a value that no task produces. Values are collected under the paths by which
Argo names them.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tiphys.protocol.compiled_workflow import Manifest, split_tags, substitute_tags
from tiphys.protocol.fan_out import aggregate_outputs, aggregate_results
from tiphys.protocol.step_spec import RESULT_PARAMETER, StepSpec
from tiphys.protocol.variables import find_variables
from tiphys.records import AttemptEnd, OutputKind

_PLAIN = re.compile(r"tasks\.([A-Za-z0-9][-A-Za-z0-9]*)\.(.+)", re.DOTALL)


class Reference(NamedTuple):
    """One mention of a task.

    ``path`` is the part of the task that is read, such as
    ``outputs.parameters.loss``; empty in an expression, which only Argo can evaluate.
    """

    task: str
    path: str

    def __str__(self) -> str:
        return f"{{{{tasks.{self.task}.{self.path}}}}}" if self.path else f"an expression over tasks.{self.task}"


def find_references(part: Any) -> Iterator[Reference]:
    """Every mention of a task in a part of a manifest."""
    for variable in find_variables(part):
        if variable.is_expression and variable.task:
            yield Reference(variable.task, "")
        elif not variable.is_expression and (reference := parse_reference(".".join(variable.names))):
            yield reference


def parse_artifact_reference(text: str) -> Reference | None:
    """The reference in an artifact's ``from``, which is one tag and nothing else; None for any other text."""
    (before, tag), *rest = split_tags(text.strip())
    return parse_reference(tag) if tag is not None and not before and rest == [("", None)] else None


def parse_reference(tag: str) -> Reference | None:
    """The reference inside a plain tag; None for a tag that names no task."""
    match = _PLAIN.fullmatch(tag.strip())
    return Reference(match[1], match[2]) if match else None


class TaskOutputs(NamedTuple):
    """``values`` by path below ``tasks.<name>``; ``artifacts`` are keys in storage, by name."""

    values: Mapping[str, str]
    artifacts: Mapping[str, str] = {}


OMITTED_OUTPUTS = TaskOutputs({"status": "Omitted"})


def collect_step_outputs(end: AttemptEnd) -> TaskOutputs:
    """Outputs of a step that is not fanned out."""
    parameters = {f"outputs.parameters.{name}": value for name, value in output_parameters(end).items()}
    if (printed := parameters.get(f"outputs.parameters.{RESULT_PARAMETER}")) is not None:
        parameters["outputs.result"] = printed
    artifacts = {output.name: output.key for output in end.outputs if output.kind is OutputKind.ARTIFACT}
    return TaskOutputs(_without_tags({"status": "Succeeded", **parameters}), artifacts)


def collect_fan_out_outputs(spec: StepSpec, ends: Sequence[AttemptEnd]) -> TaskOutputs:
    """Outputs of a fan-out whose items, in their order, ended with ``ends``. Argo gathers no artifacts."""
    values = {"status": "Succeeded", **aggregate_outputs(item_parameters(spec, end) for end in ends)}
    printed = [output_parameters(end).get(RESULT_PARAMETER) for end in ends]
    results = [text for text in printed if text is not None]
    if len(results) == len(ends):
        values["outputs.result"] = aggregate_results(results)
    return TaskOutputs(_without_tags(values))


def item_parameters(spec: StepSpec, end: AttemptEnd) -> dict[str, str]:
    """Output parameters of a finished item, of which Argo makes lists: what an item without a gate printed is none."""
    parameters = output_parameters(end)
    if not spec.is_gated and RESULT_PARAMETER not in spec.parameters:
        parameters.pop(RESULT_PARAMETER, None)
    return parameters


def output_parameters(end: AttemptEnd) -> dict[str, str]:
    """Values of the output parameters of a finished step, by name."""
    parameters = (output for output in end.outputs if output.kind is OutputKind.PARAMETER)
    return {output.name: output.value for output in parameters if output.value is not None}


def _without_tags(values: dict[str, str]) -> dict[str, str]:
    """Values that a manifest can hold. Argo would parse double braces in a value as a tag."""
    return {path: value for path, value in values.items() if "{{" not in value}


ArtifactKey = Callable[[str], str]
"""Translates a key of the store to the key that Argo's artifact repository uses."""


def bind_references(body: Manifest, finished: Mapping[str, TaskOutputs], artifact_key: ArtifactKey) -> Manifest:
    """Return a task with references to ``finished`` tasks replaced by values and artifact keys.

    References that cannot be bound stay; see `find_unbound_references`.
    """

    def value_of(tag: str) -> str | None:
        reference = parse_reference(tag)
        outputs = finished.get(reference.task) if reference else None
        return outputs.values.get(reference.path) if reference and outputs else None

    bound: Manifest = substitute_tags(_bind_artifacts(body, finished, artifact_key), value_of)
    return bound


def find_unbound_references(body: Manifest, finished: Mapping[str, TaskOutputs]) -> list[Reference]:
    """References to ``finished`` tasks for which storage has no value."""
    return [r for r in find_references(bind_references(body, finished, lambda key: key)) if r.task in finished]


def _bind_artifacts(part: Any, finished: Mapping[str, TaskOutputs], artifact_key: ArtifactKey) -> Any:
    if isinstance(part, list):
        return [_bind_artifacts(value, finished, artifact_key) for value in part]
    if not isinstance(part, dict):
        return part
    if key := _artifact_key_of(part, finished):
        return _artifact_by_key(part, artifact_key(key))
    return {name: _bind_artifacts(value, finished, artifact_key) for name, value in part.items()}


def _artifact_key_of(part: Manifest, finished: Mapping[str, TaskOutputs]) -> str | None:
    source = part.get("from")
    reference = parse_artifact_reference(source) if isinstance(source, str) else None
    if not reference or reference.task not in finished or not reference.path.startswith("outputs.artifacts."):
        return None
    return finished[reference.task].artifacts.get(reference.path.removeprefix("outputs.artifacts."))


def _artifact_by_key(artifact: Manifest, key: str) -> Manifest:
    """Replace an artifact's reference by a key that includes ``subPath``, which Argo applies only to references."""
    rest = {name: value for name, value in artifact.items() if name not in ("from", "subPath")}
    sub_path = artifact.get("subPath")
    return {**rest, "s3": {"key": f"{key}/{sub_path}" if sub_path else key}}
