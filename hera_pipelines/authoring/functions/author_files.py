"""The files that an author's steps are made of: what each statement defines and reads, and which modules are local.

A module is local if its file is in the author's project. The packages of an environment and of other projects are
expected in the image of a step.
"""

import ast
import copy
import importlib.util
import symtable
import sys
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

from hera_pipelines.authoring.functions.script_loader import _bare

# mypy: allow-untyped-calls

_IMAGE_PACKAGES = frozenset(("tiphys", "tiphys_plugin", "tiphys_controller"))
"""Packages that an image with tiphys has, also where they are developed beside the author's files."""
_AUTHORING_PACKAGES = frozenset(("hera", "hera_pipelines"))
_PROJECT_MARKS = ("pyproject.toml", "setup.py", "setup.cfg", ".git")
_GUARDS = ("TYPE_CHECKING", "typing.TYPE_CHECKING", "__name__ == '__main__'")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_ADDING_METHODS = frozenset(("add", "append", "extend", "insert", "register", "setdefault", "update"))


@dataclass(frozen=True)
class NameRead:
    """A name that a statement reads of its module, with the attributes behind it: ``np.random.seed``."""

    chain: tuple[str, ...]
    line: int


@dataclass(eq=False)
class Statement:
    """A statement at the top level of a file, or the definition of a nested step."""

    node: ast.stmt
    dropped_decorators: int = 0
    """Number of its first decorators that stay behind: those that make a step of a function."""
    step: str = ""
    """Name of the step that the script calls, whose annotations and defaults stay behind too."""

    @cached_property
    def is_guarded(self) -> bool:
        """Whether its names are there for type checkers alone, or where the file itself is run."""
        return isinstance(self.node, ast.If) and ast.unparse(self.node.test) in _GUARDS

    @cached_property
    def names(self) -> frozenset[str]:
        """Names that the statement gives to its module; of a guarded one, those where there is no type checker."""
        if isinstance(self.node, _DEFINITIONS):
            return frozenset((self.node.name,))
        if isinstance(self.node, ast.Import | ast.ImportFrom):
            return frozenset(imported_name(alias) for alias in self.node.names)
        text = ast.unparse(self.node)
        if isinstance(self.node, ast.If) and self.is_guarded:
            text = "" if "__main__" in text else "\n".join(map(ast.unparse, self.node.orelse))
        symbols = symtable.symtable(text, "file", "exec").get_symbols()
        return frozenset(s.get_name() for s in symbols if s.is_assigned() or s.is_imported())

    @cached_property
    def form(self) -> ast.Module:
        """What of the statement has a meaning in a script: no comments, and annotations only where they are kept."""
        node = copy.deepcopy(self.node)
        if isinstance(node, _DEFINITIONS):
            node.decorator_list = node.decorator_list[self.dropped_decorators :]
        tree: ast.Module = _bare(ast.Module([node], []), self.step)
        _WithoutLocalAnnotations().visit(tree)
        return ast.fix_missing_locations(tree)

    @cached_property
    def reads(self) -> list[NameRead]:
        """What the statement reads of its module."""
        names = _global_names(ast.unparse(self.form))
        return sorted(
            (read for read in _name_reads(self.form) if read.chain[0] in names),
            key=lambda read: (read.line, read.chain),
        )

    def drop_decorators(self, count: int) -> None:
        """Leave its first ``count`` decorators behind."""
        if count != self.dropped_decorators:
            self.dropped_decorators = count
            vars(self).pop("form", None)
            vars(self).pop("reads", None)

    @property
    def first_line(self) -> int:
        """The first line that travels: that of its first decorator, or its own."""
        decorators: list[ast.expr] = getattr(self.node, "decorator_list", [])[self.dropped_decorators :]
        return min([self.node.lineno, *(decorator.lineno for decorator in decorators)])


@dataclass(eq=False)
class AuthorFile:
    """A file with its statements. All steps share it, since each looks at most of it."""

    name: str
    """Name by which it is imported; empty: the file of the step itself."""
    shown: str
    """Path that a traceback shows."""
    text: str
    package: str = ""
    """Package in which its relative imports begin."""
    folder: Path | None = None
    """Folder of its modules; None: it is no package."""

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed text."""
        return ast.parse(self.text)

    @cached_property
    def statements(self) -> list[Statement]:
        """The statements at its top level, in their order."""
        return [Statement(node) for node in self.tree.body]

    @cached_property
    def defined(self) -> Mapping[str, list[Statement]]:
        """The statements that give each name."""
        return _group((name, statement) for statement in self.statements for name in statement.names)

    @cached_property
    def changes(self) -> Mapping[str, list[Statement]]:
        """The statements that change what a name stands for without giving it: ``random.seed(0)``, ``TABLE[1] = 2``.

        Those with ``__file__`` are left out: a path of this machine has no meaning in a container.
        """
        return _group(
            (name, statement)
            for statement in self.statements
            if not statement.is_guarded
            for name in self._changed_names(statement.node)
            if not any(isinstance(node, ast.Name) and node.id == "__file__" for node in ast.walk(statement.node))
        )

    @cached_property
    def assigned_by_functions(self) -> frozenset[str]:
        """Names that its functions declare ``global``."""
        return frozenset(name for node in ast.walk(self.tree) if isinstance(node, ast.Global) for name in node.names)

    @cached_property
    def future(self) -> list[Statement]:
        """Its imports of ``__future__``, which hold for all of its statements."""
        return [
            statement
            for statement in self.statements
            if isinstance(statement.node, ast.ImportFrom) and statement.node.module == "__future__"
        ]

    def segment(self, statement: Statement) -> str:
        """Text of ``statement`` without the decorators that stay behind."""
        node = statement.node
        if isinstance(node, _DEFINITIONS):
            return "\n".join(self.text.split("\n")[statement.first_line - 1 : node.end_lineno])
        return ast.get_source_segment(self.text, node) or ""  # there may be several on a line

    def _changed_names(self, statement: ast.stmt) -> set[str]:
        """Names that ``statement`` changes, also by a function of the file: ``@register`` adds to a table."""
        names: set[str] = set()
        for node in _executed(statement):
            names |= _stored_names(node)
            calls = [node.value] if isinstance(node, ast.Expr) else []
            for call in [*calls, *getattr(node, "decorator_list", ())]:
                if isinstance(getattr(call, "func", call), ast.Attribute):
                    names.add(root_name(call))
                for function in self.defined.get(root_name(call), ()):
                    names |= set().union(*map(_stored_names, ast.walk(function.node)))
        return names


@dataclass
class LocalModules:
    """Finds the modules of the project that contains ``folder``."""

    folder: Path
    files: dict[str, AuthorFile | None] = field(default_factory=dict)

    @cached_property
    def project(self) -> Path:
        """The folder with the author's project: the nearest with a mark of one, else the one where compile runs."""
        for folder in (self.folder, *self.folder.parents):
            if any((folder / mark).exists() for mark in _PROJECT_MARKS):
                return folder
        if self.folder.is_relative_to(Path.cwd()):
            return Path.cwd()
        return next(f for f in (self.folder, *self.folder.parents) if not (f / "__init__.py").exists())

    def find(self, name: str) -> AuthorFile | None:
        """The local module of that name; None: the image is expected to have it, or there is none."""
        if name not in self.files:
            self.files[name] = self._load(name)
        return self.files[name]

    def _load(self, name: str) -> AuthorFile | None:
        parent, _, last = name.rpartition(".")
        if parent:
            package = self.find(parent)
            folders = [package.folder] if package and package.folder else []
        else:
            folders = list(_import_folders(last)) if last not in _IMAGE_PACKAGES | _AUTHORING_PACKAGES else []
        for folder in filter(self._is_local, folders):
            for path in (folder / last / "__init__.py", folder / f"{last}.py"):
                if path.is_file():
                    text, shown = _read_text(path), show_path(path, name)
                    own = path.parent if path.name == "__init__.py" else None
                    return shared_file(name, shown, text, name if own else parent, own)
            if (folder / last).is_dir():
                return shared_file(name, show_path(folder / last, name), "", name, folder / last)
        return None

    def _is_local(self, folder: Path) -> bool:
        return folder.is_relative_to(self.project) and not {"site-packages", "dist-packages"}.intersection(folder.parts)


def show_path(path: Path, module: str = "") -> str:
    """``path`` below the folder where compile runs; elsewhere its name alone, as no machine knows it by another."""
    path = path.resolve()
    if path.is_relative_to(Path.cwd()):
        return path.relative_to(Path.cwd()).as_posix()
    return "/".join(path.parts[-(module.count(".") + 1 + (path.name == "__init__.py")) :])


@lru_cache(maxsize=256)
def shared_file(name: str, shown: str, text: str, package: str, folder: Path | None = None) -> AuthorFile:
    """The file with this content."""
    return AuthorFile(name, shown, text, package, folder)


def _read_text(path: Path) -> str:
    with tokenize.open(path) as file:  # as Python reads its encoding
        return file.read()


def _import_folders(name: str) -> Iterator[Path]:
    """Folders from which the top-level module ``name`` is imported; the standard library has none."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return
    if spec is None or name in sys.stdlib_module_names:
        return
    for place in spec.submodule_search_locations or filter(None, [spec.origin if spec.has_location else None]):
        folder = Path(place).resolve().parent
        if not folder.is_relative_to(sysconfig.get_path("stdlib")):
            yield folder


class _WithoutLocalAnnotations(ast.NodeTransformer):
    """Drops the annotations of the variables of functions, which Python never evaluates; those of a class it does."""

    _is_in_function = False

    def visit(self, node: ast.AST) -> ast.AST:
        outer = self._is_in_function
        if isinstance(node, _DEFINITIONS):
            self._is_in_function = not isinstance(node, ast.ClassDef)
        if isinstance(node, ast.AnnAssign) and self._is_in_function:
            node.annotation = ast.Constant(None)
        self.generic_visit(node)
        self._is_in_function = outer
        return node


def _group(pairs: Iterable[tuple[str, Statement]]) -> dict[str, list[Statement]]:
    found: dict[str, list[Statement]] = {}
    for name, statement in pairs:
        found.setdefault(name, []).append(statement)
    return found


def _executed(statement: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when the module is loaded. The block of a ``with`` makes a pipeline, and no step runs it."""
    yield statement
    if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.With):
        for child in ast.iter_child_nodes(statement):
            yield from _executed(child)


def root_name(node: ast.AST) -> str:
    """The name at which ``a.b[c].d`` or a call of it begins; empty: it begins otherwise."""
    node = node.func if isinstance(node, ast.Call) else node
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def imported_name(alias: ast.alias) -> str:
    """The name that an import gives."""
    return alias.asname or alias.name.partition(".")[0]


def is_ours(module: str) -> bool:
    """Whether a module is of a package that compile needs, and the image of a step need not have."""
    return module.partition(".")[0] in _AUTHORING_PACKAGES


def _stored_names(node: ast.AST) -> set[str]:
    """The names to which ``node`` assigns, or whose attributes or items it changes."""
    if isinstance(node, ast.Global):
        return set(node.names)
    is_stored = isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load)
    is_added = isinstance(node, ast.Call) and getattr(node.func, "attr", "") in _ADDING_METHODS
    return {root_name(node)} if is_stored or is_added else set()


def _global_names(source: str) -> set[str]:
    """Names that ``source`` reads of its module, in all of its scopes."""
    top = symtable.symtable(source, "file", "exec")
    pending = list(top.get_children())
    names = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_referenced()}
    while pending:
        scope = pending.pop()
        pending += scope.get_children()
        names |= {symbol.get_name() for symbol in scope.get_symbols() if symbol.is_global()}
    return names


def _name_reads(tree: ast.AST) -> Iterator[NameRead]:
    """Each name in ``tree``, with the attributes that are read of it."""
    pending = [tree]
    while pending:
        node = pending.pop()
        attributes: list[str] = []
        inner = node
        while isinstance(inner, ast.Attribute):
            attributes.insert(0, inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name):
            yield NameRead((inner.id, *attributes), inner.lineno)
        else:
            pending += ast.iter_child_nodes(node)
