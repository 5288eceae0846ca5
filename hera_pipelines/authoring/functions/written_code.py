"""The author's code as a block of the script of a step, and the code of a function.

The text stays the author's, with the lines of each statement, so that tracebacks name these. The block begins with a
hash of what the code means: comments, lines and names of files do not count, and so no step runs again for them
(`tiphys.protocol.compiled_workflow`).
"""

import ast
import base64
import inspect
import json
import textwrap
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hera_pipelines.authoring.functions import script_loader
from hera_pipelines.authoring.functions.author_files import AuthorFile, LocalModules, Statement, shared_file, show_path
from hera_pipelines.authoring.functions.travelling import TravellingCode
from tiphys.protocol.compiled_workflow import mark_code
from tiphys.records import json_digest

MAX_SCRIPT_BYTES = 64 * 1024
"""Argo keeps all scripts of a Workflow in one object of 1 MiB, with the status of its nodes."""
_MAX_PLAIN_CHARACTERS = 4_000
"""Local modules with more text than this, all together, are compressed."""
_IMPORTS, _MODULE_IMPORTS = ("ast", "linecache", "sys", "traceback"), ("base64", "importlib.util", "json", "zlib")


class WrittenCode(NamedTuple):
    """The author's code in a script."""

    text: str
    files: str
    """The files from which it is, for people; those with the most text first."""


def write_code(step: str, function: Callable[..., Any], outputs: int = 0) -> WrittenCode | None:
    """What the script of a function with so many outputs takes along; None where there is no file or no plain function.

    Raises:
        UsageError: names the line and the name, decorator or ``return`` that cannot travel, and what to do.
    """
    function = inspect.unwrap(function)
    try:
        lines, _ = inspect.findsource(function)
        path = Path(inspect.getsourcefile(function) or "")
    except (OSError, TypeError):
        return None
    package = function.__globals__.get("__package__") or ""
    file = shared_file("", show_path(path) if path.exists() else path.name, "".join(lines), package)
    statement = _find_definition(file, function)
    if statement is None or not isinstance(statement.node, ast.FunctionDef):
        return None
    code = TravellingCode(step, file, statement, LocalModules(path.parent.resolve() if path.exists() else Path.cwd()))
    definition = statement.node
    decorators = definition.decorator_list
    if decorators and not code.makes_step(file, decorators[0]):
        names = " and ".join(f"@{ast.unparse(decorator)}" for decorator in decorators)
        code.refuse(file, definition.lineno, f"has {names}; write the one that makes it a step first")
    for read in statement.reads:
        if read.chain[0] in function.__code__.co_freevars and read.chain[0] != definition.name:
            code.refuse(
                file,
                read.line,
                f"uses {read.chain[0]!r} of the function around it; define it at the top level of the file, or make it "
                "an input",
            )
    for future in file.future:
        code.add(file, future)
    code.add(file, statement)
    for returned in _returns(definition) if outputs > 1 else ():
        values = returned.value.elts if isinstance(returned.value, ast.Tuple) else ()
        if values and len(values) != outputs and not any(isinstance(value, ast.Starred) for value in values):
            code.refuse(
                file, returned.lineno, f"returns {len(values)} values, and its annotation names {outputs} outputs"
            )
    return WrittenCode(_write_block(code), code.summary)


def _write_block(code: TravellingCode) -> str:
    """The block of a script that defines the author's code."""
    lines, text = _write_file(code, code.main)
    modules: dict[str, tuple[bool, str, list[int], str]] = {}
    files = sorted(code.kept, key=lambda file: file.name)
    for file in files:
        if file is not code.main:
            modules[file.name] = (file.folder is not None, file.shown, *_write_file(code, file))
    functions: list[Any] = [script_loader._bare, script_loader._define, script_loader._show_error]
    loader = "\n".join(map(inspect.getsource, [*functions, *([script_loader._AuthorModules] if modules else [])]))
    start = ["sys.excepthook = _show_error"]
    if modules:
        start += [f"sys.meta_path.insert(0, _AuthorModules{_write_modules(modules)})"]
    if code.main.package and code.imports_relatively:
        start += [f"globals()['__package__'] = {code.main.package!r}"]
    start += [f"_define(globals(), {code.main.shown!r}, {lines}, {_literal(text)}, {code.definition.step!r})"]
    imports = "".join(f"import {name}\n" for name in (*_IMPORTS, *(_MODULE_IMPORTS if modules else ())))
    block = "def _load_code():\n" + textwrap.indent(f"{imports}\n{loader}\n", "    ")
    block += "".join(f"    {line}\n" for line in start) + "\n_load_code()\n"
    return mark_code(block, json_digest([_meaning(code, file) for file in files]))


def _find_definition(file: AuthorFile, function: Any) -> Statement | None:
    first = function.__code__.co_firstlineno
    for node in ast.walk(file.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and Statement(node).first_line == first:
            return Statement(node, step=node.name)
    return None


def _returns(definition: ast.FunctionDef) -> Iterator[ast.Return]:
    """The ``return`` statements of the function itself, not of those within it."""
    pending: list[ast.AST] = list(definition.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Return):
            yield node
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            pending += ast.iter_child_nodes(node)


def _sorted(code: TravellingCode, file: AuthorFile) -> list[tuple[Statement, ast.stmt | None]]:
    """The statements of ``file`` that travel, in their order, and what stands in place of an import."""
    kept = sorted(code.kept[file].items(), key=lambda item: (item[0].node.lineno, item[0].node.col_offset))
    return [(statement, _needed_import(statement.node, names)) for statement, names in kept]


def _needed_import(node: ast.stmt, names: set[str]) -> ast.stmt | None:
    if isinstance(node, ast.Import):
        return ast.Import([alias for alias in node.names if alias.name in names])
    if isinstance(node, ast.ImportFrom):
        return ast.ImportFrom(node.module, [alias for alias in node.names if alias.name in names], node.level)
    return None


def _write_file(code: TravellingCode, file: AuthorFile) -> tuple[list[int], str]:
    """The first line of each statement of ``file`` that travels, and their text."""
    lines, texts = [], []
    for statement, needed in _sorted(code, file):
        is_nested = statement is code.definition and statement.node not in file.tree.body
        text = ast.unparse(needed) if needed else file.segment(statement)
        texts.append(f"if 1:\n{text}\n" if is_nested else f"{text}\n")
        lines.append(statement.first_line - is_nested)
    return lines, "\n".join(texts)


def _meaning(code: TravellingCode, file: AuthorFile) -> list[str]:
    return [file.name, *(ast.unparse(needed or statement.form) for statement, needed in _sorted(code, file))]


def _write_modules(modules: dict[str, tuple[bool, str, list[int], str]]) -> str:
    """Arguments of `_AuthorModules`, or a call of its `unpack`."""
    if sum(len(text) for *_, text in modules.values()) > _MAX_PLAIN_CHARACTERS:
        packed = base64.b64encode(zlib.compress(json.dumps(modules).encode(), 9)).decode()
        return f".unpack({_literal(textwrap.fill(packed, 120))})"
    entries = [
        f"{name!r}: ({is_package}, {shown!r}, {lines}, {_literal(text)}),\n"
        for name, (is_package, shown, lines, text) in modules.items()
    ]
    return f"({{\n{''.join(entries)}}})"


def _literal(text: str) -> str:
    """A literal of ``text`` that can be read, without two opening braces, which Argo would take for a tag."""
    escaped = text.replace("\\", "\\\\").replace("'''", "''\\'").replace("{{", "{\\x7b").replace("\r", "\\r")
    return f"'''\\\n{escaped}'''"
