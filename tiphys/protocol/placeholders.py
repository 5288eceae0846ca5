"""Where Argo's placeholders stand in a manifest.

compile, pruning and the local engine all look for them. If one of them missed a
place, a Workflow would wait for a value that nobody makes.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

TAG = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
"""One ``{{…}}``; its first group is what stands inside."""

_EXPRESSION_FIELDS = ("expression", "fromExpression")


class Placeholder(NamedTuple):
    """One text that Argo evaluates: the inside of a tag, or a whole field that is an expression."""

    text: str
    is_expression: bool
    """Whether expr-lang decides what it means; else it is the plain name of a variable."""


def placeholders(part: Any, field: str = "") -> Iterator[Placeholder]:
    """Every placeholder in ``part`` of a manifest. ``field`` is the name of the field that holds it."""
    if isinstance(part, dict):
        for name, value in part.items():
            yield from placeholders(value, name)
    elif isinstance(part, list):
        for value in part:
            yield from placeholders(value, field)
    elif isinstance(part, str) and field in _EXPRESSION_FIELDS:
        yield Placeholder(part, is_expression=True)
    elif isinstance(part, str):
        for tag in TAG.findall(part):
            yield Placeholder(tag, is_expression=tag.startswith("="))
