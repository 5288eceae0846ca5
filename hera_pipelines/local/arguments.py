"""Arguments, outputs and ``{{…}}`` variables of templates.

A `VariableScope` holds the variables that a template or task may use. A variable
is a text, or None for an output of a skipped step. Artifacts are kept separately,
because they are never inserted into a text. Argo substitutes in the JSON text of a
template and escapes each value; substituting in the strings of the parsed document
has the same effect and cannot produce invalid JSON.

Source: Argo Workflows ``workflow/common/util.go`` (ProcessArgs),
``controller/scope.go`` and ``util/template``.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hera_pipelines.local.expressions.evaluate import MissingNameError
from hera_pipelines.local.expressions.expr import evaluate_expression, nest_variables
from hera_pipelines.local.nodes import Artifact, WorkflowNode, WorkflowNodeOutputs, format_rfc3339
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest, split_tags
from tiphys.protocol.compiled_workflow import replace_tags as replace_each_tag
from tiphys.protocol.fan_out import aggregate_outputs, aggregate_results, argo_text
from tiphys.protocol.variables import find_expression_variables

Variables = Mapping[str, str | None]


@dataclass(frozen=True)
class VariableScope:
    """Variables and artifacts by dotted name."""

    values: dict[str, str | None] = field(default_factory=dict)
    artifacts: dict[str, Artifact] = field(default_factory=dict)

    def __or__(self, other: "VariableScope") -> "VariableScope":
        return VariableScope(self.values | other.values, self.artifacts | other.artifacts)


@dataclass(frozen=True)
class _ArtifactOperand:
    """An artifact in an expression. It has no members there: in Argo it is a Go struct with names of its own."""

    artifact: Artifact


def _expression_environment(scope: VariableScope) -> dict[str, Any]:
    operands = {name: _ArtifactOperand(artifact) for name, artifact in scope.artifacts.items()}
    return nest_variables({**scope.values, **operands})


def input_scope(template: Manifest) -> VariableScope:
    """``inputs.parameters.*`` and ``inputs.artifacts.*`` of a bound template."""
    inputs = template.get("inputs") or {}
    return VariableScope(
        {f"inputs.parameters.{p['name']}": str(p["value"]) for p in inputs.get("parameters") or [] if "value" in p},
        {f"inputs.artifacts.{a['name']}": a for a in inputs.get("artifacts") or []},
    )


def node_scope(kind: str, name: str, node: WorkflowNode, template: Manifest) -> VariableScope:
    """Variables ``<kind>.<name>.*`` of a finished node; ``kind`` is ``steps`` or ``tasks``.

    A skipped node has the declared defaults of its ``template`` as outputs.
    """
    attempt = node.last_attempt
    prefix = f"{kind}.{name}"
    values: dict[str, str | None] = {
        f"{prefix}.id": attempt.id,
        f"{prefix}.status": str(attempt.phase),
        f"{prefix}.startedAt": format_rfc3339(attempt.started),
    }
    if attempt.finished:
        values[f"{prefix}.finishedAt"] = format_rfc3339(attempt.finished)
    scope = VariableScope(values) | _output_scope(prefix, attempt)
    if node.items:
        return scope | VariableScope(_aggregate_outputs(prefix, node.items))
    if node.outputs is None and not node.completed:
        return _default_output_scope(kind, prefix, template) | scope
    return scope


def _output_scope(prefix: str, node: WorkflowNode) -> VariableScope:
    if node.outputs is None:
        return VariableScope()
    outputs = node.outputs
    values: dict[str, str | None] = {
        f"{prefix}.outputs.parameters.{name}": value for name, value in outputs.parameters.items()
    }
    if outputs.result is not None:
        values[f"{prefix}.outputs.result"] = outputs.result
    if outputs.exit_code is not None:
        values[f"{prefix}.exitCode"] = outputs.exit_code
    return VariableScope(values, {f"{prefix}.outputs.artifacts.{name}": a for name, a in outputs.artifacts.items()})


def _default_output_scope(kind: str, prefix: str, template: Manifest) -> VariableScope:
    """Outputs of a skipped node. Only a skipped step has artifacts, without a location (Argo: includeArtifacts)."""
    outputs = template.get("outputs") or {}
    artifacts = (outputs.get("artifacts") or []) if kind == "steps" else []
    return VariableScope(
        {
            f"{prefix}.outputs.parameters.{p['name']}": (p.get("valueFrom") or {}).get("default")
            for p in outputs.get("parameters") or []
        },
        {f"{prefix}.outputs.artifacts.{a['name']}": {} for a in artifacts},
    )


def _aggregate_outputs(prefix: str, items: Iterable[WorkflowNode]) -> dict[str, str | None]:
    """Outputs of a fan-out's succeeded items as JSON lists (Argo: processAggregateNodeOutputs)."""
    produced = [item.outputs for item in items if item.phase == "Succeeded" and item.outputs is not None]
    parameters = aggregate_outputs(outputs.parameters for outputs in produced)
    return {
        f"{prefix}.outputs.result": aggregate_results(
            outputs.result for outputs in produced if outputs.result is not None
        ),
        **{f"{prefix}.{path}": text for path, text in parameters.items()},
    }


_ALL_ROOTS = ("",)
_EXIT_HANDLER_VARIABLES = ("workflow.status", "workflow.failures")
"""Variables of the exit handler: an expression with one of them is evaluated only there, even if it has a ``??``."""


class UnresolvedError(UsageError):
    """A variable has no value at the point where it needs one."""


def substitute_variables(document: Any, variables: Variables, strict: Collection[str] = ()) -> Any:
    """Return ``document`` with every known ``{{…}}`` tag replaced; unknown tags stay unchanged.

    A tag under one of the ``strict`` roots (such as ``steps``) must have a value.
    References to artifacts are exempt, because `resolve_arguments` resolves them.

    Raises:
        UnresolvedError: a strict tag has no value, or a plain tag names an
            output of a skipped step.
    """
    match document:
        case str():
            return replace_tags(document, variables, strict)
        case dict():
            return {
                replace_tags(key, variables, strict): substitute_variables(value, variables, strict)
                for key, value in document.items()
            }
        case list():
            return [substitute_variables(element, variables, strict) for element in document]
    return document


def substitute_all_variables(document: Any, variables: Variables) -> Any:
    """Like `substitute_variables`, but every tag must have a value, as Argo requires for the items of a fan-out."""
    return substitute_variables(document, variables, _ALL_ROOTS)


def replace_tags(text: str, variables: Variables, strict: Collection[str] = ()) -> str:
    """Like `substitute_variables`, for one text."""
    if "{{" not in text:
        return text
    return replace_each_tag(text, lambda tag: _replacement(tag, variables, strict))


def find_tags(text: str) -> list[str]:
    """Contents of all ``{{…}}`` tags in ``text``, without surrounding spaces."""
    return [tag.strip() for _, tag in split_tags(text) if tag is not None]


def replace_every_tag(text: str, value: str) -> str:
    return replace_each_tag(text, lambda _: value)


def is_absent_output(text: str, variables: Variables) -> bool:
    """Whether ``text`` is only a reference to an output of a skipped step."""
    match = re.fullmatch(r"\{\{([^{}=]*)\}\}", text.strip())
    name = match[1].strip() if match else ""
    return name in variables and variables[name] is None


def _replacement(tag: str, variables: Variables, strict: Collection[str]) -> str:
    if tag.startswith("="):
        return _replace_expression(tag[1:], variables, strict)
    name = tag.strip()
    if name in variables:
        value = variables[name]
        if value is None:
            raise UnresolvedError(f"{{{{{name}}}}} has no value: its step was skipped, and it has no default")
        return value
    outer, braces, inner = tag.rpartition("{{")
    if braces and outer and isinstance(value := variables.get(inner.strip()), str):
        return "{{" + outer + value
    if _is_strict(name, strict) and (strict is _ALL_ROOTS or ".outputs.artifacts." not in name):
        raise UnresolvedError(_unresolved_message(name))
    return "{{" + tag + "}}"


def _unresolved_message(name: str) -> str:
    kind, _, rest = name.partition(".")
    step, _, field = rest.partition(".")
    if kind in ("steps", "tasks") and field:
        hint = f"; if the value may be missing, write {{{{={kind}['{step}'].{field} ?? ''}}}}"
        return f"{{{{{name}}}}} has no value; on a cluster this workflow would wait for it forever{hint}"
    return f"{{{{{name}}}}} has no value here"


def _replace_expression(text: str, variables: Variables, strict: Collection[str]) -> str:
    literal = "{{=" + text + "}}"
    used = {".".join(variable.names[:2]) for variable in find_expression_variables(text)}
    if any(late in used and late not in variables for late in _EXIT_HANDLER_VARIABLES):
        return literal
    try:
        value = evaluate_expression(text, nest_variables(dict(variables)))
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
    return argo_text(value)


def _is_strict(name: str, strict: Collection[str]) -> bool:
    return any(root == "" or name == root or name.startswith(f"{root}.") for root in strict)


_LOCATION_FIELDS = ("s3", "raw")


def bind_arguments(template: Manifest, arguments: Manifest, variables: Variables) -> Manifest:
    """Return ``template``, which has its defaults, with ``arguments`` as its inputs and ``variables`` substituted.

    Raises:
        UsageError: an input has neither an argument nor a default.
    """
    parameters = {p["name"]: p for p in arguments.get("parameters") or []}
    artifacts = {a["name"]: a for a in arguments.get("artifacts") or []}
    inputs = template.get("inputs") or {}
    bound = {
        **template,
        "inputs": {
            **inputs,
            "parameters": [_bind_parameter(p, parameters.get(p["name"])) for p in inputs.get("parameters") or []],
            "artifacts": [_bind_artifact(a, artifacts.get(a["name"])) for a in inputs.get("artifacts") or []],
        },
    }
    return fill_in_template(bound, variables)


def fill_in_template(template: Manifest, variables: Variables) -> Manifest:
    """Substitute ``variables``, then the template's own inputs and paths."""
    with_variables: Manifest = substitute_variables(template, variables)
    own = {**variables, **input_scope(with_variables).values, **path_variables(with_variables)}
    with_inputs: Manifest = substitute_variables(with_variables, own)
    return with_inputs


def has_location(artifact: Artifact) -> bool:
    """Whether the artifact has a location (``s3`` or ``raw``)."""
    return any(artifact.get(kind) for kind in _LOCATION_FIELDS)


def resolve_arguments(arguments: Manifest, scope: VariableScope) -> Manifest:
    """Return the arguments of a task or step with references to other nodes replaced.

    A parameter that is only a reference to an output of a skipped step is
    dropped, so the input's default applies.

    Raises:
        UnresolvedError: a reference has no value.
    """
    parameters = [
        p for p in arguments.get("parameters") or [] if not is_absent_output(str(p.get("value", "")), scope.values)
    ]
    artifacts = (_resolve_artifact(a, scope) for a in arguments.get("artifacts") or [])
    return {
        "parameters": substitute_variables(parameters, scope.values, ("steps", "tasks")),
        "artifacts": [artifact for artifact in artifacts if artifact is not None],
    }


def collect_outputs(template: Manifest, scope: VariableScope) -> WorkflowNodeOutputs | None:
    """Collect the outputs of a DAG or steps template; None if it declares none.

    Raises:
        UsageError: an output has neither a value nor a default.
    """
    declared = template.get("outputs") or {}
    parameters = {p["name"]: _output_value(p, scope) for p in declared.get("parameters") or []}
    artifacts = {a["name"]: _resolve_artifact(a, scope) for a in declared.get("artifacts") or []}
    if not parameters and not artifacts:
        return None
    return WorkflowNodeOutputs(parameters, {name: artifact for name, artifact in artifacts.items() if artifact})


def _bind_parameter(declared: Manifest, argument: Manifest | None) -> Manifest:
    value = argument.get("value") if argument else None
    for candidate in (value, declared.get("value"), declared.get("default")):
        if candidate is not None:
            return {"name": declared["name"], "value": _to_text(candidate)}
    raise UsageError(f"inputs.parameters.{declared['name']} was not supplied and has no default")


def _bind_artifact(declared: Artifact, argument: Artifact | None) -> Artifact:
    own: Artifact = {key: declared[key] for key in ("name", "path", "mode", "optional") if key in declared}
    source = argument if argument and has_location(argument) else declared
    if not has_location(source) and not declared.get("optional"):
        raise UsageError(f"inputs.artifacts.{declared['name']} was not supplied")
    return _copy_location(source) | own


def _resolve_artifact(artifact: Artifact, scope: VariableScope) -> Artifact | None:
    if "fromExpression" in artifact:
        return _evaluate_artifact(artifact, scope)
    if "from" not in artifact:
        resolved: Artifact = substitute_variables(artifact, scope.values)
        return resolved
    names = find_tags(artifact["from"])
    source = scope.artifacts.get(names[0]) if len(names) == 1 else None
    if source is None or not has_location(source):
        if artifact.get("optional"):
            return None
        raise UnresolvedError(
            f"artifact {artifact['name']}: {artifact['from']} does not exist; "
            "mark it optional, or skip this step without it"
        )
    return {**_copy_location(source), "name": artifact["name"]}


def _evaluate_artifact(artifact: Artifact, scope: VariableScope) -> Artifact:
    """The artifact that ``fromExpression`` gives; as in Argo, ``optional`` excuses no expression without one."""
    text = artifact["fromExpression"]
    try:
        value = evaluate_expression(text, _expression_environment(scope))
    except UsageError as error:
        raise UnresolvedError(f"artifact {artifact['name']}: the expression {text!r} fails: {error}") from error
    if not isinstance(value, _ArtifactOperand):
        raise UnresolvedError(f"artifact {artifact['name']}: the expression {text!r} gives no artifact")
    return {**_copy_location(value.artifact), "name": artifact["name"]}


def _copy_location(artifact: Artifact) -> Artifact:
    return {kind: artifact[kind] for kind in _LOCATION_FIELDS if artifact.get(kind)}


def _output_value(declared: Manifest, scope: VariableScope) -> str:
    source = declared.get("valueFrom") or {}
    value = _source_value(source, scope)
    if value is None:
        value = source.get("default")
    if value is None:
        raise UnresolvedError(
            f"output parameter {declared['name']}: {_describe_source(source)} has no value and no default"
        )
    if isinstance(value, list | Mapping | _ArtifactOperand):
        raise UnresolvedError(f"output parameter {declared['name']}: {_describe_source(source)} is no text or number")
    return argo_text(value)


def _source_value(source: Manifest, scope: VariableScope) -> Any:
    try:
        if "expression" in source:
            return evaluate_expression(source["expression"], _expression_environment(scope))
    except UsageError:
        if "default" not in source:
            raise
        return None
    names = find_tags(source.get("parameter", ""))
    return scope.values.get(names[0]) if names else source.get("parameter")


def _describe_source(source: Manifest) -> str:
    return str(source.get("parameter") or source.get("expression") or "its source")


def _to_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else str(value)


def path_variables(template: Manifest) -> dict[str, str | None]:
    """Variables that hold declared paths, such as ``inputs.artifacts.x.path``."""
    variables: dict[str, str | None] = {}
    for side in ("inputs", "outputs"):
        declared = template.get(side) or {}
        variables |= {
            f"{side}.artifacts.{a['name']}.path": a["path"] for a in declared.get("artifacts") or [] if "path" in a
        }
        variables |= {
            f"{side}.parameters.{p['name']}.path": p["valueFrom"]["path"]
            for p in declared.get("parameters") or []
            if "path" in (p.get("valueFrom") or {})
        }
    return variables
