"""What the text of a parameter means, by the annotation: ``flag: bool`` reads "False", ``tag: str | None`` keeps "1e5".

The functions of `script_functions` read it in the container, and compile calls the same ones to refuse a value before
the Workflow exists. A text that can be None has `NO_TEXT` for it, because every other text may be meant as it is; all
else has JSON's ``null``.
"""

import datetime
import decimal
import inspect
import pathlib
import types
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NewType, TypeVar, Union, get_args, get_origin, is_typeddict

from hera_pipelines.authoring.functions import script_functions as script
from tiphys.errors import UsageError

# mypy: allow-untyped-calls

NO_TEXT = "<none>"
_JSON_NULL = "null"


@dataclass(frozen=True)
class ParameterType:
    """How the values of one parameter are read."""

    read: Callable[[Any], Any]
    """The value of a text; raises ValueError, with what is wrong, if the text is none."""
    code: str
    """Expression that makes `read` in a script."""
    functions: frozenset[str]
    """Functions of `script_functions` that the script needs for it."""
    is_text: bool = False
    """Whether it takes every text as it is."""
    is_path: bool = False
    """Whether the value is a path, which names no file of an output."""
    none: str | None = None
    """The text that stands for None; None: it takes no None."""

    def write(self, value: Any) -> str:
        """The text of ``value``, which `read` reads again; one with tags is known only when it runs.

        Raises:
            ValueError: no script could read it.
            TypeError: JSON has no such value.
        """
        if value is None and self.none is None:
            raise ValueError("it is None; annotate it with `| None`")
        text: str = script._written(value, self.none)
        if "{{" not in text:
            self.read(text)
        return text


def _made_of(function: Callable[..., Any], *parts: "ParameterType | str | type", **fields: Any) -> ParameterType:
    """The type that ``function`` makes of inner types, names and classes."""
    values = [part.read if isinstance(part, ParameterType) else part for part in parts]
    codes = [
        part.code if isinstance(part, ParameterType) else part.__name__ if isinstance(part, type) else repr(part)
        for part in parts
    ]
    inner = frozenset[str]().union(*(part.functions for part in parts if isinstance(part, ParameterType)))
    helpers = {function.__name__} | ({"_json"} if function in (script._list, script._tuple, script._dict) else set())
    return ParameterType(
        function(*values), f"{function.__name__}({', '.join(codes)})", inner | helpers | {"_read"}, **fields
    )


def _simple(function: Callable[[Any], Any], **fields: Any) -> ParameterType:
    return ParameterType(function, function.__name__, frozenset((function.__name__, "_read")), **fields)


_ANY, _SAME = _simple(script._any, none=_JSON_NULL), _simple(script._same, none=_JSON_NULL)
_TEXT = _simple(script._text, is_text=True)
_PLAIN_TEXT = ParameterType(script._text, "", frozenset(), is_text=True)
"""A parameter that takes every text needs no function."""
_SIMPLE: Mapping[Any, ParameterType] = {
    bool: _simple(script._bool),
    int: _simple(script._int),
    float: _simple(script._float),
    datetime.date: _made_of(script._made, "datetime", "date.fromisoformat"),
    datetime.datetime: _made_of(script._made, "datetime", "datetime.fromisoformat"),
    datetime.time: _made_of(script._made, "datetime", "time.fromisoformat"),
    decimal.Decimal: _made_of(script._made, "decimal", "Decimal"),
    uuid.UUID: _made_of(script._made, "uuid", "UUID"),
    pathlib.Path: _made_of(script._made, "pathlib", "Path", is_path=True, is_text=True),
    pathlib.PurePosixPath: _made_of(script._made, "pathlib", "PurePosixPath", is_path=True, is_text=True),
}
_SEQUENCES: Mapping[Any, type] = {
    **dict.fromkeys((list, Sequence, Collection, Iterable), list),
    **{kind: kind for kind in (tuple, set, frozenset)},
}
_MAPPINGS = (dict, Mapping)


def find_parameter_type(annotation: Any, default: Any = inspect.Parameter.empty) -> ParameterType:
    """How to read the parameter that has this annotation; a default of None allows None.

    Raises:
        UsageError: a script cannot make such a value; the message says what to annotate.
    """
    found = _find(annotation)
    if default is None and found.none is None:
        return _or_none(found)
    return _PLAIN_TEXT if found is _TEXT else found


def _find(annotation: Any) -> ParameterType:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _find(arguments[0])
    if isinstance(annotation, NewType):
        return _find(annotation.__supertype__)
    if annotation in (Any, object, inspect.Parameter.empty) or isinstance(annotation, TypeVar):
        return _ANY
    if annotation in _SIMPLE:
        return _SIMPLE[annotation]
    if annotation is str:
        return _TEXT
    if origin is Literal:
        choices = [choice for choice in arguments if choice is not None]
        found = _made_of(script._literal, *choices)
        return _or_none(found) if None in arguments else found
    if origin in (Union, types.UnionType):
        found = _union_of([_find(part) for part in arguments if part is not types.NoneType])
        return _or_none(found) if types.NoneType in arguments else found
    return _find_container(annotation, origin or annotation, arguments)


def _find_container(annotation: Any, kind: Any, arguments: tuple[Any, ...]) -> ParameterType:
    if kind is tuple and arguments and arguments[-1:] != (...,):
        return _made_of(script._tuple, *map(_find_inner, arguments))
    if kind in _SEQUENCES:
        return _made_of(script._list, _find_inner(arguments[0]) if arguments else _SAME, _SEQUENCES[kind])
    if kind in _MAPPINGS or is_typeddict(kind):
        return _made_of(script._dict, *(map(_find_inner, arguments) if arguments else (_SAME, _SAME)))
    raise UsageError(
        f"its script cannot make a {getattr(annotation, '__name__', annotation)} of a parameter; annotate what JSON "
        "has, such as dict or Literal, and make the object in the function"
    )


def _find_inner(annotation: Any) -> ParameterType:
    """As `_find`, for a value within JSON, where a text is no longer read as JSON or as another type."""
    if get_origin(annotation) in (Union, types.UnionType):
        parts = sorted(get_args(annotation), key=lambda part: part is not str)
        found = _union_of([_find_inner(part) for part in parts if part is not types.NoneType])
        return _or_none(found) if types.NoneType in parts else found
    found = _find(annotation)
    return _SAME if found is _ANY else found


def _union_of(members: list[ParameterType]) -> ParameterType:
    if len(members) == 1:
        return members[0]
    return _made_of(script._union, *members, is_text=any(member.is_text for member in members))


def _or_none(found: ParameterType) -> ParameterType:
    none = NO_TEXT if found.is_text else _JSON_NULL
    return _made_of(script._optional, found, none, is_text=found.is_text, is_path=found.is_path, none=none)
