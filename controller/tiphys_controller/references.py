"""What one task of a DAG says about another: Argo's ``{{tasks.…}}`` tags and expressions.

Pruning must find every mention of a task that is taken out, or the Workflow
that is left would wait for a value that nobody makes.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tiphys.protocol.placeholders import TAG, placeholders

_PLAIN = re.compile(r"tasks\.([A-Za-z0-9][-A-Za-z0-9]*)\.(.+)", re.DOTALL)
_IN_EXPRESSION = re.compile(r"""\btasks(?:\.([A-Za-z0-9_]+)|\[\s*['"]([^'"]+)['"]\s*\])""")


class Reference(NamedTuple):
    """One mention of a task.

    ``path`` is what is asked of it, such as ``outputs.parameters.loss``; it is
    empty in an expression, which only Argo can evaluate.
    """

    task: str
    path: str

    def __str__(self) -> str:
        return f"{{{{tasks.{self.task}.{self.path}}}}}" if self.path else f"an expression over tasks.{self.task}"


def references(part: Any) -> Iterator[Reference]:
    """Every mention of a task in a part of a manifest."""
    for text, is_expression in placeholders(part):
        if is_expression:
            yield from _in_expression(text)
        elif reference := parse_reference(text):
            yield reference


def artifact_reference(text: str) -> Reference | None:
    """The reference in an artifact's ``from``, which is one tag and nothing else; None for any other text."""
    tag = TAG.fullmatch(text.strip())
    return parse_reference(tag[1]) if tag else None


def has_tags(part: Any) -> bool:
    """Whether anything is left for Argo to put in."""
    if isinstance(part, dict):
        return any(has_tags(value) for value in part.values())
    if isinstance(part, list):
        return any(has_tags(value) for value in part)
    return isinstance(part, str) and "{{" in part


def substitute(part: Any, value_of: Callable[[str], str | None]) -> Any:
    """``part`` with each plain tag replaced where ``value_of`` knows its text, as Argo would; others stay."""
    if isinstance(part, dict):
        return {name: substitute(value, value_of) for name, value in part.items()}
    if isinstance(part, list):
        return [substitute(value, value_of) for value in part]
    if isinstance(part, str):
        return TAG.sub(lambda tag: _or_itself(value_of(tag[1].strip()), tag[0]), part)
    return part


def parse_reference(tag: str) -> Reference | None:
    """The reference inside a plain tag; None for a tag that names no task."""
    match = _PLAIN.fullmatch(tag.strip())
    return Reference(match[1], match[2]) if match else None


def _or_itself(value: str | None, tag: str) -> str:
    return tag if value is None else value


def _in_expression(text: str) -> Iterator[Reference]:
    for dotted, quoted in _IN_EXPRESSION.findall(text):
        yield Reference(dotted or quoted, "")
