"""Gives a template its arguments, and takes its outputs from what its children made.

Source: Argo Workflows ``workflow/common/util.go`` (ProcessArgs) and
``controller/scope.go``.
"""

from typing import Any

from hera_pipelines.local.expressions import nested, value_of
from hera_pipelines.local.nodes import Artifact, Outputs
from hera_pipelines.local.scope import Scope, Variables, inputs_of
from hera_pipelines.local.substitute import UnresolvedError, is_absent, substitute, tags
from tiphys.errors import UsageError
from tiphys.protocol.pipeline import Manifest

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
