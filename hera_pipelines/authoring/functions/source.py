"""The script of a decorated function: its source, a call with its inputs, and its outputs.

Hera inlines the body of the function, where ``return`` is a syntax error and an
input artifact has no name. `FunctionSource` sends the whole function, what it uses of the
author's files (`hera_pipelines.authoring.functions.travelling`) and a call of it: input
artifacts arrive as paths, parameters as their annotations say
(`hera_pipelines.authoring.functions.parameter_types`), and each returned value is written
to the output of its annotation, ``-> Annotated[dict, Artifact(name="data")]``.
The image needs Python, nothing else.
"""

import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from hera.shared._type_util import construct_io_from_annotation, get_workflow_annotation
from hera.workflows import Artifact, InlineScriptConstructor, Parameter, Script
from hera.workflows.models import Template, ValueFrom

from hera_pipelines.authoring.calls import function_input_slots
from hera_pipelines.authoring.functions.parameter_types import NO_TEXT, ParameterType, find_parameter_type
from hera_pipelines.authoring.functions.script_functions import function_sources
from hera_pipelines.authoring.functions.travelling import SCRIPT_IMPORTS
from hera_pipelines.authoring.functions.written_code import MAX_SCRIPT_BYTES, WrittenCode, write_code
from tiphys.errors import UsageError
from tiphys.protocol.environment import input_path_variable, output_path_variable

_OUTPUT_FOLDER = "/tmp/tiphys/outputs"  # noqa: S108  a path in the container

_WRITING = ("_keep", "_plain", "_written")


@dataclass(kw_only=True)
class FunctionSource(InlineScriptConstructor):
    """The default constructor of `@step`, `@train` and `@plain`."""

    code: WrittenCode | None = None
    """What travels of the author's files, found while these can be imported; None: it is found later."""

    def generate_source(self, instance: Script) -> str:
        """The script: the author's code, the call of the function with its inputs, the outputs.

        Raises:
            UsageError: the source is no function in a file, or the script is too long.
        """
        function, step = instance.source, instance.name or ""
        if not callable(function):
            raise UsageError(f"step {step!r}: its source is not a function; use Step(…) or Train(…)")
        if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
            raise UsageError(f"step {step!r}: only plain functions can be steps; write `def`")
        code = self.code or write_code(step, function)
        if code is None:
            raise UsageError(f"step {step!r}: its function was typed into a shell; write it in a file")
        outputs, kinds = returned_outputs(function), parameter_types(step, function)
        own_functions = function_sources(
            {
                *(name for kind in kinds.values() for name in kind.functions),
                *(_WRITING if outputs else ()),
                *(("_parts",) if len(outputs) > 1 else ()),
            }
        )
        main = f"{own_functions}\n\n{_call_source(function, outputs, kinds)}".strip("\n")
        script = (
            "\n".join(f"import {name}" for name in SCRIPT_IMPORTS)
            + "\nsys.path.append(os.getcwd())\n\n"
            + code.text
            + "\n\ndef _run_step():\n"
            + textwrap.indent("".join(f"import {name}\n" for name in SCRIPT_IMPORTS) + main, "    ")
            # A process that multiprocessing spawns loads the script too.
            + '\n\nif __name__ == "__main__":\n    _run_step()\n'
        )
        if (size := len(script.encode())) > MAX_SCRIPT_BYTES:
            raise UsageError(
                f"step {step!r}: its script has {size:,} bytes with {code.files}, and a step can have "
                f"{MAX_SCRIPT_BYTES:,}; install large modules as a package, here and in the image, or read data from "
                "an input"
            )
        return script

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


def _call_source(
    function: Callable[..., Any], outputs: list["ReturnedOutput"], kinds: Mapping[str, ParameterType]
) -> str:
    # By its name in the file, which the script may use for something else.
    call = f"globals()[{function.__name__!r}]({', '.join(_call_arguments(function, kinds))})"
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
            reader = kind.code.replace("{{", "{\\x7b")  # a choice of a Literal
            value = f"_read({python_name!r}, {reader}, {value})" if kind.functions else value
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
        io = construct_io_from_annotation(name, parameters[name].annotation)
        if isinstance(io, Parameter) and io.enum:  # the choices of a Literal may be numbers
            io.enum = [choice if isinstance(choice, str) else kind.write(choice) for choice in io.enum]
            parameters[name] = parameters[name].replace(annotation=Annotated[str, io])
        elif default is not None and kind.none is not None:
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
