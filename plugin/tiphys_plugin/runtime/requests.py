"""From what arrived to an operation, or to a sentence about what is wrong with it.

Argo turns an HTTP error into a failed node without a word, and 404 switches
the plugin off until the agent restarts. So whatever is wrong inside a body is
said in the message of the node.
"""

from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from tiphys.errors import UsageError
from tiphys.protocol.execute_api import ExecuteRequest
from tiphys.protocol.operations import PLUGIN, Operation

_OPERATION: TypeAdapter[Operation] = TypeAdapter(Operation)
_SHOWN = 60


class Identity(NamedTuple):
    """What can be told of a call even if its body is wrong: for replies and metrics."""

    op: str
    node: str


def is_ours(template: Any) -> bool:
    """Whether a template is of this plugin; others are for other plugins to answer."""
    return isinstance(template, dict) and isinstance(template.get("plugin"), dict) and PLUGIN in template["plugin"]


def identify(template: dict[str, Any]) -> Identity:
    """Operation and node as far as the body tells; empty where it does not."""
    body = template["plugin"][PLUGIN]
    known = body if isinstance(body, dict) else {}
    op, node = known.get("op"), known.get("node")
    return Identity(
        op=op if op in ("admit", "settle", "conclude", "finalize") else "unknown",
        node=node if isinstance(node, str) else "",
    )


def read_request(document: dict[str, Any]) -> ExecuteRequest:
    """The request around the body. Raises `UsageError` naming the field that is wrong."""
    try:
        return ExecuteRequest.model_validate(document)
    except ValidationError as error:
        raise UsageError(_sentence(error, ())) from error


def read_operation(request: ExecuteRequest) -> Operation:
    """The operation that the body asks for.

    Raises:
        UsageError: a field is missing, unknown or of another type, holds a
            placeholder that Argo did not fill in, or is of another workflow.
    """
    try:
        operation = _OPERATION.validate_python(request.template["plugin"][PLUGIN])
    except ValidationError as error:
        raise UsageError(_sentence(error, ("plugin", PLUGIN))) from error
    _check_filled_in(operation)
    if operation.uid != request.workflow.metadata.uid:
        raise UsageError(
            f"plugin.{PLUGIN}.uid is {operation.uid!r}, but the call is about workflow "
            f"{request.workflow.metadata.name} with uid {request.workflow.metadata.uid!r}; compile the pipeline again"
        )
    return operation


def _check_filled_in(operation: Operation) -> None:
    # Argo leaves a placeholder it cannot resolve as it is.
    for name in ("run", "submission", "uid", "node", "step"):
        value = getattr(operation, name, "")
        if "{{" in value:
            raise UsageError(
                f"plugin.{PLUGIN}.{name} holds {value!r}, which Argo did not fill in; "
                "declare the parameter it names, or compile the pipeline again"
            )


def _sentence(error: ValidationError, at: tuple[str, ...]) -> str:
    first = error.errors(include_url=False)[0]
    given = first["input"]
    path = [str(part) for part in first["loc"]]
    if path and path[0] in ("admit", "settle", "conclude", "finalize"):
        path = path[1:]  # pydantic names the branch of the union first
    field = ".".join((*at, *path))
    shown = f", got {_shorten(given)}" if first["type"] != "missing" else ""
    return f"{field}: {first['msg']}{shown}; compile the pipeline with the version of Tiphys that the plugin runs"


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
