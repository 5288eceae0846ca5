"""The author's settings of one step, as the compiled Workflow carries them.

The template of a step holds a `StepSpec` as JSON in the annotation
``tiphys.dev/step``: the wrapper of a gated step, or the author's own template, which
several tasks may call. Plugin and controller read the settings only from there, so
that both apply the same policy. The module also defines the other annotations
and labels of compiled objects, and parses the retention settings that authors
write and that reach the training program as environment variables.
"""

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from tiphys.errors import UsageError
from tiphys.protocol.gang import GangSpec
from tiphys.records import Cause, DataVersion, Record
from tiphys.records.data_version import check_data_bytes
from tiphys.records.tracking import ModelRegistration

DELETE_AFTER_SECONDS = 600.0
"""Long enough to notice a wrong policy and pin checkpoints; short compared with the cost of storage."""

_BEST = re.compile(r"(?P<metric>.+?):(?P<order>min|max)(?::(?P<count>\d+))?")
_STEPS = re.compile(r"(\d+)\s*steps?")


class BestCheckpoints(Record):
    """The ``count`` checkpoints with the lowest or highest ``metric``."""

    metric: str
    order: Literal["min", "max"]
    count: PositiveInt = 1

    def __str__(self) -> str:
        return f"{self.metric}:{self.order}:{self.count}"


class RetentionPolicy(Record):
    """The checkpoints of a lineage that retention keeps. Without a policy retention keeps all."""

    last: PositiveInt
    """Number of the newest valid checkpoints."""
    every_steps: PositiveInt | None = None
    """Keeps the first valid checkpoint at or after each multiple of this many global steps; None for none."""
    best: BestCheckpoints | None = None
    delay_seconds: NonNegativeFloat = DELETE_AFTER_SECONDS
    """Delay between the expiry and the deletion of a checkpoint, in which it can still be pinned."""


def parse_keep_best(text: str, error_prefix: str) -> BestCheckpoints:
    """Parse ``loss:min:2``, or ``loss:min`` for one checkpoint.

    Raises:
        UsageError: ``text`` is not valid.
    """
    match = _BEST.fullmatch(text.strip())
    if not match or (count := int(match["count"] or 1)) == 0:
        raise UsageError(
            f"{error_prefix}{text!r} is not valid: write a metric, min or max, and how many to keep, such as loss:min:2"
        )
    return BestCheckpoints(metric=match["metric"], order="min" if match["order"] == "min" else "max", count=count)


def parse_keep_every(text: str, error_prefix: str) -> int:
    """Parse ``1000 steps`` into the number of global steps.

    Raises:
        UsageError: ``text`` is not valid.
    """
    match = _STEPS.fullmatch(text.strip())
    if not match or int(match[1]) == 0:
        raise UsageError(f"{error_prefix}{text!r} is not valid: write a number of global steps, such as 1000 steps")
    return int(match[1])


STEP_ANNOTATION = "tiphys.dev/step"
PIPELINE_ANNOTATION = "tiphys.dev/pipeline"
STORE_ANNOTATION = "tiphys.dev/store"
CODE_VERSION_ANNOTATION = "tiphys.dev/code-version"
"""Commit of the compiled code, if known."""
TITLE_ANNOTATION = "workflows.argoproj.io/title"
DESCRIPTION_ANNOTATION = "workflows.argoproj.io/description"
"""Title and description in Argo's UI, as Markdown (Argo, ``docs/title-and-description.md``)."""
GENERATED_TEXT_ANNOTATION = "tiphys.dev/narrated"
"""Which of title and description Tiphys generated. The controller updates these and leaves the author's texts."""
STORE_SECRET = "tiphys-store"  # noqa: S105  the name of a Secret
"""Secret with the store's credentials, as environment variables of the S3 client, in each workflow namespace."""
EXECUTOR_ACCOUNT = "tiphys-executor"
"""Account of Argo's own containers in the pods of a workflow; the chart creates it in each workflow namespace."""
RUN_LABEL = "tiphys.dev/run"
STEP_LABEL = "tiphys.dev/step"
ATTEMPT_LABEL = "tiphys.dev/attempt"
RUN_PARAMETER = "tiphys-run"
ITEM_PARAMETER = "tiphys-item"
"""Input parameter of the template of a fan-out for the value of the item."""
SUBMISSION_PARAMETER = "tiphys-submission"


class StepKind(StrEnum):
    """How a step is compiled: see `docs/architecture.md`."""

    STEP = "step"
    TRAIN = "train"


_CAUSES_IN_PLACE = (Cause.HANG, Cause.INFRASTRUCTURE, Cause.UNKNOWN, Cause.USER_ERROR)
"""Not those of the pod: its memory, its preemption, its deadline, its image."""


class RetryPolicy(Record):
    """Retry budgets by cause: how many failures of each cause may be retried before the step fails.

    None means no limit. A budget that names another cause has the same size as
    that cause's budget, and is counted separately. A checkpoint of a later step
    refunds the charges before it. Budgets count within one submission, so `tiphys resume`
    starts with full budgets. Fields that were added later are left out of the
    Workflow unless they are set.
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
    """Maximum of the memory limit that is raised after out of memory; None: it is not raised."""
    memory_factor: float = Field(default=1.5, gt=1, exclude_if=lambda factor: factor == 1.5)
    """Factor by which the memory limit is raised."""
    on_demand_after: PositiveInt | None = Field(default=None, exclude_if=lambda after: after is None)
    """Number of preemptions without a checkpoint after which attempts avoid spot nodes; None: never."""
    avoid_node_after: PositiveInt | None = Field(default=2, exclude_if=lambda after: after == 2)
    """Number of attempts failed by the fault of a node after which the next prefers other nodes; None: never."""
    in_place: bool = Field(default=True, exclude_if=lambda in_place: in_place)
    """Whether a program that died is started again in its pod, where its cause and its budget allow."""
    spare: bool | None = Field(default=None, exclude_if=lambda spare: spare is None)
    """Whether a process with the program's imports waits for that; None: where the pod's memory has room."""
    backoff_seconds: PositiveFloat = 5.0
    backoff_factor: PositiveFloat = 2.0
    backoff_cap_seconds: PositiveFloat = 300.0

    def budget(self, cause: Cause) -> int | None:
        """Number of failures by ``cause`` that may be retried; None means no limit."""
        budget: int | str | None = getattr(self, cause.value)
        return self.budget(Cause(budget)) if isinstance(budget, str) else budget

    def causes_in_place(self) -> tuple[Cause, ...]:
        """Causes after which a new process in the same pod may go on."""
        return tuple(cause for cause in _CAUSES_IN_PLACE if self.in_place and self.budget(cause) != 0)

    def wait_after(self, failures: int) -> float:
        """Seconds of back-off after that many failures, of which the last one counts."""
        wait = self.backoff_seconds * self.backoff_factor ** min(failures - 1, 64)
        return min(wait, self.backoff_cap_seconds)


# Bounds of a request for GPUs: all namespaces share the ledger that keeps it, and the scheduler that computes with it.
_Gpus = Annotated[int, Field(gt=0, le=100_000)]
_Members = Annotated[int, Field(gt=0, le=5000)]
_Amount = Annotated[int, Field(gt=0, le=1_000_000_000)]
Priority = Annotated[int, Field(ge=-1_000_000_000, le=1_000_000_000)]
"""In the range that users of Kubernetes have for a PriorityClass."""
_QueueName = Annotated[str, Field(min_length=1, max_length=253)]
_LABEL_VALUE_PATTERN = r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
_GpuType = Annotated[str, Field(min_length=1, max_length=63, pattern=_LABEL_VALUE_PATTERN)]
"""The value of a node label."""
_Speed = Annotated[float, Field(gt=0, allow_inf_nan=False)]
GPU_RESOURCE, GPU_TYPE_LABEL = "nvidia.com/gpu", "nvidia.com/gpu.product"
"""Resource of whole GPUs of NVIDIA, the default of steps and flavors, and the node label of their type."""
GpuResourceName = Annotated[
    str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")
]
"""An extended resource of Kubernetes, such as ``amd.com/gpu`` or ``nvidia.com/mig-1g.10gb``."""
_KNOWN_GPU_RESOURCE = re.compile(
    r"nvidia\.com/(?:gpu(?:\.shared)?|mig-[\w.-]+)|amd\.com/(?:gpu|[a-z]px_nps\d)|gpu\.intel\.com/\w+|habana\.ai/gaudi|"
    r"google\.com/tpu|aws\.amazon\.com/neuron\w*|huawei\.com/[Aa]scend\w*"
)
Proximity = Literal["nvlink", "rack", "block"]
"""A domain of the topology of nodes, the smallest first."""
SpotUse = Literal["no", "allowed", "only"]
"""Whether a step must not, may, or must run on spot nodes."""


def is_label_value(text: str) -> bool:
    """Whether ``text`` can be the value of a Kubernetes label, other than the empty one."""
    return len(text) <= 63 and re.fullmatch(_LABEL_VALUE_PATTERN, text) is not None


def is_gpu_resource(name: str) -> bool:
    """Whether device plugins are known to offer GPUs, parts of GPUs or the like under this name."""
    return _KNOWN_GPU_RESOURCE.fullmatch(name) is not None


def sort_by_speed(gpu_types: Iterable[str], speed: Mapping[str, float]) -> tuple[str, ...]:
    """The types with the fastest first; a type without a speed has 1, and equals keep their order."""
    return tuple(sorted(gpu_types, key=lambda gpu_type: -speed.get(gpu_type, 1.0)))


class GpuRequest(Record):
    """GPUs of one attempt, granted all or none.

    The ``members`` pods of a gang share them evenly.
    """

    gpus: _Gpus
    resource: GpuResourceName = Field(default=GPU_RESOURCE, exclude_if=lambda name: name == GPU_RESOURCE)
    """Name under which Kubernetes offers them. Only flavors of the same resource serve the request."""
    gpu_type: _GpuType | None = None
    """None: any type, or one of ``gpu_types``."""
    gpu_types: tuple[_GpuType, ...] = Field(default=(), max_length=16, exclude_if=lambda types: not types)
    """Types of which each may serve an attempt, the preferred one first; empty for one type, or any."""
    speed: dict[_GpuType, _Speed] = Field(default_factory=dict, exclude_if=lambda speed: not speed)
    """How fast the step trains on each of ``gpu_types``, relative to the others; 1 for a type that is not named."""
    min_gpu_memory_mb: _Amount | None = None
    queue: _QueueName = "default"
    priority: Priority = 0
    seconds: _Amount | None = None
    """Maximum run time of the pod of one attempt, its grace period included; None if not declared."""
    members: _Members = Field(default=1, exclude_if=lambda members: members == 1)
    tensor_parallel: _Members = Field(default=1, exclude_if=lambda size: size == 1)
    """Number of consecutive pods that form a group within one NVLink domain."""
    spot: SpotUse = Field(default="no", exclude_if=lambda use: use == "no")
    within: Proximity | None = Field(default=None, exclude_if=lambda domain: domain is None)
    """Domain that all pods of an attempt must share; None: they are near each other where that is possible."""
    min_members: _Members | None = Field(default=None, exclude_if=lambda fewest: fewest is None)
    """Minimum number of pods of an elastic gang; None: the gang starts with all its pods or none."""

    @model_validator(mode="after")
    def _types_are_a_choice(self) -> "GpuRequest":
        is_choice = len(set(self.gpu_types)) == len(self.gpu_types) != 1 and self.gpu_type is None
        if self.gpu_types and not is_choice:
            raise ValueError("gpu_types is for several different types, beside no gpu_type")
        if self.speed and not self.gpu_types:
            raise ValueError("speed chooses among several types, so name them: gpu_type=['H100', 'A100']")
        if unknown := sorted(self.speed.keys() - set(self.gpu_types)):
            types = ", ".join(self.gpu_types)
            raise ValueError(f"speed names {unknown[0]}, which is none of its types; these are: {types}")
        return self

    @model_validator(mode="after")
    def _members_get_the_same(self) -> "GpuRequest":
        if self.gpus % self.members:
            raise ValueError(f"{self.gpus} GPUs cannot be shared evenly by {self.members} pods")
        if self.members % self.tensor_parallel:
            raise ValueError(f"{self.members} pods cannot form groups of {self.tensor_parallel}")
        if self.min_members is not None and self.min_members >= self.members:
            raise ValueError(f"{self.min_members} to {self.members} pods are no range; give one number")
        return self

    @property
    def gpu_types_by_speed(self) -> tuple[str, ...]:
        """``gpu_types`` in the order in which they are tried: the fastest first, of equals the preferred one."""
        return sort_by_speed(self.gpu_types, self.speed)

    @property
    def gpus_per_member(self) -> int:
        return self.gpus // self.members

    def gpus_for(self, members: int | None) -> int:
        """GPUs of an attempt with ``members`` pods; None: with all of them."""
        return self.gpus_per_member * (members or self.members)


class NodeLabelValue(Record):
    """Selects the nodes that have a label with this value."""

    label: str
    value: str


WhenBusy = Literal["skip", "wait", "queue"]


class CheckpointPolicy(Record):
    """When to save, and which checkpoints to keep.

    ``every`` is in seconds, or in optimizer steps if ``every_unit`` is ``steps``.
    With ``every_bounds``, in seconds, it is only the first interval; later ones
    lie between the bounds and follow the measured cost of saves and failures.
    ``store`` is empty for the run's store, or the URL of a shared volume as the
    container sees it, such as ``file:///mnt/checkpoints``.
    """

    every: PositiveFloat = 600.0
    every_unit: Literal["seconds", "steps"] = "seconds"
    every_bounds: tuple[PositiveFloat, PositiveFloat] | None = Field(default=None, exclude_if=lambda bounds: not bounds)
    keep_last: PositiveInt | None = 3
    keep_every: PositiveInt | None = Field(default=None, exclude_if=lambda steps: steps is None)
    """Global steps between checkpoints that are never deleted; None for none."""
    keep_best: BestCheckpoints | None = Field(default=None, exclude_if=lambda best: best is None)
    delete_after_seconds: NonNegativeFloat = Field(
        default=DELETE_AFTER_SECONDS, exclude_if=lambda seconds: seconds == DELETE_AFTER_SECONDS
    )
    store: str = ""
    save_seconds: NonNegativeFloat = 0.0
    """Declared duration of one save; the grace period must not be shorter."""
    metrics: str = Field(default="", exclude_if=lambda where: not where)
    """Where the training publishes its metrics (`tiphys.checkpoint.telemetry.metrics`); empty for nowhere."""
    asynchronous: bool = Field(default=True, exclude_if=lambda asynchronous: asynchronous)
    """Whether saves run in the background, which needs memory for a copy of the state."""
    when_busy: WhenBusy | None = Field(default=None, exclude_if=lambda when_busy: when_busy is None)
    """Behaviour of a save that is due during another save; None: wait if ``every`` counts steps, otherwise skip."""
    hang_after_seconds: PositiveFloat | None = Field(default=None, exclude_if=lambda seconds: seconds is None)
    """Seconds without a completed step after which a training is ended; None for no limit."""
    cache: str = Field(default="", exclude_if=lambda folder: not folder)
    """Cache folder for shards that the pods of a node share; empty for none."""
    near_copy: bool = Field(default=True, exclude_if=lambda near_copy: near_copy)
    """Whether the copy that a save is staged in outlives the program, so that a restart in the pod can read it."""

    @property
    def patience_seconds(self) -> float:
        """Seconds after which a training without a commit deserves a word: its longest interval, and at least a minute.

        Ten minutes if it counts steps, whose time is not known.
        """
        longest = self.every_bounds[1] if self.every_bounds else self.every if self.every_unit == "seconds" else 600.0
        return max(60.0, longest)

    @property
    def retention(self) -> RetentionPolicy | None:
        """The retention policy; None if all checkpoints are kept."""
        if self.keep_last is None:
            return None
        return RetentionPolicy(
            last=self.keep_last,
            every_steps=self.keep_every,
            best=self.keep_best,
            delay_seconds=self.delete_after_seconds,
        )


RESULT_PARAMETER = "result"
"""Output parameter for the standard output of a step, if another task reads it."""

MAX_DATA_VERSIONS = 16
"""Most data of one step: the claim of each attempt repeats it, and so does the environment of its program."""


class StepSpec(Record):
    """Settings of one step of Tiphys."""

    name: str
    kind: StepKind
    gate: bool = Field(default=False, exclude_if=lambda gate: not gate)
    """Whether the plugin admits the step before it runs; always so for a training."""
    parameters: tuple[str, ...] = ()
    """Names of declared output parameters."""
    artifacts: tuple[str, ...] = ()
    """Names of declared output artifacts."""
    suffixes: dict[str, str] = {}
    """Suffix of the path of an output artifact, by its name, which its key keeps: ``{"report": ".html"}``."""
    template: str
    """Digest of the program: image, command, arguments, environment and source, without resources."""
    cache: bool = True
    """False: a finished result is never reused; the step runs in every submission."""
    share: bool = False
    """True: a result of another run with the same step key is reused."""
    retry: RetryPolicy = RetryPolicy()
    gpu: GpuRequest | None = None
    checkpoints: CheckpointPolicy | None = None
    grace_seconds: NonNegativeFloat = 30.0
    fan_out: bool = False
    gang: GangSpec | None = Field(default=None, exclude_if=lambda gang: gang is None)
    """The gang of an attempt; None for a single pod."""
    spot: tuple[NodeLabelValue, ...] = Field(default=(), exclude_if=lambda kinds: not kinds)
    """Labels of the spot nodes that it may use; set only if ``retry.on_demand_after`` is set."""
    data: tuple[DataVersion, ...] = Field(default=(), max_length=MAX_DATA_VERSIONS, exclude_if=lambda data: not data)
    """Versions of the data that it reads and no step makes, as they were at compile."""
    tracker: Literal["", "mlflow", "wandb"] = Field(default="", exclude_if=lambda tracker: not tracker)
    """The service that tracks the step; empty for none."""
    registration: ModelRegistration | None = Field(default=None, exclude_if=lambda registration: registration is None)
    """The model that the step registers; None for another kind of step."""
    has_result: bool = Field(default=False, exclude_if=lambda has_result: not has_result)
    """True: its standard output, which Argo calls ``outputs.result``, is the output parameter `RESULT_PARAMETER`."""

    @field_validator("data")
    @classmethod
    def _data_has_room(cls, data: tuple[DataVersion, ...]) -> tuple[DataVersion, ...]:
        try:
            check_data_bytes(data)
        except UsageError as error:
            raise ValueError(str(error)) from error
        return data

    @property
    def is_gated(self) -> bool:
        """Whether the plugin is asked before the step runs. Otherwise its template is the author's own."""
        return self.gate or self.kind is StepKind.TRAIN

    @property
    def output_parameters(self) -> tuple[str, ...]:
        """Names of all output parameters: the declared ones, and that of the standard output."""
        return (*self.parameters, RESULT_PARAMETER) if self.has_result else self.parameters

    def artifact_file(self, name: str) -> str:
        """File name of an output artifact in storage. Viewers, such as that of Argo's UI, go by its suffix."""
        suffix = self.suffixes.get(name, "")
        return name if name.endswith(suffix) else name + suffix
