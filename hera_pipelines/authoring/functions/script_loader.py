"""Functions with which the script of a step defines what travels of the author's files, under their names and lines.

The text of each file is the author's, so that a traceback shows it as it is. These functions use the standard library
of Python 3.8. Compile uses `_bare` too, so that both sides agree on what counts.
"""

# mypy: ignore-errors

import ast
import base64
import importlib.util
import json
import linecache
import sys
import traceback
import zlib


def _bare(tree, step):
    """Drops annotations that a file need not be able to evaluate, and the defaults of the step."""
    nested = [node for statement in tree.body if isinstance(statement, ast.If) for node in statement.body]
    own = [node for node in tree.body + nested if isinstance(node, ast.FunctionDef) and node.name == step]
    for node in ast.walk(tree):
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if is_function and (not node.decorator_list or node in own):
            node.returns = None
            arguments = node.args
            inputs = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            for argument in [*inputs, *filter(None, (arguments.vararg, arguments.kwarg))]:
                argument.annotation = None
    for node in own:
        node.args.defaults, node.args.kw_defaults = [], [None] * len(node.args.kwonlyargs)
    return tree


def _define(names, file, lines, text, step=""):
    """Runs the statements of ``text``, which begin at these ``lines`` of ``file``."""
    tree = _bare(ast.parse(text), step)
    shown = list(linecache.cache[file][2]) if file in linecache.cache else []
    for statement, line in zip(tree.body, lines):  # noqa: B905  Python 3.9 has no strict=
        first = min([statement.lineno] + [decorator.lineno for decorator in getattr(statement, "decorator_list", ())])
        own = text.split("\n")[first - 1 : statement.end_lineno]
        shown += ["\n"] * (line - 1 + len(own) - len(shown))
        shown[line - 1 : line - 1 + len(own)] = [text + "\n" for text in own]
        ast.increment_lineno(statement, line - first)
    linecache.cache[file] = (len(text), None, shown, file)
    exec(compile(tree, file, "exec", dont_inherit=True), names)  # noqa: S102  it is the program


class _AuthorModules:
    """Imports the modules beside the author's file, which are in the script."""

    def __init__(self, modules):
        self.modules = modules

    @classmethod
    def unpack(cls, text):
        return cls(json.loads(zlib.decompress(base64.b64decode(text))))

    def find_spec(self, name, path=None, target=None):  # noqa: ARG002
        if name in self.modules:
            return importlib.util.spec_from_loader(name, self, is_package=self.modules[name][0])
        return None

    def create_module(self, spec):  # noqa: ARG002
        return None

    def exec_module(self, module):
        _, file, lines, text = self.modules[module.__name__]
        module.__file__ = file
        _define(vars(module), file, lines, text)


def _show_error(kind, error, trace, show=sys.excepthook):
    """Prints a traceback without the frames of the script and of imports, which the author has not written."""
    frames = []
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file != _define.__code__.co_filename and not file.startswith("<frozen importlib"):
            frames.append(trace)
        trace = trace.tb_next
    for frame, following in zip(frames, [*frames[1:], None]):  # noqa: B905
        frame.tb_next = following
    error.__traceback__ = frames[0] if frames else None
    # Python's own function reads lines from files alone.
    show = traceback.print_exception if show is sys.__excepthook__ else show
    show(kind, error, error.__traceback__)
