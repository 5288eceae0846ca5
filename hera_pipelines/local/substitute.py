"""Puts values in the place of ``{{…}}``, as Argo does (``util/template``).

Argo works on the JSON text of a template and escapes what it inserts, so a
value can never leave the string that it stands in. Walking the strings of the
parsed document has the same effect and cannot produce invalid JSON.
"""

import re
from collections.abc import Collection
from typing import Any

from hera_pipelines.local.evaluation import MissingNameError
from hera_pipelines.local.expressions import nested, value_of
from hera_pipelines.local.gotext import go_json
from hera_pipelines.local.scope import Variables
from tiphys.errors import UsageError
from tiphys.protocol.placeholders import TAG

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
