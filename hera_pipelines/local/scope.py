"""Variables that a template or task can see.

A variable is a text, or None: an output that nobody produced, since its step
was skipped. Artifacts are kept apart, because they are never put into a text.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hera_pipelines.local.nodes import Artifact, Node, rfc3339
from tiphys.protocol.fan_out import aggregate
from tiphys.protocol.pipeline import Manifest

Variables = Mapping[str, str | None]


@dataclass(frozen=True)
class Scope:
    """Texts and artifacts by their dotted names."""

    values: dict[str, str | None] = field(default_factory=dict)
    artifacts: dict[str, Artifact] = field(default_factory=dict)

    def __or__(self, other: "Scope") -> "Scope":
        return Scope(self.values | other.values, self.artifacts | other.artifacts)


def inputs_of(template: Manifest) -> Scope:
    """``inputs.parameters.*`` and ``inputs.artifacts.*`` of a bound template."""
    inputs = template.get("inputs") or {}
    return Scope(
        {f"inputs.parameters.{p['name']}": str(p["value"]) for p in inputs.get("parameters") or [] if "value" in p},
        {f"inputs.artifacts.{a['name']}": a for a in inputs.get("artifacts") or []},
    )


def of_node(kind: str, name: str, node: Node, template: Manifest) -> Scope:
    """``<kind>.<name>.*``, where kind is ``steps`` or ``tasks``.

    ``template`` is the one the node ran, or would have run: a skipped node
    offers its declared defaults.
    """
    shown = node.latest
    prefix = f"{kind}.{name}"
    values: dict[str, str | None] = {
        f"{prefix}.id": shown.id,
        f"{prefix}.status": str(shown.phase),
        f"{prefix}.startedAt": rfc3339(shown.started),
    }
    if shown.finished:
        values[f"{prefix}.finishedAt"] = rfc3339(shown.finished)
    scope = Scope(values) | _outputs(prefix, shown)
    if node.items:
        return scope | Scope(_aggregate(prefix, node.items))
    return _absent(prefix, template) | scope if node.outputs is None and not node.completed else scope


def _outputs(prefix: str, node: Node) -> Scope:
    if node.outputs is None:
        return Scope()
    outputs = node.outputs
    values: dict[str, str | None] = {
        f"{prefix}.outputs.parameters.{name}": value for name, value in outputs.parameters.items()
    }
    if outputs.result is not None:
        values[f"{prefix}.outputs.result"] = outputs.result
    if outputs.exit_code is not None:
        values[f"{prefix}.exitCode"] = outputs.exit_code
    return Scope(values, {f"{prefix}.outputs.artifacts.{name}": a for name, a in outputs.artifacts.items()})


def _absent(prefix: str, template: Manifest) -> Scope:
    declared = (template.get("outputs") or {}).get("parameters") or []
    return Scope(
        {f"{prefix}.outputs.parameters.{p['name']}": (p.get("valueFrom") or {}).get("default") for p in declared}
    )


def _aggregate(prefix: str, items: Iterable[Node]) -> dict[str, str | None]:
    """Outputs of a fan-out's succeeded items as JSON lists (Argo: processAggregateNodeOutputs)."""
    produced = [item.outputs for item in items if item.phase == "Succeeded" and item.outputs is not None]
    results = [_parsed(outputs.result) for outputs in produced if outputs.result is not None]
    parameters = aggregate(outputs.parameters for outputs in produced)
    return {
        f"{prefix}.outputs.result": _json(results),
        **{f"{prefix}.{path}": text for path, text in parameters.items()},
    }


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
