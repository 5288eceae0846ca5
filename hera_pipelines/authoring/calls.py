"""Calling a step inside a pipeline as one calls a function: arguments find their inputs.

Hera takes ``arguments={…}`` and leaves the dependencies to the author. Here
``fit(data, lr=0.1)`` works too: a task that is passed stands for its output.
So does ``fit(data, sweep=grid(lr=[0.1, 0.01]), parallel=2)``.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, runtime_checkable

from hera.shared._type_util import construct_io_from_annotation
from hera.workflows import Artifact, Parameter, Task
from hera.workflows._context import _context
from hera.workflows.models import Template
from hera.workflows.protocol import Templatable

from hera_pipelines.sweeps import search as sweeps
from tiphys.errors import UsageError

TASK_OPTIONS = frozenset(
    (
        *("name", "arguments", "with_items", "with_param", "with_sequence", "when", "depends", "dependencies"),
        *("continue_on", "hooks", "on_exit", "template", "template_ref", "inline", "sweep", "parallel"),
    )
)
"""Keywords that are Hera's, and two of ours; an input of such a name is given by ``arguments={…}``."""


@runtime_checkable
class HasEntryDag(Protocol):
    """A workflow that makes its entry DAG itself when tasks are called directly in it."""

    def entry_dag(self) -> Any: ...


class Slot(NamedTuple):
    """One input of a template: how Python calls it, how Argo does, and of which kind it is."""

    python_name: str
    name: str
    artifact: bool


def invoke(template: Any, slots: list[Slot], call: Callable[..., Any], args: tuple[Any, ...], given: Any) -> Any:
    """Make the task of ``template`` in the DAG that is open, with ``args`` and ``given`` as its arguments.

    Args:
        template: The Hera template.
        slots: Its inputs, in order.
        call: Hera's own call, which takes Hera's own keywords.
        args: Positional arguments.
        given: Keyword arguments; Hera's among them.
    """
    options = {name: value for name, value in given.items() if name in TASK_OPTIONS}
    values = {name: value for name, value in given.items() if name not in TASK_OPTIONS}
    _check_same_template(template)
    sweep, parallel = options.pop("sweep", None), options.pop("parallel", None)
    if sweep is not None:
        inputs = {name: (slot.name, slot.artifact) for slot in slots for name in (slot.python_name, slot.name)}
        options["with_items"] = sweeps.items_of(template.name, sweep, options, inputs)
    arguments = [*_listed(options.get("arguments")), *_bind(template.name, slots, args, values)]
    if sweep is not None:
        _check_not_given(template.name, options["with_items"][0], arguments)
    arguments += _from_items(slots, options.get("with_items"), arguments)
    if arguments:
        options["arguments"] = arguments
    with _open_dag():
        task = call(**options)
        if sweep is not None:
            sweeps.describe(_open_pieces()[0], task.name, sweep)
        if parallel is not None:
            sweeps.limit(_open_pieces()[-1], template.name, parallel, options)
        return task


def function_slots(function: Callable[..., Any]) -> list[Slot]:
    """Inputs of a decorated function."""
    slots = []
    for name, parameter in inspect.signature(function).parameters.items():
        io = construct_io_from_annotation(name, parameter.annotation)
        if not io.output:
            slots.append(Slot(name, io.name or name, isinstance(io, Artifact)))
    return slots


def template_slots(template: Templatable) -> list[Slot]:
    """Inputs that a container declares: parameters first, then artifacts."""
    inputs = template._build_template().inputs
    declared = [] if inputs is None else [(p, False) for p in inputs.parameters or []]
    declared += [] if inputs is None else [(a, True) for a in inputs.artifacts or []]  # type: ignore[misc]
    return [Slot(entry.name.replace("-", "_"), entry.name, artifact) for entry, artifact in declared]


@contextmanager
def _open_dag() -> Iterator[None]:
    piece = _context.pieces[-1] if _context.pieces else None
    if isinstance(piece, HasEntryDag):
        with piece.entry_dag():
            yield
    else:
        yield


def _open_pieces() -> list[Any]:
    """What is open, the workflow first and the DAG last."""
    return list(_context.pieces or [])


def _check_same_template(template: Any) -> None:
    """Two steps of one name would silently become one: Hera keeps the first template."""
    for known in getattr(_context.pieces[0], "templates", []) if _context.pieces else []:
        if known.name == template.name and _built(known) != _built(template):
            raise UsageError(
                f"two different steps are called {template.name!r} (upper case and '_' make no difference); "
                "give one of them name=…"
            )


def _built(template: Any) -> Template:
    built: Template = template if isinstance(template, Template) else template._build_template()
    return built


def _bind(step: str, slots: list[Slot], args: tuple[Any, ...], values: Mapping[str, Any]) -> list[Parameter | Artifact]:
    if len(args) > len(slots):
        raise UsageError(f"step {step!r} takes {len(slots)} inputs, and {len(args)} were given")
    by_name = {slot.python_name: slot for slot in slots} | {slot.name: slot for slot in slots}
    pairs = list(zip(slots, args, strict=False))
    for name, value in values.items():
        if name not in by_name:
            known = ", ".join(slot.python_name for slot in slots) or "none"
            raise UsageError(f"step {step!r} has no input {name!r}; its inputs are: {known}")
        if by_name[name] in [slot for slot, _ in pairs]:
            raise UsageError(f"step {step!r}: input {name!r} is given twice")
        pairs.append((by_name[name], value))
    return [_argument(step, slot, value) for slot, value in pairs]


def _argument(step: str, slot: Slot, value: Any) -> Parameter | Artifact:
    if isinstance(value, Task):
        value = _output_of(step, slot, value)
    if isinstance(value, Artifact) != slot.artifact:
        wanted = "an artifact" if slot.artifact else "a parameter"
        raise UsageError(
            f"step {step!r}: input {slot.python_name!r} is {wanted}; "
            f"pass a task, or one of its outputs (task.get_{'artifact' if slot.artifact else 'parameter'}(…))"
        )
    if isinstance(value, Parameter | Artifact):
        return value.with_name(slot.name)
    return Parameter(name=slot.name, value=value)


def _output_of(step: str, slot: Slot, task: Task) -> Parameter | Artifact:
    """The output of ``task`` that ``slot`` wants: the one of the same name, or the only one."""
    kind = "artifacts" if slot.artifact else "parameters"
    if not isinstance(task.template, Template | Templatable):
        raise UsageError(f"step {step!r}: nothing is known of the outputs of task {task.name!r}; pass one by name")
    outputs = _built(task.template).outputs
    names = [output.name for output in (getattr(outputs, kind) if outputs else None) or []]
    if slot.artifact and (task.with_items or task.with_param or task.with_sequence):
        raise UsageError(
            f"step {step!r}: {task.name!r} is fanned out, and Argo cannot hand over the artifacts of all its items; "
            "declare an output parameter there, such as the key of what it wrote"
        )
    name = slot.name if slot.name in names else names[0] if len(names) == 1 else None
    if name is None:
        raise UsageError(
            f"step {step!r}: input {slot.python_name!r} wants one of the output {kind} of {task.name!r}, "
            f"which are: {', '.join(names) or 'none'}; pass task.get_{kind[:-1]}('…')"
        )
    return task.get_artifact(name) if slot.artifact else task.get_parameter(name)


def _from_items(slots: list[Slot], items: Any, arguments: list[Any]) -> list[Parameter]:
    """Inputs that are keys of the items. Hera would hand a whole item to an input that is its only key."""
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        return []
    keys = {key for item in items for key in item}
    wanted = [slot.name for slot in slots if slot.name in keys - _names_of(arguments)]
    return [Parameter(name=name, value=f"{{{{item.{name}}}}}") for name in wanted]


def _check_not_given(step: str, item: Mapping[str, Any], arguments: list[Any]) -> None:
    if twice := sorted(item.keys() & _names_of(arguments)):
        raise UsageError(f"step {step!r}: {twice[0]!r} is swept, and given a value, too; keep one")


def _names_of(arguments: list[Any]) -> set[str]:
    return {name for argument in arguments for name in (argument if isinstance(argument, dict) else [argument.name])}


def _listed(arguments: Any) -> list[Any]:
    if arguments is None:
        return []
    return list(arguments) if isinstance(arguments, list) else [arguments]
