"""Parses the body of a call into an operation, or into a message that says which field is wrong.

Argo turns an HTTP error into a failed node without a message, and 404 disables
the plugin until the agent restarts. So every error in a body is reported in the
message of the node.
"""

from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from tiphys.errors import UsageError
from tiphys.protocol.execute_api import ExecuteRequest
from tiphys.protocol.operations import PLUGIN_BODY_KEY, Operation

_OPERATION: TypeAdapter[Operation] = TypeAdapter(Operation)
_MAX_SHOWN_CHARACTERS = 60


class CallIdentity(NamedTuple):
    """Operation and node of a call, as far as they can be read from a wrong body, for replies and metrics."""

    op: str
    node: str


def is_tiphys_template(template: Any) -> bool:
    """Whether a template is of this plugin."""
    return (
        isinstance(template, dict)
        and isinstance(template.get("plugin"), dict)
        and PLUGIN_BODY_KEY in template["plugin"]
    )


def identify_call(template: dict[str, Any]) -> CallIdentity:
    """Read operation and node; ``unknown`` and empty if the body does not name them."""
    body = template["plugin"][PLUGIN_BODY_KEY]
    fields = body if isinstance(body, dict) else {}
    op, node = fields.get("op"), fields.get("node")
    return CallIdentity(
        op=op if op in ("admit", "settle", "conclude", "finalize") else "unknown",
        node=node if isinstance(node, str) else "",
    )


def read_request(document: dict[str, Any]) -> ExecuteRequest:
    """Parse the request around the body. Raises `UsageError`, which names the wrong field."""
    try:
        return ExecuteRequest.model_validate(document)
    except ValidationError as error:
        raise UsageError(_validation_message(error, ())) from error


def read_operation(request: ExecuteRequest) -> Operation:
    """Parse the operation in the body.

    Raises:
        UsageError: a field is missing, unknown or of another type, holds a
            placeholder that Argo did not fill in, or is of another workflow.
    """
    try:
        operation = _OPERATION.validate_python(request.template["plugin"][PLUGIN_BODY_KEY])
    except ValidationError as error:
        raise UsageError(_validation_message(error, ("plugin", PLUGIN_BODY_KEY))) from error
    _check_placeholders(operation)
    if operation.uid != request.workflow.metadata.uid:
        raise UsageError(
            f"plugin.{PLUGIN_BODY_KEY}.uid is {operation.uid!r}, but the call is about workflow "
            f"{request.workflow.metadata.name} with uid {request.workflow.metadata.uid!r}; compile the pipeline again"
        )
    return operation


def _check_placeholders(operation: Operation) -> None:
    # Argo leaves a placeholder it cannot resolve as it is.
    for name in ("run", "submission", "uid", "node", "step"):
        value = getattr(operation, name, "")
        if "{{" in value:
            raise UsageError(
                f"plugin.{PLUGIN_BODY_KEY}.{name} holds {value!r}, which Argo did not fill in; "
                "declare the parameter it names, or compile the pipeline again"
            )


def _validation_message(error: ValidationError, field_prefix: tuple[str, ...]) -> str:
    first = error.errors(include_url=False)[0]
    value = first["input"]
    path = [str(part) for part in first["loc"]]
    if path and path[0] in ("admit", "settle", "conclude", "finalize"):
        path = path[1:]  # pydantic names the branch of the union first
    field = ".".join((*field_prefix, *path))
    shown = f", got {_shorten(value)}" if first["type"] != "missing" else ""
    return f"{field}: {first['msg']}{shown}; compile the pipeline with the version of Tiphys that the plugin runs"


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}…"
