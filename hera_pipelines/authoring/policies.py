"""The policies of a step or pipeline as authors write them, and their way into validated models.

Authors write durations such as ``10m`` and quantities such as ``64Gi``. Each
class here turns them into the model of `tiphys.protocol` that plugin, controller
and trainer read, so that a mistake is a `UsageError` before anything runs.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from hera_pipelines.compile.settings import SharedVolume, refuse_unknown_keywords
from tiphys.checkpoint.settings import AUTO_BOUNDS, IntervalBounds
from tiphys.checkpoint.telemetry.metrics import MetricsEndpoint
from tiphys.errors import UsageError
from tiphys.protocol.auto_resume_policy import TRANSIENT_CAUSES, AutoResumePolicy
from tiphys.protocol.drift_policy import DriftPolicy, override_drift_actions
from tiphys.protocol.quantities import parse_duration_seconds, parse_memory_bytes
from tiphys.protocol.step_spec import (
    DELETE_AFTER_SECONDS,
    CheckpointPolicy,
    RetryPolicy,
    WhenBusy,
    parse_keep_best,
    parse_keep_every,
)
from tiphys.records import Cause, TriggerSpec

ModelT = TypeVar("ModelT", bound=BaseModel)

Duration = str | int | float
"""``90s``, ``10m``, ``1h30m``, or a number of seconds."""


@refuse_unknown_keywords
@dataclass(frozen=True)
class Retries:
    """Retry budget of each cause of failure, and what changes for the next attempt. None: no limit.

    In a training step every cause has its own budget, a committed checkpoint
    refunds all budgets, and `tiphys resume` starts with full ones. In a plain
    step Argo repeats the container and counts all causes together: it never
    retries a cause with budget 0, and the sum of the others is the limit.
    docs/failures.md lists causes and remedies.
    """

    preemption: int | None = None
    infrastructure: int | None = 10
    out_of_memory: int | None = 1
    deadline: int | None = 0
    user_error: int | None = 0
    output_missing: int | None = 0
    unknown: int | None = 2
    gpu_out_of_memory: int | Literal["user_error"] | None = "user_error"
    """The budget of ``user_error``; give a number where the program follows `tiphys.checkpoint.batch_scale`."""
    hang: int | None = 3
    image: int | None = 2
    storage: int | Literal["infrastructure"] | None = "infrastructure"
    memory_ceiling: str | None = None
    """Such as ``64Gi``: after an out-of-memory failure the next attempt gets more memory, up to this. None: never."""
    memory_factor: float = 1.5
    """Memory of the next attempt, relative to the one that had too little."""
    on_demand_after: int | None = None
    """After so many preemptions in a row without a checkpoint, and on the last try, attempts avoid spot nodes."""
    avoid_node_after: int | None = 2
    """After so many failures that one node has caused, attempts avoid it where there is another."""
    in_place: bool = True
    """Whether a training that died after a checkpoint is started again in its pod, at once. False: in a new pod."""
    spare: bool | None = None
    """Whether a process that has imported what the program imports waits in the pod to take its place. None: where the
    pod's memory has room for it."""
    backoff: Duration = "5s"
    """Wait before the second attempt; after a preemption or a failure of the infrastructure, only before the third."""
    backoff_factor: int = 2
    backoff_cap: Duration = "5m"

    def policy(self) -> RetryPolicy:
        """The policy that the plugin reads.

        Raises:
            UsageError: a value is not valid.
        """
        shared_fields = {name: getattr(self, name) for name in _SHARED_FIELDS}
        ceiling = self.memory_ceiling
        return build_model(
            RetryPolicy,
            "Retries",
            **shared_fields,
            memory_ceiling_bytes=None if ceiling is None else parse_memory_bytes(ceiling, "Retries(memory_ceiling=…)"),
            backoff_seconds=resolve_duration(self.backoff, "Retries(backoff=…)"),
            backoff_factor=self.backoff_factor,
            backoff_cap_seconds=resolve_duration(self.backoff_cap, "Retries(backoff_cap=…)"),
        )


_SHARED_FIELDS = (
    *(cause.value for cause in Cause),
    "memory_factor",
    "on_demand_after",
    "avoid_node_after",
    "in_place",
    "spare",
)
"""Fields of the same name in `Retries` and `RetryPolicy`."""


@refuse_unknown_keywords
@dataclass(frozen=True)
class Checkpoints:
    """When a training step saves, and which checkpoints retention keeps.

    Attributes:
        every: A duration, a number of optimizer steps such as ``100 steps``, or ``auto``: the interval that measured
            save costs and failures make cheapest, between one minute and one hour; ``auto:1m..30m`` sets other bounds.
        keep_last: How many of the newest checkpoints to keep; None: all.
        keep_every: Also keep one checkpoint per so many global steps, without end: ``1000 steps``.
        keep_best: Also keep the best checkpoints by a metric: ``loss:min:2``, ``accuracy:max``.
        delete_after: How long an expired checkpoint stays before it is deleted.
        save_time: Duration of one save; ``grace`` must not be shorter.
        volume: Volume for the checkpoints; None: the run store.
        metrics: Where the training loop exposes its metrics: ``port:9464`` or ``port:127.0.0.1:9464``; empty: nowhere.
        asynchronous: Whether saves run beside the training; False where memory has no room for a copy of the state.
        when_busy: How a due save proceeds while another is running: ``skip`` postpones it to the next step,
            ``wait`` blocks the training, ``queue`` takes memory for one more copy. None: ``wait`` where ``every``
            counts steps, so that saves are at those steps, else ``skip``.
        hang_after: Longest time without a completed step, such as ``30m``; then the attempt is ended and retried.
            It must exceed everything else between two steps, such as an evaluation. Where steps are long, the limit
            is ten times the longest of the last hundred steps. None: no limit.
        cache: Folder that the pods of a node share, such as a mounted host path. A checkpoint that one pod has saved
            or read stays there for the others. Empty: none.
        near_copy: Whether the copy of the state that a save is made from outlives the program in the memory of its
            pod, where that has room, so that a restart in the pod need not read the store. False: it does not.
    """

    every: Duration = "10m"
    keep_last: int | None = 3
    keep_every: str | int | None = None
    keep_best: str | None = None
    delete_after: Duration = DELETE_AFTER_SECONDS
    save_time: Duration = 0
    volume: SharedVolume | None = None
    metrics: str = ""
    asynchronous: bool = True
    when_busy: WhenBusy | None = None
    hang_after: Duration | None = None
    cache: str = ""
    near_copy: bool = True

    def policy(self) -> CheckpointPolicy:
        """The policy that trainer and plugin read.

        Raises:
            UsageError: a value is not valid.
        """
        every, unit, bounds = _parse_every(self.every)
        if self.keep_last is None and (self.keep_every or self.keep_best):
            raise UsageError(
                "Checkpoints: keep_last=None keeps all checkpoints, so keep_every and keep_best have no effect; "
                "give a number to keep_last, or leave them out"
            )
        return build_model(
            CheckpointPolicy,
            "Checkpoints",
            every=every,
            every_unit=unit,
            every_bounds=bounds,
            keep_last=self.keep_last,
            keep_every=_parse_keep_every(self.keep_every),
            keep_best=None if self.keep_best is None else parse_keep_best(self.keep_best, "Checkpoints(keep_best=…): "),
            delete_after_seconds=resolve_duration(self.delete_after, "Checkpoints(delete_after=…)"),
            save_seconds=resolve_duration(self.save_time, "Checkpoints(save_time=…)"),
            metrics=_validate_metrics(self.metrics),
            asynchronous=self.asynchronous,
            when_busy=self.when_busy,
            hang_after_seconds=(
                None if self.hang_after is None else resolve_duration(self.hang_after, "Checkpoints(hang_after=…)")
            ),
            cache=self.cache,
            near_copy=self.near_copy,
        )


DEFAULT_CHECKPOINTS = Checkpoints()
"""Those of a training that names none: a training that keeps nothing says so, with ``checkpoints=None``."""


@refuse_unknown_keywords
@dataclass(frozen=True)
class AutoResume:
    """Automatic resume of a run after a failure from outside, or after its Workflow was deleted.

    The controller does not resume a run that a person has stopped, or that its
    own program has failed. It must run in the cluster; see docs/auto-resume.md.

    Attributes:
        max_without_progress: How many resumes in a row may end without a new checkpoint or a newly finished step.
        cooldown: Wait after the first resume without progress; it doubles with each further one. After progress
            there is no wait.
        cooldown_cap: Longest of these waits.
        retry_after: Wait after ``max_without_progress`` is exceeded; it doubles each time. None: no further
            automatic resume.
        causes: Causes of failure to resume after, such as ``("preemption",)``; None: preemption, infrastructure,
            storage, hang and unknown.
    """

    max_without_progress: int = 2
    cooldown: Duration = "1m"
    cooldown_cap: Duration = "1h"
    retry_after: Duration | None = "6h"
    causes: tuple[str, ...] | None = None

    def policy(self) -> AutoResumePolicy:
        """The policy that the controller reads.

        Raises:
            UsageError: a value is not valid.
        """
        return build_model(
            AutoResumePolicy,
            "AutoResume",
            max_without_progress=self.max_without_progress,
            cooldown_seconds=resolve_duration(self.cooldown, "AutoResume(cooldown=…)"),
            cooldown_cap_seconds=resolve_duration(self.cooldown_cap, "AutoResume(cooldown_cap=…)"),
            retry_after_seconds=(
                None if self.retry_after is None else resolve_duration(self.retry_after, "AutoResume(retry_after=…)")
            ),
            causes=TRANSIENT_CAUSES if self.causes is None else self.causes,
        )


@refuse_unknown_keywords
@dataclass(frozen=True)
class ObjectTrigger:
    """Starts a run for each object that arrives in a bucket, once; see docs/triggers.md.

    It takes effect in a WorkflowTemplate (``tiphys compile --as workflowtemplate``).

    Attributes:
        objects: ``s3://bucket/prefix/``; the administrator of the controller must allow it.
        pattern: Shell pattern for the part of the key behind the prefix, such as ``*.parquet``.
        parameters: Parameters of the run, each with the field of the object that it gets: ``url``, ``bucket``,
            ``key``, ``name``, ``etag``, ``size`` or ``modified``.
        since: Objects that were last modified before this time start nothing; None: before the template was created.
        resume: Name of a run to resume, in place of a new run.
    """

    objects: str
    pattern: str = "*"
    parameters: Mapping[str, str] = field(default_factory=dict)
    since: datetime | None = None
    resume: str = ""

    def spec(self) -> TriggerSpec:
        """The trigger that the controller reads.

        Raises:
            UsageError: a value is not valid.
        """
        return build_model(TriggerSpec, "ObjectTrigger", **vars(self))


class IntervalSetting(NamedTuple):
    every: float
    unit: Literal["seconds", "steps"]
    bounds: tuple[float, float] | None = None


def resolve_duration(value: Duration, where: str) -> float:
    """Convert ``value`` to seconds; ``where`` begins the error message.

    Raises:
        UsageError: ``value`` is not a duration.
    """
    if isinstance(value, int | float):
        return float(value)
    try:
        return parse_duration_seconds(value)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def _parse_every(value: Duration) -> IntervalSetting:
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+)\s*steps?\s*", value)):
        return IntervalSetting(float(match[1]), "steps")
    if isinstance(value, str) and (match := re.fullmatch(r"\s*auto(?::((?:[^.\s]|\.(?!\.))+)\.\.(\S+))?\s*", value)):
        return _parse_auto_interval(value, match)
    where = "Checkpoints(every=…), which also takes '100 steps' and 'auto'"
    return IntervalSetting(resolve_duration(value, where), "seconds")


def _parse_auto_interval(value: str, match: re.Match[str]) -> IntervalSetting:
    where = "Checkpoints(every='auto:lowest..highest')"
    bounds = (
        AUTO_BOUNDS
        if match[1] is None
        else IntervalBounds(resolve_duration(match[1], where), resolve_duration(match[2], where))
    )
    if not 0 < bounds.lowest_seconds <= bounds.highest_seconds:
        raise UsageError(f"{where}: {value!r} leaves nothing between its bounds; the lower one comes first, above 0")
    return IntervalSetting(bounds.initial_seconds, "seconds", (bounds.lowest_seconds, bounds.highest_seconds))


def _parse_keep_every(value: str | int | None) -> int | None:
    return parse_keep_every(value, "Checkpoints(keep_every=…): ") if isinstance(value, str) else value


def _validate_metrics(text: str) -> str:
    if text:
        MetricsEndpoint.parse(text, "Checkpoints(metrics=…): ")
    return text


def build_model(model: type[ModelT], where: str, **values: Any) -> ModelT:
    try:
        return model(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{where}: {name} cannot be {first['input']!r}: {first['msg']}") from error


DriftActionName = Literal["allow", "warn", "fork", "refuse"]


@refuse_unknown_keywords
@dataclass(frozen=True)
class Drift:
    """How `tiphys resume RUN PIPELINE.py` and `tiphys fork` treat each kind of change; see docs/resuming.md.

    ``allow`` accepts a change silently, ``warn`` reports it, ``fork`` accepts it
    only in a run of another name, ``refuse`` never accepts it. None: the default.

    Attributes:
        image: Image of a container; by default ``warn``.
        template: Command, arguments, environment, resources, volumes and settings of a step; by default ``warn``.
        code: Source of a function, and the commit that was compiled; by default ``warn``.
        parameters: Values of parameters; by default ``fork``.
        data: Locations of input artifacts, and versions of declared data; by default ``fork``.
        versions: Python and frameworks, compared with those of the newest checkpoint; by default ``warn``.
        world_size: GPUs and pods of a training step; by default ``warn``.
    """

    image: DriftActionName | None = None
    template: DriftActionName | None = None
    code: DriftActionName | None = None
    parameters: DriftActionName | None = None
    data: DriftActionName | None = None
    versions: DriftActionName | None = None
    world_size: DriftActionName | None = None

    def policy(self) -> DriftPolicy:
        """The policy that is stored with a run.

        Raises:
            UsageError: a value is not an action.
        """
        return override_drift_actions(
            DriftPolicy(), {name: action for name, action in asdict(self).items() if action is not None}
        )
