"""The variables of Argo that a manifest uses, in tags and in expressions: found and rewritten.

A missed use would make a Workflow wait for a value that no task produces, and a text that is taken for a use
would change the author's value. So an expression is cut into the tokens of expr-lang (expr-lang/expr,
``parser/lexer/state.go``): ``'$.steps.train'`` is a text, and ``.steps`` of another object is no variable.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tiphys.protocol.compiled_workflow import replace_tags, split_tags

_EXPRESSION_FIELDS = ("expression", "fromExpression")
_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?(?:\*/|\Z))
    |(?P<string>"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|'(?:[^'\\]|\\.)*+(?:'|\\?\Z)|`[^`]*(?:`|\Z))
    |(?P<number>\d\w*(?:\.\d\w*)?)
    |(?P<name>[^\W\d][\w$]*|\$[\w$]*)
    |\.\.|\?\.|\S""",
    re.VERBOSE | re.DOTALL,
)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_MEMBER_SIGNS = (".", "?.")


class Expression(str):
    """Text of an expression, which `map_variables` puts in the place of a variable: in brackets, or as a tag."""


class Variable(NamedTuple):
    """One use: ``tasks['a-b'].outputs.result`` has the names ``tasks``, ``a-b``, ``outputs`` and ``result``.

    Members that are computed end the names: ``tasks[inputs.parameters.x].id`` is a use of ``tasks`` and another one.
    """

    names: tuple[str, ...]
    is_expression: bool
    """Whether expr-lang evaluates it; otherwise the names are all that a tag contains."""
    spans: tuple[tuple[int, int], ...]
    """Where each name stands in the text, with its dot or brackets."""

    @property
    def task(self) -> str:
        """The task that it reads; empty for another variable, and for ``tasks.name``, the name of the own task."""
        is_read = self.names[0] == "tasks" and len(self.names) > 1 and self.names[1:] != ("name",)
        return self.names[1] if is_read else ""


def find_variables(part: Any, field: str = "") -> Iterator[Variable]:
    """Every use of a variable in ``part``, a part of a manifest that the field ``field`` holds."""
    if isinstance(part, dict):
        for name, value in part.items():
            yield from find_variables(value, name)
    elif isinstance(part, list):
        for value in part:
            yield from find_variables(value, field)
    elif isinstance(part, str):
        yield from _variables_of_text(part, field)


def map_variables(part: Any, change: Callable[[Variable], Sequence[str] | str], field: str = "") -> Any:
    """``part`` with each variable that ``change`` gives other names, or a text in its place."""
    if isinstance(part, dict):
        return {name: map_variables(value, change, name) for name, value in part.items()}
    if isinstance(part, list):
        return [map_variables(value, change, field) for value in part]
    if not isinstance(part, str):
        return part
    edits = [edit for variable in _variables_of_text(part, field) for edit in _edits(part, variable, change(variable))]
    pieces, position = [], 0
    for start, end, written in sorted(edits, key=lambda edit: edit[:2]):
        pieces += [part[position:start], written]
        position = end
    return "".join([*pieces, part[position:]])


def find_expression_variables(text: str, position: int = 0) -> Iterator[Variable]:
    """Every use of a variable in an expression, which begins at ``position`` of a longer text."""
    tokens = [token for token in _TOKEN.finditer(text) if token.lastgroup != "comment"]
    texts = [*(token[0] for token in tokens), "", "", "", ""]
    is_name = [token.lastgroup == "name" for token in tokens] + [False] * 4
    is_string = [token.lastgroup == "string" for token in tokens] + [False] * 4
    for first, token in enumerate(tokens):
        before = texts[first - 1] if first else ""
        is_key = before in ("{", ",") and texts[first + 1] == ":"  # of a map
        if not is_name[first] or before in _MEMBER_SIGNS or is_key:
            continue
        names, spans, after = [texts[first]], [token.span()], first + 1
        while True:
            bracket = after + (texts[after] == "?." and texts[after + 1] == "[")
            if texts[bracket] == "[" and is_string[bracket + 1] and texts[bracket + 2] == "]":
                name, end = texts[bracket + 1][1:-1], bracket + 2
            elif texts[after] in _MEMBER_SIGNS and is_name[after + 1]:
                name, end = texts[after + 1], after + 1
            else:
                break
            names.append(name)
            spans.append((tokens[after].start(), tokens[end].end()))
            after = end + 1
        if names[0] == "$env" and len(names) > 1:  # the map of all variables
            names, spans = names[1:], [(spans[0][0], spans[1][1]), *spans[2:]]
        yield Variable(tuple(names), True, tuple((position + start, position + end) for start, end in spans))


def _variables_of_text(text: str, field: str) -> Iterator[Variable]:
    if "{{" not in text and field not in _EXPRESSION_FIELDS:
        return
    position = 0
    for before, tag in split_tags(text):
        position += len(before)
        if tag is None:
            break
        if tag.startswith("="):
            yield from find_expression_variables(tag[1:], position + 3)
        else:
            yield _variable_of_tag(tag, position + 2)
        position += len(tag) + 4
    if field in _EXPRESSION_FIELDS:  # Argo puts the values of its tags in before it evaluates it
        yield from find_expression_variables(replace_tags(text, lambda tag: " " * (len(tag) + 4)))


def _variable_of_tag(tag: str, position: int) -> Variable:
    inner = tag.rpartition("{{")[2]  # as Argo, which puts the value of an inner tag in
    start = position + len(tag) - len(inner.lstrip())
    names = inner.strip().split(".")
    spans: list[tuple[int, int]] = []
    for name in names:
        end = start + len(name) + (1 if spans else 0)
        spans.append((start, end))
        start = end
    return Variable(tuple(names), False, tuple(spans))


def _edits(text: str, variable: Variable, new: Sequence[str] | str) -> Iterator[tuple[int, int, str]]:
    """Beginning and end of what changes in ``text``, and what comes in its place."""
    spans = variable.spans
    if isinstance(new, Expression):
        new = f"({new})" if variable.is_expression else f"{{{{={new}}}}}"
        yield (spans[0][0], spans[-1][1], new) if variable.is_expression else (*_tag_span(text, spans), new)
    elif isinstance(new, str) and variable.is_expression:
        yield spans[0][0], spans[-1][1], f"'{new}'"
    elif isinstance(new, str):
        yield *_tag_span(text, spans), new
    else:
        added = [(spans[-1][1], spans[-1][1])] * (len(new) - len(spans))
        for index, (start, end) in enumerate([*spans, *added]):
            if variable.names[index : index + 1] != (new[index],):
                is_quoted = variable.is_expression and not _IDENTIFIER.fullmatch(new[index])
                yield start, end, _write_name(text[start:end], new[index], index, is_quoted)


def _tag_span(text: str, spans: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return text.rindex("{{", 0, spans[0][0]), text.index("}}", spans[-1][1]) + 2


def _write_name(written: str, name: str, index: int, is_quoted: bool) -> str:
    """``name`` as a member, in the place of one that is ``written`` so, with its dot or brackets."""
    if index == 0:
        return name
    if written.endswith("]"):
        quote = written[:-1].rstrip()[-1]
        return f"{written[: written.index(quote) + 1]}{name}{written[written.rindex(quote) :]}"
    optional = "?." if written.startswith("?.") else ""
    return f"{optional}['{name}']" if is_quoted else f"{optional or '.'}{name}"
