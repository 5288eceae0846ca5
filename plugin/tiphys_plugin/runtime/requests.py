"""Parses the body of a call into an operation, or into a message that says which field is wrong.

Argo turns an HTTP error into a failed node without a message, and 404 disables
the plugin until the agent restarts. So every error in a body is reported in the
message of the node.
"""

from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from tiphys.errors import UsageError
from tiphys.protocol.execute_api import ExecuteRequest
from tiphys.protocol.operations import OPERATIONS, PLUGIN_BODY_KEY, Operation

_OPERATION: TypeAdapter[Operation] = TypeAdapter(Operation)
_MAX_SHOWN_CHARACTERS = 60
MAX_CHARACTERS = {
    "run": 253,
    "submission": 9,
    "uid": 128,
    "step": 63,
    "item": 4096,
    "node": 4096 + 1024,
    "status": 63,
    "exit_code": 63,
}
"""Longest fields of a body, whose author is that of the Workflow: records, logs and messages repeat what it says.

Argo builds the name of a node from those of Workflow and step, and from the whole item. A larger item belongs into an
artifact.
"""


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
        op=op if op in OPERATIONS else "unknown",
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
        UsageError: a field is missing, unknown, too long or of another type,
            holds a placeholder that Argo did not fill in, or is of another workflow.
    """
    try:
        operation = _OPERATION.validate_python(request.template["plugin"][PLUGIN_BODY_KEY])
    except ValidationError as error:
        raise UsageError(_validation_message(error, ("plugin", PLUGIN_BODY_KEY))) from error
    _check_lengths(operation)
    _check_placeholders(operation)
    if operation.uid != request.workflow.metadata.uid:
        raise UsageError(
            f"plugin.{PLUGIN_BODY_KEY}.uid is {operation.uid!r}, but the call is about workflow "
            f"{request.workflow.metadata.name} with uid {request.workflow.metadata.uid!r}; compile the pipeline again"
        )
    return operation


def _check_lengths(operation: Operation) -> None:
    for name, most in MAX_CHARACTERS.items():
        if (length := len(getattr(operation, name, ""))) > most:
            raise UsageError(_length_message(f"plugin.{PLUGIN_BODY_KEY}.{name}", length, most))


def _length_message(field: str, length: int, most: int) -> str:
    return f"{field} has {length} characters, and at most {most} are allowed; shorten it in the pipeline"


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
    if path and path[0] in OPERATIONS:
        path = path[1:]  # pydantic names the branch of the union first
    field = ".".join((*field_prefix, *path))
    if first["type"] == "string_too_long":
        return _length_message(field, len(value), first["ctx"]["max_length"])
    shown = f", got {_shorten(value)}" if first["type"] != "missing" else ""
    return f"{field}: {first['msg']}{shown}; compile the pipeline with the version of Tiphys that the plugin runs"


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}…"
