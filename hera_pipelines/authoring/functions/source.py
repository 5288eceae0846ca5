"""The script of a decorated function: its source, a call with its inputs, and its outputs.

Hera inlines the body of the function, where ``return`` is a syntax error and an
input artifact has no name. `FunctionSource` sends the whole function and a call
of it: input artifacts arrive as paths, parameters as their annotations say
(`hera_pipelines.authoring.functions.parameter_types`), and each returned value is written
to the output of its annotation, ``-> Annotated[dict, Artifact(name="data")]``.
The image needs Python, nothing else.
"""

import ast
import builtins
import inspect
import re
import symtable
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, NoReturn, get_args, get_origin

from hera.shared._type_util import construct_io_from_annotation, get_workflow_annotation
from hera.workflows import Artifact, InlineScriptConstructor, Script
from hera.workflows.models import Template, ValueFrom

from hera_pipelines.authoring.calls import function_input_slots
from hera_pipelines.authoring.functions import script_functions
from hera_pipelines.authoring.functions.parameter_types import NO_TEXT, ParameterType, find_parameter_type
from hera_pipelines.authoring.functions.script_functions import function_sources
from tiphys.errors import UsageError
from tiphys.protocol.environment import input_path_variable, output_path_variable

_OUTPUT_FOLDER = "/tmp/tiphys/outputs"  # noqa: S108  a path in the container

_SCRIPT_IMPORTS = ("json", "os", "pathlib", "shutil", "sys")
_SCRIPT_NAMES = frozenset((*dir(builtins), *_SCRIPT_IMPORTS, "__name__", "__file__"))
"""Names that a function of a script can use without an import."""

_WRITING = ("_keep", "_plain", "_written")


@dataclass(kw_only=True)
class FunctionSource(InlineScriptConstructor):
    """The default constructor of `@step`, `@train` and `@plain`."""

    def generate_source(self, instance: Script) -> str:
        """The script: imports, the function, the call with its inputs, the outputs."""
        function = instance.source
        if not callable(function):
            raise UsageError(f"step {instance.name!r}: its source is not a function; use Step(…) or Train(…)")
        outputs, kinds = returned_outputs(function), parameter_types(instance.name or "", function)
        parts = [
            "import json\nimport os\nimport pathlib\nimport shutil\nimport sys\nsys.path.append(os.getcwd())\n",
            _function_source(function),
            function_sources(
                {
                    *(name for kind in kinds.values() for name in kind.functions),
                    *(_WRITING if outputs else ()),
                    *(("_parts",) if len(outputs) > 1 else ()),
                }
            ),
            _call_source(function, outputs, kinds),
        ]
        return "\n".join(part.strip("\n") + "\n" for part in parts if part)

    def transform_template_post_build(self, instance: Script, template: Template) -> Template:
        """Set the paths of returned outputs to those that the script writes, and a default of None to its text."""
        assert callable(instance.source)  # `generate_source` has refused the others
        texts = {slot.name: slot.kind.none for slot in function_input_slots(instance.source) if slot.kind}
        for parameter in (template.inputs.parameters if template.inputs else None) or []:
            if parameter.default == "null" and texts.get(parameter.name):
                parameter.default = texts[parameter.name]
        for artifact in (template.outputs.artifacts if template.outputs else None) or []:
            artifact.path = artifact.path or f"{_OUTPUT_FOLDER}/{artifact.name}"
        for parameter in (template.outputs.parameters if template.outputs else None) or []:
            parameter.value_from = parameter.value_from or ValueFrom(path=f"{_OUTPUT_FOLDER}/{parameter.name}")
        return super().transform_template_post_build(instance, template)


def _function_source(function: Callable[..., Any]) -> str:
    """Source of ``function`` without decorators, annotations and defaults: their names exist only in its own file."""
    definition = _parse_function(function)
    if not isinstance(definition, ast.FunctionDef):
        raise UsageError(f"step {function.__name__!r}: only plain functions can be steps; write `def`")
    definition.decorator_list, definition.returns = [], None
    arguments = definition.args
    arguments.defaults, arguments.kw_defaults = [], [None] * len(arguments.kwonlyargs)
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        argument.annotation = None
    source = ast.unparse(ast.fix_missing_locations(_ScriptForm().visit(definition)))
    if "{{" in source:
        line = next(line.strip() for line in source.splitlines() if "{{" in line)
        raise UsageError(f"function {function.__name__!r}: Argo would read the braces in `{line}` as a tag; part them")
    return source


def _parse_function(function: Callable[..., Any]) -> ast.stmt:
    """The definition of ``function``, with the lines of its file. An indented one keeps its texts of several lines."""
    lines, first_line = inspect.getsourcelines(function)
    is_indented = lines[0][:1].isspace()
    statement = ast.parse("".join(["if 1:\n", *lines] if is_indented else lines)).body[0]
    definition = statement.body[0] if is_indented and isinstance(statement, ast.If) else statement
    return ast.increment_lineno(definition, first_line - 1 - is_indented)


class _ScriptForm(ast.NodeTransformer):
    """Parts two opening braces in texts, which Argo would take for the beginning of a tag.

    It also drops the annotations of local variables, which Python never evaluates; those of a class it does.
    """

    _is_in_class = False

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._visit_scope(node, is_class=True)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._visit_scope(node, is_class=False)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._visit_scope(node, is_class=False)

    def _visit_scope(self, node: ast.AST, *, is_class: bool) -> ast.AST:
        outer, self._is_in_class = self._is_in_class, is_class
        visited = self.generic_visit(node)
        self._is_in_class = outer
        return visited

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if not self._is_in_class:
            node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if not isinstance(node.value, str | bytes):
            return node
        text = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
        first, *rest = re.split(r"(?<={)(?={)", text)
        joined: ast.expr = ast.Constant(self._like(node.value, first))
        for part in rest:
            joined = ast.BinOp(joined, ast.Add(), ast.Constant(self._like(node.value, part)))
        return joined

    @staticmethod
    def _like(value: str | bytes, text: str) -> str | bytes:
        return text if isinstance(value, str) else text.encode("latin-1")

    def visit_MatchValue(self, node: ast.MatchValue) -> ast.pattern:
        return node  # a pattern is no expression

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        values: list[ast.expr] = []
        for value in node.values:
            if not isinstance(value, ast.Constant):
                values.append(self.visit(value))
                continue
            # A brace in the text of an f-string is written twice.
            for part in re.split(r"({)", str(value.value)):
                brace = ast.Call(ast.Name("chr", ast.Load()), [ast.Constant(ord("{"))], [])
                values.append(ast.FormattedValue(brace, -1, None) if part == "{" else ast.Constant(part))
        return ast.JoinedStr(values)


def check_travels(step: str, function: Callable[..., Any]) -> None:
    """Refuse a function that would be another one in the container, where its file is absent.

    Raises:
        UsageError: names the line and the name, decorator or ``return`` that would be missing or wrong.
    """
    try:
        definition = _parse_function(function)
    except OSError:
        return  # it was typed into a shell; compile says so
    if not isinstance(definition, ast.FunctionDef):
        return  # `_function_source` refuses it

    def refuse(node: ast.stmt | ast.expr, sentence: str) -> NoReturn:
        raise UsageError(f"step {step!r}, line {node.lineno}: the function {sentence}")

    if definition.name in _SCRIPT_IMPORTS or hasattr(script_functions, definition.name):
        refuse(definition, "has a name that its script uses itself; give it another one")
    if len(definition.decorator_list) > 1:
        decorators = " and ".join(f"@{ast.unparse(decorator)}" for decorator in definition.decorator_list)
        refuse(definition, f"has {decorators}, and its script has no decorators; call the other one in the function")
    missing = _global_names(_function_source(function)) - _SCRIPT_NAMES - {definition.name}
    # In the body alone: annotations, decorators and defaults stay behind.
    names = [node for part in definition.body for node in ast.walk(part) if isinstance(node, ast.Name)]
    for node in sorted(names, key=lambda name: name.lineno):
        if node.id in missing:
            refuse(
                node,
                f"uses {node.id!r} of its file, which the container of the step does not have; import or define it "
                "in the function, or make it an input",
            )
    count = len(returned_outputs(function))
    for statement in _returns(definition):
        values = statement.value.elts if isinstance(statement.value, ast.Tuple) else ()
        if count > 1 and values and len(values) != count and not any(isinstance(v, ast.Starred) for v in values):
            refuse(statement, f"returns {len(values)} values, and its annotation names {count} outputs")


def _global_names(source: str) -> set[str]:
    """Names that ``source`` reads of its module, in all of its scopes."""
    pending, names, own = [symtable.symtable(source, "step", "exec")], set(), set()
    while pending:
        scope = pending.pop()
        pending += scope.get_children()
        if scope.get_type() != "module":
            names |= {symbol.get_name() for symbol in scope.get_symbols() if symbol.is_global()}
            own |= {s.get_name() for s in scope.get_symbols() if s.is_declared_global() and s.is_assigned()}
    return names - own


def _returns(definition: ast.FunctionDef) -> Iterator[ast.Return]:
    """The ``return`` statements of the function itself, not of those within it."""
    pending: list[ast.AST] = list(definition.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Return):
            yield node
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            pending += ast.iter_child_nodes(node)


def _call_source(
    function: Callable[..., Any], outputs: list["ReturnedOutput"], kinds: Mapping[str, ParameterType]
) -> str:
    call = f"{function.__name__}({', '.join(_call_arguments(function, kinds))})"
    if not outputs:
        return call
    several = len(outputs) > 1
    lines = [f"result = _parts({call}, {len(outputs)})" if several else f"result = {call}"]
    for index, output in enumerate(outputs):
        value = f"result[{index}]" if several else "result"
        value = f"{value} and str({value})" if output.is_path else value
        none = "" if output.none is None else f", {output.none!r}"
        lines.append(f"_keep({output_path_variable(output.name)!r}, {output.path!r}, {value}{none})")
    return "\n".join(lines)


def _call_arguments(function: Callable[..., Any], kinds: Mapping[str, ParameterType]) -> Iterator[str]:
    for python_name, parameter in inspect.signature(function).parameters.items():
        io = construct_io_from_annotation(python_name, parameter.annotation)
        name = io.name or python_name
        if io.output:
            path = _declared_path(io) or f"{_OUTPUT_FOLDER}/{name}"
            value = f"pathlib.Path(os.environ.get({output_path_variable(name)!r}, {path!r}))"
        elif isinstance(io, Artifact):
            path = io.path or io._get_default_inputs_path()
            value = f"pathlib.Path(os.environ.get({input_path_variable(name)!r}, {path!r}))"
        else:
            kind, value = kinds[python_name], _parameter_placeholder(name)
            value = f"_read({python_name!r}, {kind.code}, {value})" if kind.functions else value
        yield value if parameter.kind is inspect.Parameter.POSITIONAL_ONLY else f"{python_name}={value}"


def _parameter_placeholder(parameter: str) -> str:
    """An Argo tag that becomes a Python string literal. A JSON string is one, also with quotes in the value."""
    return f"{{{{=toJson(inputs.parameters['{parameter}'])}}}}"


class ReturnedOutput(NamedTuple):
    """An output that the function returns."""

    name: str
    path: str
    none: str | None = None
    """The text for None, if it is not JSON's."""
    is_path: bool = False
    """Whether a path is the value of the parameter, rather than the file that holds it."""


def returned_outputs(function: Callable[..., Any]) -> list[ReturnedOutput]:
    """Each output that the return annotation declares, in its order.

    Raises:
        UsageError: the annotation leaves out a returned value, or a name.
    """
    annotation = inspect.signature(function).return_annotation
    parts = get_args(annotation) if get_origin(annotation) is tuple else (annotation,)
    declared = [get_workflow_annotation(part) for part in parts]
    if not any(declared):
        return []
    if not all(io is not None and io.name for io in declared):
        raise UsageError(
            f"function {function.__name__!r}: each value that it returns needs a name; write "
            "-> Annotated[str, Artifact(name=…)], or a tuple of these"
        )
    return [_returned(part, io) for part, io in zip(parts, declared, strict=True)]


def _returned(annotation: Any, io: Any) -> ReturnedOutput:
    output = ReturnedOutput(str(io.name), _declared_path(io) or f"{_OUTPUT_FOLDER}/{io.name}")
    if isinstance(io, Artifact):
        return output
    with suppress(UsageError):  # what cannot be read may well be written
        kind = find_parameter_type(annotation)
        return output._replace(none=NO_TEXT if kind.none == NO_TEXT else None, is_path=kind.is_path)
    return output


def parameter_types(step: str, function: Callable[..., Any]) -> dict[str, ParameterType]:
    """How the script reads each input parameter of ``function``, by its name in Python.

    Raises:
        UsageError: a script cannot make what an annotation says.
    """
    try:
        return {slot.python_name: slot.kind for slot in function_input_slots(function) if slot.kind}
    except UsageError as error:
        raise UsageError(f"step {step!r}: {error}") from None


def _declared_path(io: Any) -> str | None:
    path: str | None = io.path if isinstance(io, Artifact) else io.value_from.path if io.value_from else None
    return path


def write_defaults(step: str, function: Callable[..., Any]) -> None:
    """Check the defaults of ``function``, and show Hera texts where it would refuse what the function takes.

    It has no text for what JSON lacks, and wants a default of None where a parameter may be None.
    """
    signature = inspect.signature(function)
    parameters = dict(signature.parameters)
    for name, kind in parameter_types(step, function).items():
        default = parameters[name].default
        if default is not None and kind.none is not None:
            io = construct_io_from_annotation(name, parameters[name].annotation)
            parameters[name] = parameters[name].replace(annotation=Annotated[str, io])
        if default is inspect.Parameter.empty or default is None:
            continue
        try:
            text = kind.write(default)
        except (ValueError, TypeError) as error:
            raise UsageError(f"step {step!r}: the default of {name!r}: {error}") from None
        if kind.none is not None or not isinstance(default, str | bool | int | float):
            parameters[name] = parameters[name].replace(default=text)
    function.__signature__ = signature.replace(parameters=list(parameters.values()))  # type: ignore[attr-defined]
