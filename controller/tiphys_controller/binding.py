"""Puts what finished tasks left into a task that reads it, so that it stands without them."""

from collections.abc import Callable, Mapping
from typing import Any

from tiphys.protocol.pipeline import Manifest
from tiphys_controller.finished import TaskOutputs
from tiphys_controller.references import Reference, artifact_reference, parse_reference, references, substitute

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
