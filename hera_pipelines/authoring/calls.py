"""Calls a step inside a pipeline like a function: each argument becomes the value of an input.

Hera takes ``arguments={…}`` and leaves the dependencies to the author. Here
``fit(data, lr=0.1)`` works too: a task as argument means the output of that task.
``fit(data, sweep=grid(lr=[0.1, 0.01]), parallel=2)`` makes a sweep.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple, Protocol, get_args, runtime_checkable

from hera.shared import global_config
from hera.shared._type_util import construct_io_from_annotation
from hera.workflows import Artifact, Parameter, Task
from hera.workflows._context import _context
from hera.workflows.models import Template
from hera.workflows.protocol import Templatable

from hera_pipelines.authoring.functions.parameter_types import ParameterType, find_parameter_type
from hera_pipelines.sweeps import search
from tiphys.errors import UsageError, unknown_name_message

TASK_OPTIONS = frozenset(
    (
        *("name", "arguments", "with_items", "with_param", "with_sequence", "when", "depends", "dependencies"),
        *("continue_on", "hooks", "on_exit", "template", "template_ref", "inline", "sweep", "parallel"),
    )
)
"""Keywords of Hera's call, and two of Tiphys. An input of the same name takes its value from ``arguments={…}``."""


@runtime_checkable
class HasEntryDag(Protocol):
    """A workflow that creates its entry DAG when a task is called outside any DAG."""

    def entry_dag(self) -> Any: ...


class InputSlot(NamedTuple):
    """One input of a template: its name in Python, its name in Argo, and its kind."""

    python_name: str
    name: str
    artifact: bool
    output_name: str
    """The output that a task with several outputs stands for."""
    kind: ParameterType | None = None
    """How a function reads its parameter; None: an artifact, or the input of a container."""

    def write(self, step: str, value: Any) -> Any:
        """The text of a parameter's value.

        Raises:
            UsageError: the function could not read it.
        """
        if self.kind is None:
            return value
        try:
            return self.kind.write(value)
        except (ValueError, TypeError) as error:
            raise UsageError(f"step {step!r}: input {self.python_name!r}: {error}") from None


def create_task(
    template: Any, slots: list[InputSlot], hera_call: Callable[..., Any], args: tuple[Any, ...], keywords: Any
) -> Any:
    """Create the task of ``template`` in the open DAG, and return it.

    ``hera_call`` is Hera's call of the template, which takes those of ``keywords`` that are Hera's.

    Raises:
        UsageError: an argument does not fit the inputs, or the sweep is not valid.
    """
    options = {name: value for name, value in keywords.items() if name in TASK_OPTIONS}
    values = {name: value for name, value in keywords.items() if name not in TASK_OPTIONS}
    _check_same_template(template)
    sweep, parallel = options.pop("sweep", None), options.pop("parallel", None)
    if sweep is not None:
        inputs = {name: (slot.name, slot.artifact) for slot in slots for name in (slot.python_name, slot.name)}
        options["with_items"] = search.build_sweep_items(template.name, sweep, options, inputs)
    if isinstance(options.get("with_items"), list):
        options["with_items"] = _write_items(template.name, slots, options["with_items"])
    if isinstance(task := options.get("with_param"), Task):
        options["with_param"] = _task_output(template.name, InputSlot("with_param", "", False, ""), task)
    arguments = [*as_list(options.get("arguments")), *_bind_arguments(template.name, slots, args, values)]
    if sweep is not None:
        _check_swept_once(template.name, options["with_items"][0], arguments)
    arguments += _item_arguments(slots, options.get("with_items"), arguments)
    if arguments:
        options["arguments"] = arguments
    with _open_dag():
        task = hera_call(**options)
        if isinstance(task, Task):
            task.__class__ = StepTask  # Hera's call makes its own class
        if sweep is not None:
            search.record_sweep(_open_contexts()[0], task.name, sweep)
        if parallel is not None:
            search.limit_parallel_tasks(_open_contexts()[-1], template.name, parallel, options)
        return task


def require_image(step: str, image: str | None) -> None:
    """Refuse a step without an image, unless its author has set Hera's global one: Hera's own is a bare Python.

    Raises:
        UsageError: there is no image.
    """
    if image is None and global_config.image == type(global_config)._image:
        raise UsageError(
            f"step {step!r} has no image, and Hera would run it in {global_config.image}; give image=…, or set "
            "hera.shared.global_config.image"
        )


def function_input_slots(function: Callable[..., Any], *, typed: bool = True) -> list[InputSlot]:
    """Inputs of a decorated function; ``typed``: its script reads them by its annotations, and not Hera.

    Raises:
        UsageError: a script cannot make what an annotation says.
    """
    slots = []
    for name, parameter in inspect.signature(function).parameters.items():
        io = construct_io_from_annotation(name, parameter.annotation)
        if not io.output:
            declared = construct_io_from_annotation(name, function.__annotations__.get(name))
            is_artifact = isinstance(io, Artifact)
            kind = _parameter_type(function, name, parameter) if typed and not is_artifact else None
            slots.append(InputSlot(name, str(io.name), is_artifact, str(declared.name), kind))
    return slots


def _parameter_type(function: Callable[..., Any], name: str, parameter: inspect.Parameter) -> ParameterType:
    try:
        return find_parameter_type(function.__annotations__.get(name, Any), parameter.default)
    except UsageError as error:
        raise UsageError(f"input {name!r}: {error}") from None


def separate_shared_inputs(function: Callable[..., Any]) -> None:
    """Name the inputs of ``function`` after its parameters where they share an annotation that has a name.

    Both inputs of ``def compare(a: Model, b: Model)`` would be called ``model``. The new
    signature, which Hera reads, gives each its own name and path.
    """
    signature = inspect.signature(function)
    declared = {name: construct_io_from_annotation(name, p.annotation) for name, p in signature.parameters.items()}
    uses = Counter((io.name, io.output) for io in declared.values())
    parameters = []
    for name, parameter in signature.parameters.items():
        io = declared[name]
        if io.name != name and uses[io.name, io.output] > 1:
            io.name = name
            if isinstance(io, Artifact):
                io.path = None
            parameter = parameter.replace(annotation=Annotated[get_args(parameter.annotation)[0], io])
        parameters.append(parameter)
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]


def template_input_slots(template: Templatable) -> list[InputSlot]:
    """Inputs that a container declares: parameters first, then artifacts."""
    inputs = template._build_template().inputs
    declared = [] if inputs is None else [(p, False) for p in inputs.parameters or []]
    declared += [] if inputs is None else [(a, True) for a in inputs.artifacts or []]  # type: ignore[misc]
    return [InputSlot(entry.name.replace("-", "_"), entry.name, artifact, entry.name) for entry, artifact in declared]


@contextmanager
def _open_dag() -> Iterator[None]:
    piece = _context.pieces[-1] if _context.pieces else None
    if isinstance(piece, HasEntryDag):
        with piece.entry_dag():
            yield
    else:
        yield


def _open_contexts() -> list[Any]:
    """Hera's open contexts: the workflow first, the innermost DAG last."""
    return list(_context.pieces or [])


def _check_same_template(template: Any) -> None:
    """Refuse a second template of the same name: Hera would silently keep the first one."""
    for existing in getattr(_context.pieces[0], "templates", []) if _context.pieces else []:
        if existing.name == template.name and _as_template(existing) != _as_template(template):
            raise UsageError(
                f"two different steps are called {template.name!r} (upper case and '_' make no difference); "
                "give one of them name=…"
            )


def _as_template(template: Any) -> Template:
    built: Template = template if isinstance(template, Template) else template._build_template()
    return built


def _bind_arguments(
    step: str, slots: list[InputSlot], args: tuple[Any, ...], values: Mapping[str, Any]
) -> list[Parameter | Artifact]:
    if len(args) > len(slots):
        raise UsageError(f"step {step!r} takes {len(slots)} inputs, and {len(args)} were given")
    by_name = {slot.python_name: slot for slot in slots} | {slot.name: slot for slot in slots}
    pairs = list(zip(slots, args, strict=False))
    for name, value in values.items():
        if name not in by_name:
            names = [slot.python_name for slot in slots]
            raise UsageError(unknown_name_message(f"step {step!r}", "input", name, names))
        if by_name[name] in [slot for slot, _ in pairs]:
            raise UsageError(f"step {step!r}: input {name!r} is given twice")
        pairs.append((by_name[name], value))
    return [_argument(step, slot, value) for slot, value in pairs]


def _argument(step: str, slot: InputSlot, value: Any) -> Parameter | Artifact:
    if isinstance(value, Task):
        value = _task_output(step, slot, value)
    if isinstance(value, Artifact) != slot.artifact:
        kind = "artifact" if slot.artifact else "parameter"
        raise UsageError(
            f"step {step!r}: input {slot.python_name!r} is {'an' if slot.artifact else 'a'} {kind}; "
            f"pass a task, or one of its outputs (task.get_{kind}(…))"
        )
    if isinstance(value, Parameter | Artifact):
        return value.with_name(slot.name)
    return Parameter(name=slot.name, value=slot.write(step, value))


class StepTask(Task):
    """A task whose unknown outputs are refused with a list of those that there are."""

    def get_parameter(self, name: str) -> Parameter:
        """The output parameter ``name`` as an argument."""
        self._check_output("parameter", name)
        return super().get_parameter(name)

    def get_artifact(self, name: str) -> Artifact:
        """The output artifact ``name`` as an argument."""
        self._check_output("artifact", name)
        return super().get_artifact(name)

    def _check_output(self, kind: str, name: str) -> None:
        names = _output_names(self, kind)
        if name not in names:
            raise UsageError(unknown_name_message(f"task {self.name!r}", f"output {kind}", name, names))


def _output_names(task: Task, kind: str) -> list[str]:
    outputs = _as_template(task.template).outputs
    return [output.name for output in (getattr(outputs, f"{kind}s") if outputs else None) or []]


def _task_output(step: str, slot: InputSlot, task: Task) -> Parameter | Artifact:
    """The output of ``task`` for the input ``slot``: the output of the same name, or the only output."""
    kind = "artifact" if slot.artifact else "parameter"
    if not isinstance(task.template, Template | Templatable):
        raise UsageError(
            f"step {step!r}: task {task.name!r} has no template of its own, so its outputs are unknown; "
            "pass one by name"
        )
    names = _output_names(task, kind)
    if slot.artifact and (task.with_items or task.with_param or task.with_sequence):
        raise UsageError(
            f"step {step!r}: {task.name!r} is fanned out, and Argo cannot hand over the artifacts of all its items; "
            "declare an output parameter there, such as the key of the object that it wrote"
        )
    name = slot.output_name if slot.output_name in names else names[0] if len(names) == 1 else None
    if name is None:
        raise UsageError(
            f"step {step!r}: input {slot.python_name!r} needs one of the output {kind}s of {task.name!r}, "
            f"which are: {', '.join(names) or 'none'}; pass task.get_{kind}('…')"
        )
    return task.get_artifact(name) if slot.artifact else task.get_parameter(name)


def _write_items(step: str, slots: list[InputSlot], items: list[Any]) -> list[Any]:
    """The items with the texts of what JSON lacks.

    Raises:
        UsageError: the function could not read a value.
    """
    by_name = {slot.name: slot for slot in slots}
    return [_write_item(step, by_name, item) if isinstance(item, dict) else item for item in items]


def _write_item(step: str, slots: Mapping[str, InputSlot], item: Mapping[str, Any]) -> dict[str, Any]:
    texts = {name: slots[name].write(step, value) for name, value in item.items() if name in slots}
    return {
        name: value if isinstance(value, bool | int | float | list | dict) else texts.get(name, value)
        for name, value in item.items()
    }


def _item_arguments(slots: list[InputSlot], items: Any, arguments: list[Any]) -> list[Parameter]:
    """Arguments for inputs that are keys of the items. Hera passes the whole item to an input that is its only key."""
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        return []
    keys = {key for item in items for key in item}
    item_inputs = [slot.name for slot in slots if slot.name in keys - _argument_names(arguments)]
    return [Parameter(name=name, value=f"{{{{item.{name}}}}}") for name in item_inputs]


def _check_swept_once(step: str, item: Mapping[str, Any], arguments: list[Any]) -> None:
    if duplicates := sorted(item.keys() & _argument_names(arguments)):
        raise UsageError(f"step {step!r}: {duplicates[0]!r} is swept, and given a value, too; keep one")


def _argument_names(arguments: list[Any]) -> set[str]:
    return {name for argument in arguments for name in (argument if isinstance(argument, dict) else [argument.name])}


def as_list(given: Any) -> list[Any]:
    """What Hera takes as one value or several; None: nothing."""
    return list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
