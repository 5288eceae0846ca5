"""What a step takes along of its author's files, found by the names that its function uses.

An edit of anything else in these files changes no script, so no step runs again for it.
"""

import ast
import builtins
import sys
from dataclasses import dataclass, field
from typing import NoReturn

from hera_pipelines.authoring.functions.author_files import (
    AuthorFile,
    LocalModules,
    NameRead,
    Statement,
    imported_name,
    is_ours,
    root_name,
)
from tiphys.errors import UsageError

SCRIPT_IMPORTS = ("json", "os", "pathlib", "shutil", "sys")
_KNOWN_NAMES = frozenset((*dir(builtins), *SCRIPT_IMPORTS, "__name__", "__package__", "__spec__"))
"""Names that a function of a script can use without an import."""
_READING_METHODS = ("read_text", "read_bytes")


@dataclass
class TravellingCode:
    """Collects what one step uses: statements of its own file, and of local modules."""

    step: str
    main: AuthorFile
    definition: Statement
    modules: LocalModules
    imports_relatively: bool = False
    """Whether its own file does."""
    kept: dict[AuthorFile, dict[Statement, set[str]]] = field(default_factory=dict)
    """The statements of each file that travel; of an import, the names that it imports."""
    _followed: set[tuple[str, str, tuple[str, ...]]] = field(default_factory=set)

    def add(self, file: AuthorFile, statement: Statement) -> None:
        """Take ``statement`` along, with all that it uses.

        Raises:
            UsageError: some of it cannot travel.
        """
        kept = self.kept.setdefault(file, {})
        if statement.node is self.definition.node and statement is not self.definition:
            return
        if statement in kept and not isinstance(statement.node, ast.Import | ast.ImportFrom):
            return
        kept.setdefault(statement, set())
        decorators = enumerate(getattr(statement.node, "decorator_list", ()), 1)
        steps = (n for n, decorator in decorators if self.makes_step(file, decorator))
        statement.drop_decorators(max(steps, default=0))
        for node in ast.walk(statement.node):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    self._follow_import(file, statement, node, alias)
        self._refuse_files(file, statement)
        for read in statement.reads:
            self._use(file, read)

    @property
    def summary(self) -> str:
        """The files that travel, those with the most text first."""
        sizes = {file.shown: sum(map(len, map(file.segment, kept))) for file, kept in self.kept.items()}
        names = sorted(sizes, key=lambda name: -sizes[name])
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more files" if len(names) > 3 else "")

    def refuse(self, file: AuthorFile, line: int, sentence: str) -> NoReturn:
        """Raise a UsageError about a line of ``file``."""
        if file is self.main:
            raise UsageError(f"step {self.step!r}, line {line}: the function {sentence}")
        raise UsageError(
            f"step {self.step!r}, {file.shown}:{line}: the module {sentence}, or install the module as a package, here "
            "and in the image"
        )

    def _use(self, file: AuthorFile, read: NameRead) -> None:
        """Take along what gives a name in ``file``, and what changes it."""
        if ("name", file.name, read.chain) in self._followed:
            return
        self._followed.add(("name", file.name, read.chain))
        name = read.chain[0]
        if file is self.main and name == self.definition.step:
            return
        statements = file.defined.get(name) or [
            statement for statement in file.statements if self._star_gives(file, statement, name)
        ]
        for statement in statements:
            node = statement.node
            if not isinstance(node, ast.Import | ast.ImportFrom):
                self.add(file, statement)
                continue
            for alias in node.names:
                if imported_name(alias) in ("*", name):
                    self._follow_import(file, statement, node, alias, read.chain)
        for statement in file.changes.get(name, ()):
            self.add(file, statement)
        if name == "__file__":
            self.refuse(file, read.line, "uses __file__, and the files beside it do not travel; make them an input")
        if not (statements or name in _KNOWN_NAMES or name in file.assigned_by_functions or file.future):
            self.refuse(
                file,
                read.line,
                f"uses {name!r}, which its file does not define at its top level; import or define it, or make it an "
                "input",
            )

    def _follow_import(
        self,
        file: AuthorFile,
        statement: Statement,
        node: ast.Import | ast.ImportFrom,
        alias: ast.alias,
        chain: tuple[str, ...] = ("",),
    ) -> None:
        """Take along what ``alias`` imports, if it is local. ``chain``: how it is used, beginning at its name."""
        module = self._absolute(file, node) if isinstance(node, ast.ImportFrom) else alias.name
        if node is statement.node:
            if is_ours(module):
                what = f"{alias.name!r} of {module}" if isinstance(node, ast.ImportFrom) else module
                self.refuse(
                    file,
                    node.lineno,
                    f"uses {what}, which the image of a step need not have; import it in the function, if the "
                    "image has it",
                )
            self.kept.setdefault(file, {}).setdefault(statement, set()).add(alias.name)
        attributes = chain[1:]
        if isinstance(node, ast.ImportFrom):
            if alias.name == "*":
                self._use_module(module, chain if chain[0] else (), node.lineno)
            else:
                self._use_module(module, (alias.name, *attributes), node.lineno)
        elif alias.asname:
            self._use_module(module, attributes, node.lineno)
        else:
            first, *rest = module.split(".")
            self._use_module(first, attributes or tuple(rest), node.lineno)
            if rest and attributes[: len(rest)] != tuple(rest):
                self._use_module(module, (), node.lineno)

    def _use_module(self, name: str, chain: tuple[str, ...], line: int) -> None:
        """Take along ``chain`` of a module, or all of it; nothing of one that is not local."""
        file = self.modules.find(name)
        if file is None or ("module", name, chain) in self._followed:
            return
        self._followed.add(("module", name, chain))
        self.kept.setdefault(file, {})
        for statement in file.future:
            self.add(file, statement)
        parent = name
        while parent := parent.rpartition(".")[0]:  # as Python imports them first
            if package := self.modules.find(parent):
                self.kept.setdefault(package, {})
        attribute = chain[0] if chain else ""
        if self._gives(file, attribute):
            self._use(file, NameRead(chain, line))
        elif attribute and self.modules.find(f"{name}.{attribute}"):
            self._use_module(f"{name}.{attribute}", chain[1:], line)
        elif not attribute or "__getattr__" in file.defined:
            for statement in file.statements:
                if not statement.is_guarded:
                    self.add(file, statement)

    def _gives(self, file: AuthorFile, name: str) -> bool:
        """Whether ``file`` has a name, also by ``from … import *``."""
        return name in file.defined or any(self._star_gives(file, statement, name) for statement in file.statements)

    def _star_gives(self, file: AuthorFile, statement: Statement, name: str) -> bool:
        node = statement.node
        if not isinstance(node, ast.ImportFrom) or node.names[0].name != "*":
            return False
        module = self._absolute(file, node)
        if local := self.modules.find(module):
            return not name.startswith("_") and self._gives(local, name)
        found = vars(sys.modules[module]) if module in sys.modules else {}
        return name in found.get("__all__", [key for key in found if not key.startswith("_")])

    def _absolute(self, file: AuthorFile, node: ast.ImportFrom) -> str:
        self.imports_relatively |= bool(node.level) and file is self.main
        package = file.package.split(".") if node.level else []
        return ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])

    def makes_step(self, file: AuthorFile, decorator: ast.expr) -> bool:
        """Whether ``decorator`` is ours, or made of one of ours."""
        return self._leads_to_us(file, root_name(decorator), set())

    def _leads_to_us(self, file: AuthorFile, name: str, seen: set[tuple[str, str]]) -> bool:
        if (file.name, name) in seen:
            return False
        seen.add((file.name, name))
        for statement in file.defined.get(name, ()):
            node = statement.node
            if not isinstance(node, ast.Import | ast.ImportFrom):
                if any(self._leads_to_us(file, read.chain[0], seen) for read in statement.reads):
                    return True
                continue
            for alias in (alias for alias in node.names if imported_name(alias) == name):
                module = self._absolute(file, node) if isinstance(node, ast.ImportFrom) else alias.name
                local = self.modules.find(module)
                if is_ours(module) or (local and self._leads_to_us(local, alias.name, seen)):
                    return True
        return False

    def _refuse_files(self, file: AuthorFile, statement: Statement) -> None:
        """Refuse a value that is read from a file when its module is loaded: the container has no such file."""
        pending: list[ast.AST] = [statement.node]
        while pending:
            node = pending.pop()
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            pending += ast.iter_child_nodes(node)
            called = node.func if isinstance(node, ast.Call) else None
            is_open = isinstance(called, ast.Name) and called.id == "open" and "open" not in file.defined
            if is_open or (isinstance(called, ast.Attribute) and called.attr in _READING_METHODS):
                assert isinstance(node, ast.Call)
                self.refuse(
                    file,
                    node.lineno,
                    "uses what is read from a file when the module is loaded, and the container lacks the file; read "
                    "it in the function, from an input",
                )
