"""`@step`, `@train` and `@plain`: a decorated function becomes the script of a container, in place of Hera's `@script`.

Hera inlines the body of the function, where ``return`` is a syntax error and an
input artifact has no name. `FunctionSource` sends the whole function and a call
of it: input artifacts arrive as paths, and each returned value is written to the
output of its annotation, ``-> Annotated[dict, Artifact(name="data")]``. The
image needs Python, nothing else.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import update_wrapper
from typing import Annotated, Any, Generic, ParamSpec, TypeVar, get_args, get_origin

from hera.shared._type_util import construct_io_from_annotation, get_workflow_annotation
from hera.workflows import Artifact, InlineScriptConstructor, Script
from hera.workflows._context import _context
from hera.workflows.models import Template, ValueFrom

from hera_pipelines.authoring.calls import create_task, function_input_slots, require_image, separate_shared_inputs
from hera_pipelines.authoring.policies import DEFAULT_CHECKPOINTS, Checkpoints, Duration, Retries
from hera_pipelines.authoring.step_options import StepOptions, TrainOptions
from hera_pipelines.authoring.tracking import Mlflow, Wandb
from hera_pipelines.compile.settings import DataSource, Spot, check_keywords
from tiphys.errors import UsageError
from tiphys.protocol.environment import input_path_variable, output_path_variable
from tiphys.protocol.gang import GangBackend
from tiphys.protocol.step_spec import STEP_ANNOTATION, Proximity

_OUTPUT_FOLDER = "/tmp/tiphys/outputs"  # noqa: S108  a path in the container

# As Hera reads parameters whose type is not str: as JSON if the text is valid JSON, else as text.
_LOAD_FUNCTION = """
def _load(text):
    try:
        return json.loads(text)
    except ValueError:
        return text
"""

_SAVE_FUNCTION = """
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
    """The default constructor of `@step`, `@train` and `@plain`."""

    def generate_source(self, instance: Script) -> str:
        """The script: imports, the function, the call with its inputs, the outputs."""
        function = instance.source
        if not callable(function):
            raise UsageError(f"step {instance.name!r}: its source is not a function; use Step(…) or Train(…)")
        outputs = returned_outputs(function)
        parts = [
            "import json\nimport os\nimport pathlib\nimport shutil\nimport sys\nsys.path.append(os.getcwd())\n",
            _function_source(function),
            _SAVE_FUNCTION if outputs else "",
            _LOAD_FUNCTION,
            _call_source(function, outputs),
        ]
        return "\n".join(part.strip("\n") + "\n" for part in parts if part)

    def transform_template_post_build(self, instance: Script, template: Template) -> Template:
        """Set the paths of returned outputs to those that the script writes."""
        for artifact in (template.outputs.artifacts if template.outputs else None) or []:
            artifact.path = artifact.path or f"{_OUTPUT_FOLDER}/{artifact.name}"
        for parameter in (template.outputs.parameters if template.outputs else None) or []:
            parameter.value_from = parameter.value_from or ValueFrom(path=f"{_OUTPUT_FOLDER}/{parameter.name}")
        return super().transform_template_post_build(instance, template)


def _function_source(function: Callable[..., Any]) -> str:
    """Source of ``function`` without decorators, annotations and defaults: their names exist only in its own file."""
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


def _call_source(function: Callable[..., Any], outputs: list[tuple[str, str]]) -> str:
    call = f"{function.__name__}({', '.join(_call_arguments(function))})"
    if not outputs:
        return call
    values = [f"result[{index}]" for index in range(len(outputs))] if len(outputs) > 1 else ["result"]
    writes = [
        f"_keep({output_path_variable(name)!r}, {path!r}, {value})"
        for (name, path), value in zip(outputs, values, strict=True)
    ]
    return "\n".join([f"result = {call}", *writes])


def _call_arguments(function: Callable[..., Any]) -> Iterator[str]:
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
            text = _parameter_placeholder(name)
            value = text if _is_text(parameter.annotation) else f"_load({text})"
        yield value if parameter.kind is inspect.Parameter.POSITIONAL_ONLY else f"{python_name}={value}"


def _parameter_placeholder(parameter: str) -> str:
    """An Argo tag that becomes a Python string literal. A JSON string is one, also with quotes in the value."""
    return f"{{{{=toJson(inputs.parameters['{parameter}'])}}}}"


def _is_text(annotation: Any) -> bool:
    return annotation is str or (get_origin(annotation) is Annotated and get_args(annotation)[0] is str)


def returned_outputs(function: Callable[..., Any]) -> list[tuple[str, str]]:
    """Name and path of each output that the return annotation declares, in its order.

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
    return [(str(io.name), _declared_path(io) or f"{_OUTPUT_FOLDER}/{io.name}") for io in declared if io is not None]


def _declared_path(io: Any) -> str | None:
    path: str | None = io.path if isinstance(io, Artifact) else io.value_from.path if io.value_from else None
    return path


P = ParamSpec("P")
R = TypeVar("R")


class StepFunction(Generic[P, R]):
    """A decorated function: a call inside a pipeline creates a task, any other call runs the function."""

    def __init__(self, function: Callable[P, R], script: Script) -> None:
        update_wrapper(self, function)
        self.function = function
        self.script = script

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return a Task inside ``with Pipeline(…)``, and the result of the function elsewhere."""
        if not _context.active:
            return self.function(*args, **kwargs)
        return create_task(self.script, function_input_slots(self.function), self.script.__call__, args, kwargs)


StepDecorator = Callable[[Callable[P, R]], StepFunction[P, R]]


def step(
    *,
    cache: bool = True,
    share: bool = False,
    retries: Retries | None = None,
    grace: Duration | None = None,
    deadline: Duration | None = None,
    spot: bool | Spot = False,
    data: DataSource | Sequence[DataSource] = (),
    tracking: Mlflow | Wandb | None = None,
    **script: Any,
) -> StepDecorator[P, R]:
    """Make a function a step whose result is recorded, so that a resumed run does not repeat it.

    Args:
        cache: False: the step runs in every submission, even if it has finished before.
        share: True: the step reuses the result of another run with the same program and inputs.
        retries: Retry budget of each cause of failure.
        grace: Time between SIGTERM and SIGKILL; None: 30 s, the default of Kubernetes.
        deadline: Longest run time of one attempt; None: no limit.
        spot: True: the step may run on spot nodes. A `Spot`: it runs only on those nodes.
        data: Data that the step reads and no step makes: `Dvc`, `Lakefs`, or a list of these. Its version at compile
            decides with program and inputs whether a finished result is reused.
        tracking: The service whose run of the step is the same in all attempts and submissions; None: none.
        **script: Arguments of Hera's ``@script``.
    """
    options = StepOptions(
        cache=cache,
        share=share,
        retries=retries,
        grace=grace,
        deadline=deadline,
        spot=spot,
        data=data,
        tracking=tracking,
    )
    return _build_decorator(options, script)


def train(
    *,
    gpus: int = 0,
    gpu_type: str | Sequence[str] | None = None,
    speed: Mapping[str, float] | None = None,
    min_gpu_memory_mb: int | None = None,
    queue: str = "default",
    priority: int = 0,
    checkpoints: Checkpoints | None = DEFAULT_CHECKPOINTS,
    nodes: int | str = 1,
    within: Proximity | None = None,
    tensor_parallel: int = 1,
    backend: GangBackend | str = GangBackend.JOB,
    cache: bool = True,
    share: bool = False,
    retries: Retries | None = None,
    grace: Duration | None = None,
    deadline: Duration | None = None,
    spot: bool | Spot = False,
    data: DataSource | Sequence[DataSource] = (),
    tracking: Mlflow | Wandb | None = None,
    **script: Any,
) -> StepDecorator[P, R]:
    """Make a function a training step: each attempt is admitted first, and resumes from the newest valid checkpoint.

    Args:
        gpus: GPUs of each node, as torchrun and Slurm's ``--gpus-per-node`` count them. An attempt gets the GPUs of
            all its nodes or none. 0: the step uses no quota.
        gpu_type: Value of the node label ``nvidia.com/gpu.product``; several: any of them, the preferred one first,
            from a queue with quotas for them; None or ``any``: any.
        speed: How fast the step trains on each of several types, such as ``{"H100": 2.5, "A100": 1}``: of those with
            room it gets the fastest. Only ratios count; a type that is not named has 1. None: as ``gpu_type``.
        min_gpu_memory_mb: Least memory of one GPU in MB, as in ``nvidia.com/gpu.memory``; None: any.
        queue: Queue whose quota the step uses.
        priority: Priority within the queue; higher is served first.
        checkpoints: When to save and what to keep, every 10 minutes and the newest 3 by default. The program commits
            them with `tiphys.checkpoint.session` or under ``tiphys-exec``. None: it keeps none, and each attempt
            starts from the beginning.
        nodes: Pods of one attempt, which train together: torchrun's ``--nnodes``. If one is lost, the others save
            where they can and end, and the next attempt resumes from the checkpoint. ``"2:4"``, for torchrun's c10d
            rendezvous: the attempt starts with as many as the queue has room for, at least 2, and continues without
            lost ones.
        within: Domain of the topology that all pods of an attempt must share: ``nvlink``, ``rack`` or ``block``. The
            queues must know the nodes. None: they are near each other where that is possible.
        tensor_parallel: Number of consecutive pods that form a group within one NVLink domain, where such a domain
            has several nodes. The queues must know the nodes.
        backend: Kind of object that creates the pods of several nodes: ``job``, an Indexed Job, needs only
            Kubernetes; ``jobset``, ``pytorchjob`` and ``trainjob`` need the controller of that name.
        cache: As in `step`.
        share: As in `step`.
        retries: Retry budget of each cause of failure.
        grace: Time to save after SIGTERM; at least the duration of one save.
        deadline: As in `step`.
        spot: As in `step`.
        data: As in `step`.
        tracking: As in `step`.
        **script: Arguments of Hera's ``@script``.
    """
    options = TrainOptions(
        gpus=gpus,
        gpu_type=gpu_type,
        speed=speed,
        min_gpu_memory_mb=min_gpu_memory_mb,
        queue=queue,
        priority=priority,
        checkpoints=checkpoints,
        nodes=nodes,
        within=within,
        tensor_parallel=tensor_parallel,
        backend=backend,
        cache=cache,
        share=share,
        retries=retries,
        grace=grace,
        deadline=deadline,
        spot=spot,
        data=data,
        tracking=tracking,
    )
    return _build_decorator(options, script)


def plain(**script: Any) -> StepDecorator[P, R]:
    """Make a function a step that Argo runs without Tiphys: one node, no record, Argo's own retries.

    For short programs that may run again, such as a notification or a clean-up, and for thousands of small items. A
    resumed run repeats the step, unless everything that needs it is finished; its outputs are not verified. A `step`
    behind it keeps its result if the parameters that it takes are the same. An artifact is written to a new place each
    time, so a step that takes one runs again: hand on a parameter, such as the key of an object.

    Args:
        **script: Arguments of Hera's ``@script``.
    """
    return _build_decorator(None, script)


def _build_decorator(options: StepOptions | None, arguments: dict[str, Any]) -> StepDecorator[P, R]:
    """The decorator for ``options``; None: of a step that is not gated."""
    decorator = "@plain" if options is None else "@train" if isinstance(options, TrainOptions) else "@step"
    names = [field.name for field in fields(options)] if options is not None else []
    known = [*names, *inspect.signature(Script).parameters]
    check_keywords(decorator, arguments, [name for name in known if name != "source"])

    def decorate(function: Callable[P, R]) -> StepFunction[P, R]:
        name = arguments.get("name") or function.__name__.replace("_", "-").lower()
        if isinstance(options, TrainOptions) or "image" in arguments:
            require_image(name, arguments.get("image"))
        _check_annotations(name, function)
        separate_shared_inputs(function)
        returned_outputs(function)
        settings = {STEP_ANNOTATION: options.step_settings(name).model_dump_json()} if options is not None else {}
        annotations = {**(arguments.get("annotations") or {}), **settings} or None
        fixed_arguments = {"name": name, "source": function, "annotations": annotations}
        return StepFunction(function, Script(**{"constructor": FunctionSource(), **arguments, **fixed_arguments}))

    return decorate


def _check_annotations(step: str, function: Callable[..., Any]) -> None:
    """Refuse annotations that are strings: Hera reads them as objects and would ignore strings silently."""
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
