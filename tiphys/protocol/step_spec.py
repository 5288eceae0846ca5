"""What an author asked for one step, as it travels in the compiled Workflow.

The template that wraps a step carries a `StepSpec` as JSON in the annotation
``tiphys.dev/step``. Plugin and controller read it from there, and from nowhere
else, so that both follow the same policy.

Which checkpoints an author wants to keep, in the words that he writes and that travel to the trainer.
"""

import re
from enum import StrEnum
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from tiphys.errors import UsageError
from tiphys.protocol.gang import Gang
from tiphys.records import Cause, Record

DELETE_AFTER_SECONDS = 600.0
"""Long enough to notice a wrong policy and pin what it would take; short against what storage costs."""

_BEST = re.compile(r"(?P<metric>.+?):(?P<order>min|max)(?::(?P<count>\d+))?")
_STEPS = re.compile(r"(\d+)\s*steps?")


class Best(Record):
    """The ``count`` checkpoints whose ``metric`` is lowest or highest."""

    metric: str
    order: Literal["min", "max"]
    count: PositiveInt = 1

    def __str__(self) -> str:
        return f"{self.metric}:{self.order}:{self.count}"


class Keep(Record):
    """What retention leaves of a lineage. Where there is none, everything stays."""

    last: PositiveInt
    """How many of the newest valid ones."""
    every_steps: PositiveInt | None = None
    """The first valid one from each multiple of so many global steps on, for ever; None for no such anchors."""
    best: Best | None = None
    delay_seconds: NonNegativeFloat = DELETE_AFTER_SECONDS
    """How long an expired one stays, in case somebody still wants it."""


def parse_best(text: str, where: str) -> Best:
    """``loss:min:2``, or ``loss:min`` for one; ``where`` begins the message of the error."""
    match = _BEST.fullmatch(text.strip())
    if not match or (count := int(match["count"] or 1)) == 0:
        raise UsageError(
            f"{where}{text!r} is not valid: write a metric, min or max, and how many to keep, such as loss:min:2"
        )
    return Best(metric=match["metric"], order="min" if match["order"] == "min" else "max", count=count)


def parse_every(text: str, where: str) -> int:
    """``1000 steps``; ``where`` begins the message of the error."""
    match = _STEPS.fullmatch(text.strip())
    if not match or int(match[1]) == 0:
        raise UsageError(f"{where}{text!r} is not valid: write a number of global steps, such as 1000 steps")
    return int(match[1])


STEP_ANNOTATION = "tiphys.dev/step"
PIPELINE_ANNOTATION = "tiphys.dev/pipeline"
STORE_ANNOTATION = "tiphys.dev/store"
CODE_VERSION_ANNOTATION = "tiphys.dev/code-version"
"""Commit of the code that was compiled, if somebody knew it."""
TITLE_ANNOTATION = "workflows.argoproj.io/title"
DESCRIPTION_ANNOTATION = "workflows.argoproj.io/description"
"""What Argo's pages show of a Workflow, as Markdown (Argo, ``docs/title-and-description.md``)."""
NARRATED_ANNOTATION = "tiphys.dev/narrated"
"""Names of those two that Tiphys wrote and the controller keeps up to date; the author's stay."""
STORE_SECRET = "tiphys-store"  # noqa: S105  the name of a Secret
"""Credentials of the store, as the variables of the S3 client, in each namespace of workflows."""
RUN_LABEL = "tiphys.dev/run"
STEP_LABEL = "tiphys.dev/step"
ATTEMPT_LABEL = "tiphys.dev/attempt"
RUN_PARAMETER = "tiphys-run"
SUBMISSION_PARAMETER = "tiphys-submission"


class Kind(StrEnum):
    """How a step is compiled: see `docs/architecture.md`."""

    STEP = "step"
    TRAIN = "train"


class RetryPolicy(Record):
    """How many attempts each cause may cost before the step is given up.

    None means no limit. A cause whose budget is the name of another one has as
    much as that, counted by itself. A committed checkpoint refunds what was
    charged before it. Budgets count within one submission, so `tiphys resume`
    starts afresh. What is not set is left out of the Workflow, where it came later.
    """

    preemption: NonNegativeInt | None = None
    infrastructure: NonNegativeInt | None = 10
    out_of_memory: NonNegativeInt | None = 1
    deadline: NonNegativeInt | None = 0
    user_error: NonNegativeInt | None = 0
    output_missing: NonNegativeInt | None = 0
    unknown: NonNegativeInt | None = 2
    gpu_out_of_memory: NonNegativeInt | Literal["user_error"] | None = Field(
        default="user_error", exclude_if=lambda budget: budget == "user_error"
    )
    hang: NonNegativeInt | None = Field(default=3, exclude_if=lambda budget: budget == 3)
    image: NonNegativeInt | None = Field(default=2, exclude_if=lambda budget: budget == 2)
    storage: NonNegativeInt | Literal["infrastructure"] | None = Field(
        default="infrastructure", exclude_if=lambda budget: budget == "infrastructure"
    )
    memory_ceiling_bytes: PositiveInt | None = Field(default=None, exclude_if=lambda ceiling: ceiling is None)
    """Up to which the container of a training attempt gets more memory than those that had too little; None: never."""
    memory_factor: float = Field(default=1.5, gt=1, exclude_if=lambda factor: factor == 1.5)
    """How much more."""
    on_demand_after: PositiveInt | None = Field(default=None, exclude_if=lambda after: after is None)
    """After so many preemptions without a checkpoint, attempts stay off spot nodes; None: never."""
    avoid_node_after: PositiveInt | None = Field(default=2, exclude_if=lambda after: after == 2)
    """A node is avoided, where there is another, after so many attempts failed on it by its fault; None: never."""
    backoff_seconds: PositiveFloat = 5.0
    backoff_factor: PositiveFloat = 2.0
    backoff_cap_seconds: PositiveFloat = 300.0

    def budget(self, cause: Cause) -> int | None:
        """Attempts that may end by ``cause`` and still be followed by another."""
        budget: int | str | None = getattr(self, cause.value)
        return self.budget(Cause(budget)) if isinstance(budget, str) else budget


SpotUse = Literal["no", "allowed", "only"]
"""Whether a step may run on nodes that can be taken away, or runs on no others."""


class GpuRequest(Record):
    """GPUs that one attempt needs, all of them or none.

    ``members`` pods share them evenly: a gang. One is left out of the Workflow.
    """

    gpus: PositiveInt
    gpu_type: str | None = None
    min_gpu_memory_mb: PositiveInt | None = None
    queue: str = "default"
    priority: int = 0
    seconds: PositiveInt | None = None
    """The longest that the pod of one attempt can run, its grace period included; None: nobody said."""
    members: PositiveInt = Field(default=1, exclude_if=lambda members: members == 1)
    tensor_parallel: PositiveInt = Field(default=1, exclude_if=lambda size: size == 1)
    """So many pods after one another form a group that stays within one NVLink domain."""
    spot: SpotUse = Field(default="no", exclude_if=lambda use: use == "no")

    min_members: PositiveInt | None = Field(default=None, exclude_if=lambda fewest: fewest is None)
    """With so many pods it starts if there is room for no more; None: with all or none."""

    @model_validator(mode="after")
    def _members_get_the_same(self) -> "GpuRequest":
        if self.gpus % self.members:
            raise ValueError(f"{self.gpus} GPUs cannot be shared evenly by {self.members} pods")
        if self.members % self.tensor_parallel:
            raise ValueError(f"{self.members} pods cannot form groups of {self.tensor_parallel}")
        if self.min_members is not None and self.min_members >= self.members:
            raise ValueError(f"{self.min_members} to {self.members} pods leave nothing between; give one number")
        return self


class NodeKind(Record):
    """Nodes that have a label with this value."""

    label: str
    value: str


WhenBusy = Literal["skip", "wait", "queue"]


class CheckpointPolicy(Record):
    """When to save and what to keep.

    ``every`` is seconds, or optimizer steps when ``every_unit`` is ``steps``.
    With ``every_bounds``, in seconds, it is only where to begin: the trainer
    chooses between them by what saves and failures cost.
    ``store`` is empty for the run's own store, or the URL of a shared volume
    as the container sees it, such as ``file:///mnt/checkpoints``.
    """

    every: PositiveFloat = 600.0
    every_unit: Literal["seconds", "steps"] = "seconds"
    every_bounds: tuple[PositiveFloat, PositiveFloat] | None = Field(default=None, exclude_if=lambda bounds: not bounds)
    keep_last: PositiveInt | None = 3
    keep_every: PositiveInt | None = Field(default=None, exclude_if=lambda steps: steps is None)
    """Global steps from one anchor to the next; left out of the Workflow, as the next two, unless it is set."""
    keep_best: Best | None = Field(default=None, exclude_if=lambda best: best is None)
    delete_after_seconds: NonNegativeFloat = Field(
        default=DELETE_AFTER_SECONDS, exclude_if=lambda seconds: seconds == DELETE_AFTER_SECONDS
    )
    store: str = ""
    save_seconds: NonNegativeFloat = 0.0
    """Declared time of one save; the grace period must not be shorter."""
    metrics: str = Field(default="", exclude_if=lambda where: not where)
    """Where the loop shows its metrics (`tiphys.checkpoint.telemetry.metrics`); empty for nowhere."""
    asynchronous: bool = Field(default=True, exclude_if=lambda asynchronous: asynchronous)
    """Whether saves go on behind the training, which takes memory for a copy of the state."""
    when_busy: WhenBusy | None = Field(default=None, exclude_if=lambda when_busy: when_busy is None)
    """What a save does that is due while another is under way; None: wait where ``every`` counts steps, else skip."""
    hang_after_seconds: PositiveFloat | None = Field(default=None, exclude_if=lambda seconds: seconds is None)
    """How long a training may complete no step before it is ended; None for as long as it likes."""
    cache: str = Field(default="", exclude_if=lambda folder: not folder)
    """Folder that the pods of a node share, where shards that were read are kept; empty for none."""

    @property
    def keep(self) -> Keep | None:
        """What retention leaves; None for everything."""
        if self.keep_last is None:
            return None
        return Keep(
            last=self.keep_last,
            every_steps=self.keep_every,
            best=self.keep_best,
            delay_seconds=self.delete_after_seconds,
        )


class StepSpec(Record):
    """One step that Tiphys gates."""

    name: str
    kind: Kind
    parameters: tuple[str, ...] = ()
    """Names of declared output parameters."""
    artifacts: tuple[str, ...] = ()
    """Names of declared output artifacts."""
    template: str
    """Digest of the program: image, command, arguments, environment, source, resources left out."""
    cache: bool = True
    """False: a finished result is never adopted, the step runs in every submission."""
    share: bool = False
    """True: a result made by another run under the same step key is adopted."""
    retry: RetryPolicy = RetryPolicy()
    gpu: GpuRequest | None = None
    checkpoints: CheckpointPolicy | None = None
    grace_seconds: NonNegativeFloat = 30.0
    fan_out: bool = False
    gang: Gang | None = Field(default=None, exclude_if=lambda gang: gang is None)
    """That an attempt is several pods; left out of the Workflow where it is one."""
    spot: tuple[NodeKind, ...] = Field(default=(), exclude_if=lambda kinds: not kinds)
    """The spot nodes that it may run on; only where its policy keeps it off them after a time."""
