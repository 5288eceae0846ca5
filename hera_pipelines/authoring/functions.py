"""A decorated function as the script of a container.

Hera inlines the body of the function, where ``return`` is a syntax error and an
input artifact has no name. Here the function itself is sent and called: input
artifacts arrive as paths, and what it returns is written where its return
annotation says, ``-> Annotated[dict, Artifact(name="data")]``. The image needs
Python, nothing else.

`@step` and `@train`: they stand where Hera's `@script` stood.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import update_wrapper
from typing import Annotated, Any, Generic, ParamSpec, TypeVar, get_args, get_origin

from hera.shared._type_util import construct_io_from_annotation, get_workflow_annotation
from hera.workflows import Artifact, InlineScriptConstructor, Script
from hera.workflows._context import _context
from hera.workflows.models import Template, ValueFrom

from hera_pipelines.authoring.calls import function_slots, invoke
from hera_pipelines.authoring.policies import Asked, Checkpoints, Duration, Retries
from hera_pipelines.compile.settings import Spot
from tiphys.errors import UsageError
from tiphys.protocol.environment import input_path_variable, output_path_variable
from tiphys.protocol.gang import Backend
from tiphys.protocol.step_spec import STEP_ANNOTATION, Kind

_OUTPUTS = "/tmp/tiphys/outputs"  # noqa: S108  a path in the container

# As Hera reads parameters that are no str: JSON where it is, text where it is not.
_LOAD = """
def _load(text):
    try:
        return json.loads(text)
    except ValueError:
        return text
"""

_KEEP = """
def _keep(variable, path, value):
    target = pathlib.Path(os.environ.get(variable, path))
    target.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(value, os.PathLike):
        source = pathlib.Path(value)
        if source.resolve() != target.resolve():
            shutil.copytree(source, target) if source.is_dir() else shutil.copyfile(source, target)
    elif isinstance(value, bytes):
        target.write_bytes(value)
    else:
        target.write_text(value if isinstance(value, str) else json.dumps(value))
"""


@dataclass(kw_only=True)
class FunctionSource(InlineScriptConstructor):
    """The default constructor of `@step` and `@train`."""

    def generate_source(self, instance: Script) -> str:
        """The script: imports, the function, its inputs, the call, its outputs."""
        function = instance.source
        if not callable(function):
            raise UsageError(f"step {instance.name!r}: its source is not a function; use Step(…) or Train(…)")
        returned = returned_outputs(function)
        parts = [
            "import json\nimport os\nimport pathlib\nimport shutil\nimport sys\nsys.path.append(os.getcwd())\n",
            _definition(function),
            _KEEP if returned else "",
            _LOAD,
            _call(function, returned),
        ]
        return "\n".join(part.strip("\n") + "\n" for part in parts if part)

    def transform_template_post_build(self, instance: Script, template: Template) -> Template:
        """Give returned outputs the path that the script writes them to."""
        for artifact in (template.outputs.artifacts if template.outputs else None) or []:
            artifact.path = artifact.path or f"{_OUTPUTS}/{artifact.name}"
        for parameter in (template.outputs.parameters if template.outputs else None) or []:
            parameter.value_from = parameter.value_from or ValueFrom(path=f"{_OUTPUTS}/{parameter.name}")
        return super().transform_template_post_build(instance, template)


def _definition(function: Callable[..., Any]) -> str:
    """The function without what only its own file could understand: decorators, annotations, defaults."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        raise UsageError(f"step {function.__name__!r}: only plain functions can be steps; write `def`")
    definition.decorator_list, definition.returns = [], None
    arguments = definition.args
    arguments.defaults, arguments.kw_defaults = [], [None] * len(arguments.kwonlyargs)
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        argument.annotation = None
    return ast.unparse(tree)


def _call(function: Callable[..., Any], returned: list[tuple[str, str]]) -> str:
    call = f"{function.__name__}({', '.join(_arguments(function))})"
    if not returned:
        return call
    values = [f"result[{index}]" for index in range(len(returned))] if len(returned) > 1 else ["result"]
    kept = [
        f"_keep({output_path_variable(name)!r}, {path!r}, {value})"
        for (name, path), value in zip(returned, values, strict=True)
    ]
    return "\n".join([f"result = {call}", *kept])


def _arguments(function: Callable[..., Any]) -> Iterator[str]:
    for python_name, parameter in inspect.signature(function).parameters.items():
        io = construct_io_from_annotation(python_name, parameter.annotation)
        name = io.name or python_name
        if io.output:
            path = _path(io) or f"{_OUTPUTS}/{name}"
            value = f"pathlib.Path(os.environ.get({output_path_variable(name)!r}, {path!r}))"
        elif isinstance(io, Artifact):
            path = io.path or io._get_default_inputs_path()
            value = f"pathlib.Path(os.environ.get({input_path_variable(name)!r}, {path!r}))"
        else:
            text = _literal(name)
            value = text if _is_text(parameter.annotation) else f"_load({text})"
        yield value if parameter.kind is inspect.Parameter.POSITIONAL_ONLY else f"{python_name}={value}"


def _literal(parameter: str) -> str:
    """Python's literal for the value of an input parameter, whatever quotes it holds: that of JSON."""
    return f"{{{{=toJson(inputs.parameters['{parameter}'])}}}}"


def _is_text(annotation: Any) -> bool:
    return annotation is str or (get_origin(annotation) is Annotated and get_args(annotation)[0] is str)


def returned_outputs(function: Callable[..., Any]) -> list[tuple[str, str]]:
    """Name and path of each output that the return annotation declares, in its order.

    Raises:
        UsageError: it declares some of the returned values only, or one without a name.
    """
    annotation = inspect.signature(function).return_annotation
    parts = get_args(annotation) if get_origin(annotation) is tuple else (annotation,)
    declared = [get_workflow_annotation(part) for part in parts]
    if not any(declared):
        return []
    if not all(io is not None and io.name for io in declared):
        raise UsageError(
            f"function {function.__name__!r}: each value that it returns needs a name; write "
            "-> Annotated[str, Artifact(name=…)], or a tuple of such"
        )
    return [(str(io.name), _path(io) or f"{_OUTPUTS}/{io.name}") for io in declared if io is not None]


def _path(io: Any) -> str | None:
    path: str | None = io.path if isinstance(io, Artifact) else io.value_from.path if io.value_from else None
    return path


P = ParamSpec("P")
R = TypeVar("R")


class StepFunction(Generic[P, R]):
    """A function that is a task inside a pipeline, and itself everywhere else."""

    def __init__(self, function: Callable[P, R], script: Script) -> None:
        update_wrapper(self, function)
        self.function = function
        self.script = script

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Inside ``with Pipeline(…)`` a Task; outside, what the function returns."""
        if not _context.active:
            return self.function(*args, **kwargs)
        return invoke(self.script, function_slots(self.function), self.script.__call__, args, kwargs)


Decorator = Callable[[Callable[P, R]], StepFunction[P, R]]


def step(
    *,
    cache: bool = True,
    share: bool = False,
    retries: Retries | None = None,
    grace: Duration | None = None,
    deadline: Duration | None = None,
    spot: bool | Spot = False,
    **script: Any,
) -> Decorator[P, R]:
    """A step whose result is worth keeping: it is recorded, and a resumed run does not repeat it.

    Args:
        cache: False: it runs in every submission, finished or not.
        share: True: a result that another run made from the same program and inputs is taken over.
        retries: Which ends are worth another try.
        grace: Time between SIGTERM and SIGKILL; Kubernetes gives 30 s.
        deadline: Longest time one attempt may run.
        spot: It may run on spot nodes; a `Spot` says on which only.
        **script: Hera's own arguments of ``@script``.
    """
    asked = Asked(Kind.STEP, cache, share, retries, grace, deadline, spot)
    return _decorator(asked, script)


def train(
    *,
    gpus: int = 0,
    gpu_type: str | None = None,
    min_gpu_memory_mb: int | None = None,
    queue: str = "default",
    priority: int = 0,
    checkpoints: Checkpoints | None = None,
    nodes: int | str = 1,
    backend: Backend | str = Backend.JOB,
    cache: bool = True,
    share: bool = False,
    retries: Retries | None = None,
    grace: Duration | None = None,
    deadline: Duration | None = None,
    spot: bool | Spot = False,
    **script: Any,
) -> Decorator[P, R]:
    """A training step: attempts that repeat through admission, each from the newest valid checkpoint.

    Args:
        gpus: GPUs of each node, as torchrun and Slurm's ``--gpus-per-node`` count them; an attempt gets those of
            all its nodes or none. 0: it waits for no quota.
        gpu_type: Value of the node label ``nvidia.com/gpu.product``.
        min_gpu_memory_mb: Least memory of one GPU, as in ``nvidia.com/gpu.memory``.
        queue: Queue whose quota it uses.
        priority: Higher goes first within the queue.
        checkpoints: When to save and what to keep; None: it starts over each time.
        nodes: Pods of one attempt, which train together: torchrun's ``--nnodes``. If one is lost, all save if they
            can and end, and the next attempt goes on from the checkpoint. ``"2:4"``, for torchrun's c10d rendezvous:
            it starts with as many as find room, at least 2, and goes on without those that are lost.
        backend: What makes the pods of several nodes: ``job``, an Indexed Job, needs nothing but Kubernetes;
            ``jobset``, ``pytorchjob`` and ``trainjob`` need the controller of that name.
        cache: As in `step`.
        share: As in `step`.
        retries: Attempts that each cause may cost.
        grace: Time to save after SIGTERM; at least one save's time.
        deadline: Longest time one attempt may run.
        spot: It may run on spot nodes; a `Spot` says on which only.
        **script: Hera's own arguments of ``@script``.
    """
    asked = Asked(
        Kind.TRAIN,
        cache,
        share,
        retries,
        grace,
        deadline,
        spot,
        gpus,
        gpu_type,
        min_gpu_memory_mb,
        queue,
        priority,
        checkpoints,
        nodes,
        backend,
    )
    return _decorator(asked, script)


def _decorator(asked: Asked, arguments: dict[str, Any]) -> Decorator[P, R]:
    def decorate(function: Callable[P, R]) -> StepFunction[P, R]:
        name = arguments.get("name") or function.__name__.replace("_", "-").lower()
        _check_annotations(name, function)
        returned_outputs(function)
        annotations = {
            **(arguments.get("annotations") or {}),
            STEP_ANNOTATION: asked.settings(name).model_dump_json(),
        }
        own = {"name": name, "source": function, "annotations": annotations}
        return StepFunction(function, Script(**{"constructor": FunctionSource(), **arguments, **own}))

    return decorate


def _check_annotations(step: str, function: Callable[..., Any]) -> None:
    """Hera reads annotations as objects; as strings they would be lost without a word."""
    signature = inspect.signature(function)
    annotations = {p.name: p.annotation for p in signature.parameters.values()} | {
        "return": signature.return_annotation
    }
    texts = [name for name, annotation in annotations.items() if isinstance(annotation, str)]
    if texts:
        raise UsageError(
            f"step {step!r}: the annotation of {texts[0]!r} is a string, which Hera cannot read; "
            "remove `from __future__ import annotations` from its file"
        )
