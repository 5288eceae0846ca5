"""Gives a template its arguments, and takes its outputs from what its children made.

Source: Argo Workflows ``workflow/common/util.go`` (ProcessArgs) and
``controller/scope.go``.

Variables that a template or task can see.

A variable is a text, or None: an output that nobody produced, since its step
was skipped. Artifacts are kept apart, because they are never put into a text.

Puts values in the place of ``{{…}}``, as Argo does (``util/template``).

Argo works on the JSON text of a template and escapes what it inserts, so a
value can never leave the string that it stands in. Walking the strings of the
parsed document has the same effect and cannot produce invalid JSON.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hera_pipelines.local.expressions.evaluate import MissingNameError, go_json
from hera_pipelines.local.expressions.expr import nested, value_of
from hera_pipelines.local.nodes import Artifact, Node, Outputs, rfc3339
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import TAG, Manifest
from tiphys.protocol.fan_out import aggregate

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


_ANY = ("",)
_LATE = ("workflow.status", "workflow.failures")
"""Known at the exit handler only: an expression that names them must not be decided before, ``??`` or not."""


class UnresolvedError(UsageError):
    """A variable that must have a value by now has none."""


def substitute(document: Any, variables: Variables, strict: Collection[str] = ()) -> Any:
    """``document`` with every known tag replaced; unknown tags stay as they are.

    Tags whose name begins with one of the ``strict`` roots (such as ``steps``)
    must be known. References to artifacts are exempt: they are resolved apart.

    Raises:
        UnresolvedError: a strict tag has no value, or a plain tag names an
            output that a skipped step never made.
    """
    match document:
        case str():
            return replace_tags(document, variables, strict)
        case dict():
            return {
                replace_tags(key, variables, strict): substitute(value, variables, strict)
                for key, value in document.items()
            }
        case list():
            return [substitute(element, variables, strict) for element in document]
    return document


def substitute_all(document: Any, variables: Variables) -> Any:
    """Like `substitute`, and no tag may stay: how Argo fills in the items of a fan-out."""
    return substitute(document, variables, _ANY)


def replace_tags(text: str, variables: Variables, strict: Collection[str] = ()) -> str:
    """`substitute` for one text."""
    if "{{" not in text:
        return text
    return TAG.sub(lambda match: _replacement(match[1], variables, strict), text)


def tags(text: str) -> list[str]:
    """What stands between the braces, without outer spaces."""
    return [match[1].strip() for match in TAG.finditer(text)]


def replace_every_tag(text: str, value: str) -> str:
    """``text`` with ``value`` in the place of every tag."""
    return TAG.sub(lambda _: value, text)


def is_absent(text: str, variables: Variables) -> bool:
    """Whether ``text`` is nothing but a reference to an output that a skipped step never made."""
    match = re.fullmatch(r"\{\{([^{}=]*)\}\}", text.strip())
    name = match[1].strip() if match else ""
    return name in variables and variables[name] is None


def _replacement(tag: str, variables: Variables, strict: Collection[str]) -> str:
    if tag.startswith("="):
        return _expression(tag[1:], variables, strict)
    name = tag.strip()
    if name in variables:
        value = variables[name]
        if value is None:
            raise UnresolvedError(f"{{{{{name}}}}} has no value: its step was skipped, and it has no default")
        return value
    outer, braces, inner = tag.rpartition("{{")
    if braces and outer and isinstance(value := variables.get(inner.strip()), str):
        return "{{" + outer + value
    if _is_strict(name, strict) and (strict is _ANY or ".outputs.artifacts." not in name):
        raise UnresolvedError(_never(name))
    return "{{" + tag + "}}"


def _never(name: str) -> str:
    kind, _, rest = name.partition(".")
    step, _, field = rest.partition(".")
    if kind in ("steps", "tasks") and field:
        hint = f"; where a value may be missing write {{{{={kind}['{step}'].{field} ?? ''}}}}"
        return f"{{{{{name}}}}} has no value; on a cluster this workflow would wait for it for ever{hint}"
    return f"{{{{{name}}}}} has no value here"


def _expression(text: str, variables: Variables, strict: Collection[str]) -> str:
    literal = "{{=" + text + "}}"
    if any(late in text and late not in variables for late in _LATE):
        return literal
    try:
        value = value_of(text, nested(dict(variables)))
    except MissingNameError as error:
        if _is_strict(error.name, strict):
            raise UnresolvedError(f"{literal}: {error}") from error
        return literal
    except UsageError as error:
        if strict:
            raise UnresolvedError(f"{literal}: {error}") from error
        return literal
    if value is None:
        if strict:
            raise UnresolvedError(f"{literal} gives nil; add a fallback with ??")
        return literal
    return value if isinstance(value, str) else go_json(value)


def _is_strict(name: str, strict: Collection[str]) -> bool:
    return any(root == "" or name == root or name.startswith(f"{root}.") for root in strict)


_LOCATIONS = ("s3", "raw")


def bind(template: Manifest, arguments: Manifest, variables: Variables) -> Manifest:
    """``template`` with ``arguments`` as its inputs and everything known by now filled in.

    ``variables`` hold ``workflow.*`` and the names of this node.

    Raises:
        UsageError: an input has neither an argument nor a default.
    """
    given = {p["name"]: p for p in arguments.get("parameters") or []}
    artifacts = {a["name"]: a for a in arguments.get("artifacts") or []}
    inputs = template.get("inputs") or {}
    bound = {
        **template,
        "inputs": {
            **inputs,
            "parameters": [_parameter(p, given.get(p["name"])) for p in inputs.get("parameters") or []],
            "artifacts": [_artifact(a, artifacts.get(a["name"])) for a in inputs.get("artifacts") or []],
        },
    }
    return fill_in(bound, variables)


def fill_in(template: Manifest, variables: Variables) -> Manifest:
    """Substitute ``variables``, then the template's own inputs and paths."""
    first: Manifest = substitute(template, variables)
    own = {**variables, **inputs_of(first).values, **paths_as_variables(first)}
    second: Manifest = substitute(first, own)
    return second


def located(artifact: Artifact) -> bool:
    """Whether the artifact says where its bytes are."""
    return any(artifact.get(kind) for kind in _LOCATIONS)


def resolve_arguments(arguments: Manifest, scope: Scope) -> Manifest:
    """Arguments of a task or step, with references to other nodes replaced.

    A parameter that is nothing but a reference to an output that a skipped
    step never made counts as not given, so the input's default applies.
    """
    parameters = [p for p in arguments.get("parameters") or [] if not is_absent(str(p.get("value", "")), scope.values)]
    found = (_resolved(a, scope) for a in arguments.get("artifacts") or [])
    return {
        "parameters": substitute(parameters, scope.values, ("steps", "tasks")),
        "artifacts": [artifact for artifact in found if artifact is not None],
    }


def outputs_of(template: Manifest, scope: Scope) -> Outputs | None:
    """Outputs of a DAG or steps template.

    Raises:
        UsageError: an output refers to something that was not made and has no default.
    """
    declared = template.get("outputs") or {}
    parameters = {p["name"]: _output(p, scope) for p in declared.get("parameters") or []}
    artifacts = {a["name"]: _resolved(a, scope) for a in declared.get("artifacts") or []}
    if not parameters and not artifacts:
        return None
    return Outputs(parameters, {name: artifact for name, artifact in artifacts.items() if artifact})


def _parameter(declared: Manifest, given: Manifest | None) -> Manifest:
    value = given.get("value") if given else None
    for candidate in (value, declared.get("value"), declared.get("default")):
        if candidate is not None:
            return {"name": declared["name"], "value": _text(candidate)}
    raise UsageError(f"inputs.parameters.{declared['name']} was not supplied and has no default")


def _artifact(declared: Artifact, given: Artifact | None) -> Artifact:
    own: Artifact = {key: declared[key] for key in ("name", "path", "mode", "optional") if key in declared}
    source = given if given and located(given) else declared
    if not located(source) and not declared.get("optional"):
        raise UsageError(f"inputs.artifacts.{declared['name']} was not supplied")
    return _location(source) | own


def _resolved(artifact: Artifact, scope: Scope) -> Artifact | None:
    if "from" not in artifact:
        found: Artifact = substitute(artifact, scope.values)
        return found
    names = tags(artifact["from"])
    source = scope.artifacts.get(names[0]) if len(names) == 1 else None
    if source is None or not located(source):
        if artifact.get("optional"):
            return None
        raise UnresolvedError(
            f"artifact {artifact['name']}: {artifact['from']} was not made; "
            "mark it optional, or do not run this step without it"
        )
    return {**_location(source), "name": artifact["name"]}


def _location(artifact: Artifact) -> Artifact:
    return {kind: artifact[kind] for kind in _LOCATIONS if artifact.get(kind)}


def _output(declared: Manifest, scope: Scope) -> str:
    source = declared.get("valueFrom") or {}
    value = _value(source, scope)
    if value is None:
        value = source.get("default")
    if value is None:
        raise UnresolvedError(f"output parameter {declared['name']}: {_described(source)} has no value and no default")
    return _text(value)


def _value(source: Manifest, scope: Scope) -> Any:
    try:
        if "expression" in source:
            return value_of(source["expression"], nested(dict(scope.values)))
    except UsageError:
        if "default" not in source:
            raise
        return None
    names = tags(source.get("parameter", ""))
    return scope.values.get(names[0]) if names else source.get("parameter")


def _described(source: Manifest) -> str:
    return str(source.get("parameter") or source.get("expression") or "its source")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else str(value)


def paths_as_variables(template: Manifest) -> dict[str, str | None]:
    """``inputs.artifacts.x.path`` and the like."""
    found: dict[str, str | None] = {}
    for side in ("inputs", "outputs"):
        declared = template.get(side) or {}
        found |= {
            f"{side}.artifacts.{a['name']}.path": a["path"] for a in declared.get("artifacts") or [] if "path" in a
        }
        found |= {
            f"{side}.parameters.{p['name']}.path": p["valueFrom"]["path"]
            for p in declared.get("parameters") or []
            if "path" in (p.get("valueFrom") or {})
        }
    return found
