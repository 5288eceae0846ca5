"""Every regular expression of the product, found in its sources, with texts on which a bad one takes long.

A pattern is found where it is written: as an argument of a function of `re`. So a new one
is found, too. Its texts are made from its own parse tree: what a repeat accepts, again
and again, behind a beginning that leads there and before an end that cannot match.
"""

import ast
import functools
import importlib
import re
import re._constants as codes
import re._parser as parser
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tiphys.checkpoint.exec.layouts import LAYOUTS

ROOT = Path(__file__).parents[3]
SOURCES = {
    "tiphys": "tiphys",
    "plugin/tiphys_plugin": "tiphys_plugin",
    "controller/tiphys_controller": "tiphys_controller",
    "hera_pipelines": "hera_pipelines",
}
_FUNCTIONS = ("compile", "search", "match", "fullmatch", "findall", "finditer", "split", "sub", "subn")
_METHODS = tuple(name for name in _FUNCTIONS if name != "compile")


class FoundPattern(NamedTuple):
    """One pattern, where it stands, and the methods that the product calls."""

    place: str
    """``<module>.<name>`` of a constant; ``<module>:<function>`` and the pattern where it has no name."""
    pattern: "re.Pattern[str]"
    methods: tuple[str, ...]


def find_patterns(folder: str) -> Iterator[FoundPattern]:
    """All patterns of the package in ``folder``, one of `SOURCES`.

    Raises:
        AssertionError: the text of a pattern is not known until it runs, and its place is not in `RUN_TIME`.
    """
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = (SOURCES[folder], *path.relative_to(ROOT / folder).with_suffix("").parts)
        name = ".".join(part for part in parts if part != "__init__")
        if "re." in (source := path.read_text()):
            yield from _find_in_module(name, source)
    if folder == "tiphys":
        for layout in LAYOUTS:
            if layout.pattern:
                place = f"tiphys.checkpoint.exec.layouts.LAYOUTS: {layout.name}"
                yield FoundPattern(place, re.compile(layout.pattern), ("fullmatch",))


def _find_in_module(module_name: str, source: str) -> Iterator[FoundPattern]:
    tree = ast.parse(source)
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "re"
        and node.func.attr in _FUNCTIONS
    ]
    names = {id(call): target for call in calls for target in [_constant_of(tree, call)]}
    for constant, value in _nested_constants(module_name, tree, calls):
        yield FoundPattern(f"{module_name}.{constant}", value, ("search", "match", "fullmatch"))
    for call in calls:
        text = _evaluate(module_name, call.args[0])
        written = "f-string" if isinstance(call.args[0], ast.JoinedStr) else ast.unparse(call.args[0])
        place = f"{module_name}.{names[id(call)]}" if names[id(call)] else f"{module_name}: {written}"
        if text is None:
            if call.func.attr == "compile" and _statement_of(tree, call) is not None:  # type: ignore[attr-defined]
                continue  # found in the value of its constant
            assert place in RUN_TIME, f"{place} is not known until it runs: name it in RUN_TIME, with the reason"
            continue
        assert isinstance(call.func, ast.Attribute)
        function = call.func.attr
        position = {"compile": 1, "sub": 4, "subn": 4, "split": 3}.get(function, 2)
        given = [keyword.value for keyword in call.keywords if keyword.arg == "flags"] or call.args[position:][:1]
        flags = _evaluate(module_name, given[0]) if given else 0
        pattern = text if isinstance(text, re.Pattern) else re.compile(text, flags or 0)
        yield FoundPattern(place, pattern, _called(source, names[id(call)]) if function == "compile" else (function,))


def _statement_of(tree: ast.Module, call: ast.Call) -> ast.Assign | ast.AnnAssign | None:
    """The assignment of a constant of the module that contains the call."""
    assignments = (statement for statement in tree.body if isinstance(statement, ast.Assign | ast.AnnAssign))
    return next((one for one in assignments if any(node is call for node in ast.walk(one))), None)


def _constant_of(tree: ast.Module, call: ast.Call) -> str:
    """The name of the constant of the module that is the pattern."""
    statement = _statement_of(tree, call)
    if statement is None or statement.value is not call:
        return ""
    return ast.unparse(statement.targets[0] if isinstance(statement, ast.Assign) else statement.target)


def _nested_constants(
    module_name: str, tree: ast.Module, calls: list[ast.Call]
) -> Iterator[tuple[str, "re.Pattern[str]"]]:
    """Patterns in the tables of a module."""
    for call in calls:
        statement = _statement_of(tree, call)
        if statement is not None and statement.value is not call:
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            for name in ast.unparse(target).strip("()").split(", "):
                value = vars(importlib.import_module(module_name)).get(name)
                yield from ((name, pattern) for pattern in _patterns_in(value))


def _patterns_in(value: Any) -> Iterator["re.Pattern[str]"]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, dict):
        yield from _patterns_in(tuple(value.values()))
    elif isinstance(value, tuple | list | set | frozenset):
        for member in value:
            yield from _patterns_in(member)


def _evaluate(module_name: str, expression: ast.expr) -> Any:
    """The value of an expression over the names of the module; None if a name is only known in a function."""
    try:
        return ast.literal_eval(expression)
    except ValueError:
        module = importlib.import_module(module_name)
    try:
        return eval(ast.unparse(expression), vars(module))
    except NameError:
        return None


def _called(source: str, name: str) -> tuple[str, ...]:
    """The methods that its module calls on a constant; all of them if it is only passed on."""
    called = re.findall(rf"\b{re.escape(name)}\.({'|'.join(_METHODS)})\b", source) if name else []
    return tuple(sorted(set(called))) or ("search", "match", "fullmatch")


RUN_TIME = {
    "tiphys.checkpoint.exec.layouts: layout.pattern": "the patterns of `LAYOUTS`, which are found",
    "tiphys.checkpoint.exec.options: text": "an option of the author, in the author's own pod",
    "tiphys_plugin.attempts.gangs: f-string": "a fixed text and one number",
    "tiphys_controller.submit.triggers.catalog: own + '/.*'": "written by the administrator, names between slashes",
    "hera_pipelines.cli.progress.table: f-string": "a fixed text, matched at one place",
    "hera_pipelines.local.expressions.evaluate: _require_text(pattern)": "the author's own, on the author's machine",
    "hera_pipelines.local.pods.pod_paths: f-string": "fixed paths, on the author's machine",
}
"""Patterns whose text is only known when they run, and why they are harmless."""


def attack_texts(pattern: "re.Pattern[str]") -> list[Callable[[int], str]]:
    """Functions of a length, each of which returns a text on which a bad pattern may take long."""
    tree = parser.parse(pattern.pattern, pattern.flags & ~re.UNICODE if isinstance(pattern.pattern, str) else 0)
    pumps = dict.fromkeys(("a", "0", " ", "{", "{{", "-", "/", "a.", "\n"))
    heads = dict.fromkeys([""])
    for head, body in _repeats(tree, ""):
        pumps[body[:20]] = None
        heads[head[:40]] = None
    whole = _sample(tree)
    pumps[whole[:20]] = None
    pumps[whole[:-1][:20]] = None
    first = whole[:1]
    pumps[first] = None

    def text(head: str, pump: str, tail: str, length: int) -> str:
        return head + pump * (length // len(pump)) + tail

    return [
        functools.partial(text, head, pump, tail) for head in heads for pump in pumps if pump for tail in ("\0", "\n!")
    ]


def _repeats(items: Iterable[Any], head: str) -> Iterator[tuple[str, str]]:
    """The beginning that leads to each repeat, and a text that its body accepts."""
    for code, argument in items:
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
            body = argument[2]
            yield head, _sample(body)
            yield from _repeats(body, head)
        elif code is codes.SUBPATTERN:
            yield from _repeats(argument[3], head)
        elif code is codes.ATOMIC_GROUP:
            yield from _repeats(argument, head)
        elif code is codes.BRANCH:
            for branch in argument[1]:
                yield from _repeats(branch, head)
        elif code in (codes.ASSERT, codes.ASSERT_NOT):
            yield from _repeats(argument[1], head)
        head += _sample([(code, argument)])


def _sample(items: Iterable[Any]) -> str:
    """A short text that the items accept, or nearly so."""
    return "".join(_sample_of(code, argument) for code, argument in items)


def _sample_of(code: Any, argument: Any) -> str:
    if code is codes.LITERAL:
        return chr(argument)
    if code is codes.NOT_LITERAL:
        return "a" if argument != ord("a") else "b"
    if code is codes.ANY:
        return "a"
    if code is codes.IN:
        return _sample_of_set(argument)
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
        return _sample(argument[2]) * max(1, min(argument[0], 40))
    if code is codes.SUBPATTERN:
        return _sample(argument[3])
    if code is codes.ATOMIC_GROUP:
        return _sample(argument)
    if code is codes.BRANCH:
        return _sample(argument[1][0])
    return ""


_OF_CATEGORY = {codes.CATEGORY_DIGIT: "0", codes.CATEGORY_SPACE: " ", codes.CATEGORY_WORD: "a"}


def _sample_of_set(members: Iterable[Any]) -> str:
    members = list(members)
    if members[0][0] is codes.NEGATE:
        for character in 'a0 -"{':
            if not any(_has(member, character) for member in members[1:]):
                return character
        return "é"
    for code, argument in members:
        if code is codes.LITERAL:
            return chr(argument)
        if code is codes.RANGE:
            return chr(argument[0])
        if code is codes.CATEGORY:
            return _OF_CATEGORY.get(argument, "-")
    return "a"


def _has(member: Any, character: str) -> bool:
    code, argument = member
    if code is codes.LITERAL:
        return chr(argument) == character
    if code is codes.RANGE:
        return argument[0] <= ord(character) <= argument[1]
    return code is codes.CATEGORY and {
        codes.CATEGORY_DIGIT: str.isdecimal,
        codes.CATEGORY_SPACE: str.isspace,
        codes.CATEGORY_WORD: lambda text: text.isalnum() or text == "_",
    }.get(argument, lambda _: False)(character)
