"""`@step` and `@train`: they stand where Hera's `@script` stood."""

import inspect
from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

from hera.workflows import Script
from hera.workflows._context import _context

from hera_pipelines.calls import function_slots, invoke
from hera_pipelines.compile.settings import Spot
from hera_pipelines.policies import Asked, Checkpoints, Duration, Retries
from hera_pipelines.source import FunctionSource, returned_outputs
from tiphys.errors import UsageError
from tiphys.protocol.gang import Backend
from tiphys.protocol.policy import STEP_ANNOTATION, Kind

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
