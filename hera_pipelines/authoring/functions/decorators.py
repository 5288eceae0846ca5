"""`@step`, `@train` and `@plain`, in place of Hera's `@script`: a function becomes the script of a container."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import update_wrapper
from typing import Any, Generic, Never, ParamSpec, Protocol, TypeVar

from hera.workflows import Script
from hera.workflows._context import _context

from hera_pipelines.authoring.calls import (
    InputSlot,
    create_task,
    function_input_slots,
    require_image,
    separate_shared_inputs,
)
from hera_pipelines.authoring.functions.source import FunctionSource, returned_outputs, write_defaults
from hera_pipelines.authoring.functions.written_code import write_code
from hera_pipelines.authoring.policies import DEFAULT_CHECKPOINTS, Checkpoints, Duration, Retries
from hera_pipelines.authoring.step_options import StepOptions, TrainOptions
from hera_pipelines.authoring.tracking import Mlflow, Wandb
from hera_pipelines.compile.settings import DataSource, Spot, check_keywords, check_values
from tiphys.errors import UsageError
from tiphys.protocol.gang import GangBackend
from tiphys.protocol.step_spec import GPU_RESOURCE, STEP_ANNOTATION, Proximity

P = ParamSpec("P")
R = TypeVar("R")
OptionsT = TypeVar("OptionsT", bound=StepOptions)


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
        slots = _typed_slots(self.script) or function_input_slots(self.function, typed=False)
        return create_task(self.script, slots, self.script.__call__, args, kwargs)


def check_workflow_parameters(task: Any, values: Mapping[str, str]) -> None:
    """Refuse one of ``values``, of workflow parameters, that ``task`` gets as it is and could not read.

    Raises:
        UsageError: the function of the task could not read it.
    """
    slots = {slot.name: slot for slot in _typed_slots(task.template)}
    by_tag = {f"{{{{workflow.parameters.{name}}}}}": name for name in values}
    arguments = task._build_arguments() if slots else None
    for argument in (arguments.parameters if arguments else None) or []:
        parameter = by_tag.get(str(argument.value))
        if parameter is not None and argument.name in slots:
            slots[argument.name].write(task.template.name, values[parameter])


def _typed_slots(script: Any) -> list[InputSlot]:
    is_typed = isinstance(getattr(script, "constructor", None), FunctionSource) and callable(script.source)
    return function_input_slots(script.source) if is_typed else []


class StepDecorator(Protocol):
    """Makes a `StepFunction` of a function. A protocol, because mypy finds no types for an alias with a `ParamSpec`."""

    def __call__(self, function: Callable[P, R], /) -> StepFunction[P, R]: ...


def step(
    *bare: Never,
    cache: bool = True,
    share: bool = False,
    retries: Retries | None = None,
    grace: Duration | None = None,
    deadline: Duration | None = None,
    spot: bool | Spot = False,
    data: DataSource | Sequence[DataSource] = (),
    tracking: Mlflow | Wandb | None = None,
    gate: bool = False,
    **script: Any,
) -> StepDecorator:
    """Make a function a step whose result is recorded, so that a resumed run does not repeat it.

    Args:
        bare: Nothing; the decorator is written with parentheses, as Hera's ``@script()``.
        cache: False: the step runs in every submission, even if it has finished before.
        share: True: the step reuses the result of another run with the same program and inputs.
        retries: Retry budget of each cause of failure.
        grace: Time between SIGTERM and SIGKILL; None: 30 s, the default of Kubernetes.
        deadline: Longest run time of one attempt; None: no limit.
        spot: True: the step may run on spot nodes. A `Spot`: it runs only on those nodes.
        data: Data that the step reads and no step makes: `Dvc`, `Lakefs`, or a list of these. Its version at compile
            decides with program and inputs whether a finished result is reused.
        tracking: The service whose run of the step is the same in all attempts and submissions; None: none.
        gate: True: right before the step runs, Tiphys looks whether its result exists by now, for an expensive step
            whose result others may have made meanwhile. It costs seconds and four nodes. False: that is decided when
            the Workflow is submitted.
        **script: Arguments of Hera's ``@script``.
    """
    return _build_decorator(_collect(StepOptions, locals()), bare, script)


def train(
    *bare: Never,
    gpus: int = 0,
    gpu_resource: str = GPU_RESOURCE,
    gpu_type: str | Sequence[str] | None = None,
    speed: Mapping[str, float] | None = None,
    min_gpu_memory_mb: int | None = None,
    queue: str = "default",
    priority: int = 0,
    checkpoints: Checkpoints | None = DEFAULT_CHECKPOINTS,
    runtime_image: str | None = None,
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
) -> StepDecorator:
    """Make a function a training step: each attempt is admitted first, and resumes from the newest valid checkpoint.

    Args:
        bare: As in `step`.
        gpus: GPUs of each node, as torchrun and Slurm's ``--gpus-per-node`` count them. An attempt gets the GPUs of
            all its nodes or none. 0: the step uses no quota.
        gpu_resource: Resource of Kubernetes under which they are offered, such as ``amd.com/gpu`` or
            ``nvidia.com/mig-1g.10gb``. For another than the default, the queue has a quota of a flavor with this
            ``resource``, and ``gpu_type`` is that of the flavor.
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
        runtime_image: An image with tiphys, from which an init container brings the launcher and ``tiphys-exec`` with
            a Python of their own, for an image that lacks tiphys or Python. None: the image of the step has tiphys.
        nodes: Pods of one attempt, which train together: torchrun's ``--nnodes``. If one is lost, the others save
            where they can and end, and the next attempt resumes from the checkpoint. ``"2:4"``, for torchrun's c10d
            rendezvous: the attempt starts with as many as the queue has room for, at least 2, and continues without
            lost ones.
        within: Domain of the topology that all pods of an attempt must share: ``nvlink``, ``rack`` or ``block``. The
            queues must know the nodes. None: they are near each other where that is possible.
        tensor_parallel: Number of consecutive pods that form a group within one NVLink domain, where such a domain
            has several nodes. The queues must know the nodes.
        backend: Kind of object that creates the pods of several nodes: ``job``, an Indexed Job, needs only
            Kubernetes; ``jobset`` and ``trainjob`` need the controller of that name.
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
    options = _collect(TrainOptions, {**locals(), "gate": script.pop("gate", False)})  # refused, as in `Train`
    return _build_decorator(options, bare, script)


def plain(*bare: Never, **script: Any) -> StepDecorator:
    """Make a function a step that Argo runs without Tiphys: no record, and Argo's own retries.

    For short programs that may run again, such as a notification or a clean-up, and for thousands of small items. A
    resumed run repeats the step, unless everything that needs it is finished; its outputs are not verified. A `step`
    behind it runs again, too. A `train`, and a `step` with ``gate=True``, keeps its result if the parameters that it
    takes are the same. An artifact is written to a new place each time, so hand on a parameter, such as the key of an
    object.

    Args:
        bare: As in `step`.
        **script: Arguments of Hera's ``@script``.
    """
    return _build_decorator(None, bare, script)


def _collect(kind: type[OptionsT], arguments: Mapping[str, Any]) -> OptionsT:
    """The options that a decorator declares as its own keywords, from the values that it was given for them."""
    return kind(**{option.name: arguments[option.name] for option in fields(kind)})


def _build_decorator(options: StepOptions | None, bare: tuple[object, ...], arguments: dict[str, Any]) -> StepDecorator:
    """The decorator for ``options``; None: of a step that is not gated."""
    decorator = "@plain" if options is None else "@train" if isinstance(options, TrainOptions) else "@step"
    if bare:  # Python calls a decorator without parentheses with the function
        raise UsageError(
            f"{decorator} needs parentheses, and its options by name: write {decorator}() or {decorator}(image=…)"
        )
    names = [field.name for field in fields(options)] if options is not None else []
    known = [*names, *inspect.signature(Script).parameters]
    check_keywords(decorator, arguments, [name for name in known if name != "source"])
    check_values(decorator, {**(vars(options) if options is not None else {}), **arguments})

    def decorate(function: Callable[P, R]) -> StepFunction[P, R]:
        name = arguments.get("name") or function.__name__.replace("_", "-").lower()
        if isinstance(options, TrainOptions) or "image" in arguments:
            require_image(name, arguments.get("image"))
        _check_annotations(name, function)
        separate_shared_inputs(function)
        constructor = arguments.get("constructor") or FunctionSource()
        if isinstance(constructor, FunctionSource):
            constructor = FunctionSource(code=write_code(name, function, len(returned_outputs(function))))
            write_defaults(name, function)
        settings = {STEP_ANNOTATION: options.step_settings(name).model_dump_json()} if options is not None else {}
        annotations = {**(arguments.get("annotations") or {}), **settings} or None
        fixed = {"name": name, "source": function, "annotations": annotations, "constructor": constructor}
        return StepFunction(function, Script(**{**arguments, **fixed}))

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
