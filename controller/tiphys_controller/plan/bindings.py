"""Puts what finished tasks left into a task that reads it, so that it stands without them.

What a finished task left for others: its values by path, as Argo would answer for them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.fan_out import aggregate
from tiphys.records import AttemptEnd, OutputKind
from tiphys_controller.plan.dag import Reference, artifact_reference, parse_reference, references, substitute


class TaskOutputs(NamedTuple):
    """``values`` by path below ``tasks.<name>``; ``artifacts`` are keys in storage, by name."""

    values: Mapping[str, str]
    artifacts: Mapping[str, str] = {}


OMITTED = TaskOutputs({"status": "Omitted"})


def outputs_of_step(end: AttemptEnd) -> TaskOutputs:
    """Outputs of a step that is not fanned out."""
    parameters = {f"outputs.parameters.{name}": value for name, value in _parameters(end).items()}
    artifacts = {output.name: output.key for output in end.outputs if output.kind is OutputKind.ARTIFACT}
    return TaskOutputs(_literal({"status": "Succeeded", **parameters}), artifacts)


def outputs_of_items(ends: Sequence[AttemptEnd]) -> TaskOutputs:
    """Outputs of a fan-out whose items, in their order, ended with ``ends``. Argo gathers no artifacts."""
    return TaskOutputs(_literal({"status": "Succeeded", **aggregate([_parameters(end) for end in ends])}))


def _parameters(end: AttemptEnd) -> dict[str, str]:
    given = (output for output in end.outputs if output.kind is OutputKind.PARAMETER)
    return {output.name: output.value for output in given if output.value is not None}


def _literal(values: dict[str, str]) -> dict[str, str]:
    """Values that can stand in a manifest: Argo would read braces as a tag of its own."""
    return {path: value for path, value in values.items() if "{{" not in value}


ArtifactKey = Callable[[str], str]
"""From a key in storage to the same key as Argo sees it."""


def bind(body: Manifest, finished: Mapping[str, TaskOutputs], artifact_key: ArtifactKey) -> Manifest:
    """A task with values and artifact keys in the place of references to ``finished`` tasks.

    References that cannot be bound stay; see `unbound`.
    """

    def value_of(tag: str) -> str | None:
        reference = parse_reference(tag)
        outputs = finished.get(reference.task) if reference else None
        return outputs.values.get(reference.path) if reference and outputs else None

    bound: Manifest = substitute(_bind_artifacts(body, finished, artifact_key), value_of)
    return bound


def unbound(body: Manifest, finished: Mapping[str, TaskOutputs]) -> list[Reference]:
    """References to ``finished`` tasks for which storage has no value."""
    return [r for r in references(bind(body, finished, lambda key: key)) if r.task in finished]


def _bind_artifacts(part: Any, finished: Mapping[str, TaskOutputs], artifact_key: ArtifactKey) -> Any:
    if isinstance(part, list):
        return [_bind_artifacts(value, finished, artifact_key) for value in part]
    if not isinstance(part, dict):
        return part
    if key := _key_of(part, finished):
        return _by_key(part, artifact_key(key))
    return {name: _bind_artifacts(value, finished, artifact_key) for name, value in part.items()}


def _key_of(part: Manifest, finished: Mapping[str, TaskOutputs]) -> str | None:
    source = part.get("from")
    reference = artifact_reference(source) if isinstance(source, str) else None
    if not reference or reference.task not in finished or not reference.path.startswith("outputs.artifacts."):
        return None
    return finished[reference.task].artifacts.get(reference.path.removeprefix("outputs.artifacts."))


def _by_key(artifact: Manifest, key: str) -> Manifest:
    """The artifact by its key. Argo applies ``subPath`` to a reference only, so it becomes part of the key."""
    rest = {name: value for name, value in artifact.items() if name not in ("from", "subPath")}
    below = artifact.get("subPath")
    return {**rest, "s3": {"key": f"{key}/{below}" if below else key}}
