"""What an author writes beside a step, and how it becomes settings.

What an author lets change between a run and what goes on with it.
"""

import re
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from hera_pipelines.compile.settings import SharedVolume, Spot, StepSettings
from tiphys.checkpoint.settings import AUTO_BOUNDS, Bounds
from tiphys.checkpoint.telemetry.metrics import Exposure
from tiphys.errors import UsageError
from tiphys.protocol.auto_resume_policy import OUTER_CAUSES, AutoResumePolicy
from tiphys.protocol.drift_policy import DriftPolicy, overridden
from tiphys.protocol.gang import Backend, Gang
from tiphys.protocol.quantities import memory_bytes, seconds
from tiphys.protocol.step_spec import (
    DELETE_AFTER_SECONDS,
    CheckpointPolicy,
    GpuRequest,
    Kind,
    RetryPolicy,
    WhenBusy,
    parse_best,
    parse_every,
)
from tiphys.records import Cause

GKE_SPOT = Spot(label="cloud.google.com/gke-spot")
EKS_SPOT = Spot(label="eks.amazonaws.com/capacityType", value="SPOT", tainted=False)
AKS_SPOT = Spot(label="kubernetes.azure.com/scalesetpriority", value="spot")
KARPENTER_SPOT = Spot(label="karpenter.sh/capacity-type", value="spot", tainted=False)

_TAINTED = (GKE_SPOT, AKS_SPOT)

ModelT = TypeVar("ModelT", bound=BaseModel)

Duration = str | int | float
"""``90s``, ``10m``, ``1h30m``, or a number of seconds."""


@dataclass(frozen=True)
class Retries:
    """How many attempts each cause may cost before a step is given up, and what the next one gets. None: no limit.

    In a training step every cause has its own budget, a committed checkpoint
    refunds what was spent, and `tiphys resume` starts afresh. In a plain step
    Argo repeats the container and counts all causes together: a budget of 0
    means that the cause is not worth another try, and the sum of the others is
    the limit. Causes and remedies are listed in docs/failures.md.
    """

    preemption: int | None = None
    infrastructure: int | None = 10
    out_of_memory: int | None = 1
    deadline: int | None = 0
    user_error: int | None = 0
    output_missing: int | None = 0
    unknown: int | None = 2
    gpu_out_of_memory: int | Literal["user_error"] | None = "user_error"
    """As many as after a user error; give a number where the program follows `tiphys.checkpoint.batch_scale`."""
    hang: int | None = 3
    image: int | None = 2
    storage: int | Literal["infrastructure"] | None = "infrastructure"
    memory_ceiling: str | None = None
    """Such as ``64Gi``: up to there an attempt gets more memory than those before it that had too little."""
    memory_factor: float = 1.5
    on_demand_after: int | None = None
    """After so many preemptions in a row without a checkpoint, and on the last try, it stays off spot nodes."""
    avoid_node_after: int | None = 2
    """After so many failures on one node, by its fault, attempts go to another where there is one."""
    backoff: Duration = "5s"
    """Wait before the second attempt."""
    backoff_factor: int = 2
    backoff_cap: Duration = "5m"

    def policy(self) -> RetryPolicy:
        """The budgets as the plugin reads them."""
        same = {name: getattr(self, name) for name in _SAME}
        ceiling = self.memory_ceiling
        return _checked(
            RetryPolicy,
            "Retries",
            **same,
            memory_ceiling_bytes=None if ceiling is None else memory_bytes(ceiling, "Retries(memory_ceiling=…)"),
            backoff_seconds=duration(self.backoff, "Retries(backoff=…)"),
            backoff_factor=self.backoff_factor,
            backoff_cap_seconds=duration(self.backoff_cap, "Retries(backoff_cap=…)"),
        )


_SAME = (*(cause.value for cause in Cause), "memory_factor", "on_demand_after", "avoid_node_after")
"""Fields that the policy has under the same name."""


@dataclass(frozen=True)
class Checkpoints:
    """When a training step saves, and what is kept.

    Attributes:
        every: A duration, a number of optimizer steps such as ``100 steps``, or ``auto``: as often as measured
            costs and failures make it worth while, at least every hour and at most every minute; ``auto:1m..30m``
            sets other bounds.
        keep_last: How many of the newest checkpoints to keep; None: all there are.
        keep_every: Keep also one for each so many global steps, for ever: ``1000 steps``.
        keep_best: Keep also the best by a metric: ``loss:min:2``, ``accuracy:max``.
        delete_after: How long a checkpoint that nothing keeps any more stays.
        save_time: How long one save takes; grace must not be shorter.
        volume: Where checkpoints lie instead of the run store.
        metrics: Where the loop shows its metrics: ``port:9464`` or ``textfile:/folder``; empty for nowhere.
        asynchronous: Whether saves go on behind the training; False where memory has no room for a copy of the state.
        when_busy: What a save does that is due while another is under way: ``skip`` puts it off to the next step,
            ``wait`` has the training wait, ``queue`` takes memory for one more copy. None: ``wait`` where ``every``
            counts steps, so that saves are at those steps, else ``skip``.
        hang_after: How long the training may complete no step before it is ended and tried again, such as ``30m``;
            longer than whatever else it does between two steps, such as an evaluation. Where its own steps take long,
            it may take ten times as long as the longest of the last hundred. None: as long as it likes.
        cache: Folder that the pods of a node share, such as a host path mounted into them, where checkpoints that
            were read stay for the next reader.
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

    def policy(self) -> CheckpointPolicy:
        """The policy as trainer and plugin read it."""
        every, unit, bounds = _every(self.every)
        if self.keep_last is None and (self.keep_every or self.keep_best):
            raise UsageError(
                "Checkpoints: keep_last=None keeps all checkpoints, so keep_every and keep_best say nothing; "
                "give a number to keep_last, or leave them out"
            )
        return _checked(
            CheckpointPolicy,
            "Checkpoints",
            every=every,
            every_unit=unit,
            every_bounds=bounds,
            keep_last=self.keep_last,
            keep_every=_keep_every(self.keep_every),
            keep_best=None if self.keep_best is None else parse_best(self.keep_best, "Checkpoints(keep_best=…): "),
            delete_after_seconds=duration(self.delete_after, "Checkpoints(delete_after=…)"),
            save_seconds=duration(self.save_time, "Checkpoints(save_time=…)"),
            metrics=_metrics(self.metrics),
            asynchronous=self.asynchronous,
            when_busy=self.when_busy,
            hang_after_seconds=(
                None if self.hang_after is None else duration(self.hang_after, "Checkpoints(hang_after=…)")
            ),
            cache=self.cache,
        )


@dataclass(frozen=True)
class AutoResume:
    """That a run goes on by itself after it failed from outside, or its Workflow was deleted.

    A run that a person has stopped, or that failed by its own program, is left
    alone. Needs the controller of Tiphys in the cluster; see docs/auto-resume.md.

    Attributes:
        max_without_progress: So many resumes in a row may end without a new checkpoint or a newly finished step.
        cooldown: Wait after the first of those; it doubles with each further one. A run that gets ahead never waits.
        cooldown_cap: The longest of these waits.
        retry_after: Once there were too many: when to try again, twice as long each time. None: never by itself.
        causes: Causes to go on after, such as ``("preemption",)``; None: preemption, infrastructure, storage,
            hang and unknown.
    """

    max_without_progress: int = 2
    cooldown: Duration = "1m"
    cooldown_cap: Duration = "1h"
    retry_after: Duration | None = "6h"
    causes: tuple[str, ...] | None = None

    def policy(self) -> AutoResumePolicy:
        """The policy as the controller reads it."""
        return _checked(
            AutoResumePolicy,
            "AutoResume",
            max_without_progress=self.max_without_progress,
            cooldown_seconds=duration(self.cooldown, "AutoResume(cooldown=…)"),
            cooldown_cap_seconds=duration(self.cooldown_cap, "AutoResume(cooldown_cap=…)"),
            retry_after_seconds=(
                None if self.retry_after is None else duration(self.retry_after, "AutoResume(retry_after=…)")
            ),
            causes=OUTER_CAUSES if self.causes is None else self.causes,
        )


class Interval(NamedTuple):
    every: float
    unit: Literal["seconds", "steps"]
    bounds: tuple[float, float] | None = None


@dataclass(frozen=True)
class Asked:
    """Everything that can stand in `@step`, `@train`, `Step` and `Train` beside Hera's own arguments."""

    kind: Kind
    cache: bool = True
    share: bool = False
    retries: Retries | None = None
    grace: Duration | None = None
    deadline: Duration | None = None
    spot: bool | Spot = False
    gpus: int = 0
    gpu_type: str | None = None
    min_gpu_memory_mb: int | None = None
    queue: str = "default"
    priority: int = 0
    checkpoints: Checkpoints | None = None
    nodes: int | str = 1
    backend: Backend | str = Backend.JOB

    def settings(self, step: str) -> StepSettings:
        """The settings that travel in the annotation of ``step``.

        Raises:
            UsageError: a value makes no sense; the message says which.
        """
        where = f"step {step!r}"
        deadline = None if self.deadline is None else duration(self.deadline, f"{where}: deadline")
        gang = self._gang(where)
        return _checked(
            StepSettings,
            where,
            kind=self.kind,
            cache=self.cache,
            share=self.share,
            retry=(self.retries or Retries()).policy(),
            gpu=self._gpu(where),
            checkpoints=None if self.checkpoints is None else self.checkpoints.policy(),
            volume=None if self.checkpoints is None else self.checkpoints.volume,
            grace_seconds=None if self.grace is None else duration(self.grace, f"{where}: grace"),
            deadline_seconds=None if deadline is None else round(deadline),
            spot=_spot(self.spot),
            gang=gang,
        )

    def _gang(self, where: str) -> Gang | None:
        if self.nodes == 1:
            if self.backend != Backend.JOB:
                raise UsageError(f"{where} has a backend, which is for several nodes; add nodes=2, or drop it")
            return None
        fewest, most = _nodes(self.nodes, where)
        return _checked(Gang, where, members=most, min_members=fewest, backend=self.backend)

    def _gpu(self, where: str) -> GpuRequest | None:
        if not self.gpus:
            if self.gpu_type is not None or self.min_gpu_memory_mb is not None:
                raise UsageError(f"{where} asks for a type of GPU, but for no GPU; add gpus=1")
            return None
        fewest, most = _nodes(self.nodes, where)
        return _checked(
            GpuRequest,
            where,
            gpus=self.gpus * most,
            members=most,
            min_members=fewest,
            gpu_type=self.gpu_type,
            min_gpu_memory_mb=self.min_gpu_memory_mb,
            queue=self.queue,
            priority=self.priority,
        )


def _nodes(asked: int | str, where: str) -> tuple[int | None, int]:
    """The fewest nodes, None for all of them, and the most."""
    if isinstance(asked, int):
        return None, asked
    if (found := re.fullmatch(r"(\d{1,6}):(\d{1,6})", asked)) is None:
        raise UsageError(
            f"{where}: nodes={asked!r} is not valid: write a number, or the fewest and the most as in '2:4'"
        )
    return int(found[1]), int(found[2])


def duration(value: Duration, where: str) -> float:
    """Seconds that ``value`` stands for; ``where`` begins the message of the error."""
    if isinstance(value, int | float):
        return float(value)
    try:
        return seconds(value)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def _every(value: Duration) -> Interval:
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+)\s*steps?\s*", value)):
        return Interval(float(match[1]), "steps")
    if isinstance(value, str) and (match := re.fullmatch(r"\s*auto(?::([^.]\S*)\.\.(\S+))?\s*", value)):
        return _automatic(value, match)
    where = "Checkpoints(every=…), which also takes '100 steps' and 'auto'"
    return Interval(duration(value, where), "seconds")


def _automatic(value: str, match: re.Match[str]) -> Interval:
    where = "Checkpoints(every='auto:lowest..highest')"
    bounds = AUTO_BOUNDS if match[1] is None else Bounds(duration(match[1], where), duration(match[2], where))
    if not 0 < bounds.lowest_seconds <= bounds.highest_seconds:
        raise UsageError(f"{where}: {value!r} leaves nothing between its bounds; the lower one comes first, above 0")
    return Interval(bounds.begin_seconds, "seconds", (bounds.lowest_seconds, bounds.highest_seconds))


def _keep_every(value: str | int | None) -> int | None:
    return parse_every(value, "Checkpoints(keep_every=…): ") if isinstance(value, str) else value


def _metrics(text: str) -> str:
    if text:
        Exposure.parse(text, "Checkpoints(metrics=…): ")
    return text


def _spot(spot: bool | Spot) -> tuple[Spot, ...]:
    if isinstance(spot, Spot):
        return (spot,)
    return _TAINTED if spot else ()


def _checked(model: type[ModelT], where: str, **values: Any) -> ModelT:
    try:
        return model(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{where}: {name} cannot be {first['input']!r}: {first['msg']}") from error


Action = Literal["allow", "warn", "fork", "refuse"]


@dataclass(frozen=True)
class Drift:
    """What `tiphys resume RUN PIPELINE.py` and `tiphys fork` do about what has changed; see docs/resuming.md.

    ``allow`` says nothing, ``warn`` tells it, ``fork`` lets it happen in a run of
    another name only, ``refuse`` never. None leaves the default.

    Attributes:
        image: Image of a container; by default ``warn``.
        template: Command, arguments, environment, resources, volumes and settings of a step; by default ``warn``.
        code: Source of a function, and the commit that was compiled; by default ``warn``.
        parameters: Values of parameters; by default ``fork``.
        data: Where input artifacts come from; by default ``fork``.
        versions: Python and frameworks, against those that wrote the newest checkpoint; by default ``warn``.
        world_size: GPUs and pods of a training; by default ``warn``.
    """

    image: Action | None = None
    template: Action | None = None
    code: Action | None = None
    parameters: Action | None = None
    data: Action | None = None
    versions: Action | None = None
    world_size: Action | None = None

    def policy(self) -> DriftPolicy:
        """The policy as it is stored with a run.

        Raises:
            UsageError: one of them is no action.
        """
        return overridden(DriftPolicy(), {name: action for name, action in asdict(self).items() if action is not None})
