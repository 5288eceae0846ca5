"""Lease requests, leases, pending requests, the state that they form, and admission decisions.

The scheduler, the ledgers and the plugin share these records. Ledgers store them as they are
(`tiphys_plugin.quota.ledger.status_codec`), so each field has the type that a stored one is checked against.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Literal, NamedTuple

from pydantic import AwareDatetime, ConfigDict, Field, NonNegativeInt, PositiveInt, with_config
from pydantic.alias_generators import to_camel

from tiphys.protocol.fan_out import find_item, step_display_name
from tiphys.protocol.step_spec import GPU_RESOURCE, GpuRequest, Proximity, SpotUse
from tiphys_plugin.quota.flavors import Flavor
from tiphys_plugin.quota.queues import QueueRules

_STORED = ConfigDict(extra="forbid", strict=True, alias_generator=to_camel)
_Gpus = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@with_config(_STORED)
@dataclass(frozen=True)
class EndedUsage:
    """Decayed mean usage that ended leases left to a queue: GPUs of a pool, as of ``measured_at``."""

    queue: str
    pool: str
    gpus: _Gpus
    measured_at: AwareDatetime


class AdmissionReason(StrEnum):
    """Why GPUs were not granted. The names are Kueue's where Kueue has the same reason."""

    QUEUE_UNKNOWN = "QueueUnknown"
    QUEUE_NOT_ALLOWED = "QueueNotAllowed"
    PRIORITY_TOO_HIGH = "PriorityTooHigh"
    QUEUE_STOPPED = "QueueStopped"
    NO_MATCHING_GPU_TYPE = "NoMatchingGpuType"
    GPU_MEMORY_TOO_SMALL = "GpuMemoryTooSmall"
    EXCEEDS_MAX_QUOTA = "ExceedsMaxQuota"
    WAITING_FOR_QUOTA = "WaitingForQuota"
    BORROWING_LIMIT_REACHED = "BorrowingLimitReached"
    WAITING_FOR_INVENTORY = "WaitingForInventory"
    GANG_FRAGMENTED = "GangFragmented"
    TOPOLOGY_PLACEMENT_FAILED = "TopologyPlacementFailed"
    BEHIND_HIGHER_PRIORITY = "BehindHigherPriority"
    BEHIND_LESS_ATTAINED = "BehindLessAttained"
    BEHIND_SMALLER_SHARE = "BehindSmallerShare"
    BEHIND_EARLIER_REQUEST = "BehindEarlierRequest"
    RESERVED = "Reserved"
    FIRST_IN_LINE = "FirstInLine"
    LINE_CLOSED = "LineClosed"
    WAITING_FOR_PREEMPTED_CHECKPOINT = "WaitingForPreemptedCheckpoint"
    MIN_RUNTIME_PROTECTED = "MinRuntimeProtected"
    MISCONFIGURED = "Misconfigured"
    LEDGER_FULL = "LedgerFull"
    LEDGER_SHARE_EXCEEDED = "LedgerShareExceeded"
    LEDGER_RECOVERING = "LedgerRecovering"
    PENDING_EVALUATION = "PendingEvaluation"
    ADMISSION_CHECK_PENDING = "AdmissionCheckPending"
    UNSUPPORTED_BY_KUEUE = "UnsupportedByKueue"


def hash_node_name(node: str) -> str:
    """What a ledger keeps of the name of a node: 64 bits, which tell apart the nodes of one workflow.

    The name of a node contains the whole fan-out item, and all namespaces share the room of the ledger.
    """
    return hashlib.sha256(node.encode(errors="surrogatepass")).hexdigest()[:16]


class StepAttempt(NamedTuple):
    """The attempt of a step that asks for GPUs."""

    uid: str
    """UID of the Workflow."""
    namespace: str
    workflow: str
    run: str
    step: str
    instance: str
    """Node name of the step within the Workflow."""
    node: str
    """Name of the admit node."""
    number: int


@with_config(_STORED)
@dataclass(frozen=True)
class LeaseRequest:
    """GPUs for one attempt, all or nothing. ``uid``, ``step`` and ``node_hash`` are the replay key.

    From ``queue`` on the fields are those of `GpuRequest`, which the author of the step sets.
    """

    uid: str
    step: str
    node_hash: str
    """`hash_node_name` of the admit node."""
    namespace: str
    workflow: str
    instance_hash: str
    """`hash_node_name` of the step within the workflow; the plugin finds the pods of the step by it."""
    run: str
    attempt: int
    queue: str
    gpus: PositiveInt
    resource: str = GPU_RESOURCE
    """Extended resource of the GPUs. Empty: any, in a simulation, whose jobs name none."""
    gpu_type: str | None = None
    min_gpu_memory_mb: PositiveInt | None = None
    priority: int = 0
    seconds: PositiveInt | None = None
    """Time limit of an attempt, after which it is ended; None: the author declared none."""
    members: PositiveInt = 1
    """Pods that share the ``gpus`` evenly: a gang, which starts as a whole or not at all."""
    tensor_parallel: PositiveInt = 1
    """Size of the groups of consecutive members that stay within one NVLink domain."""
    spot: SpotUse | Literal["avoided"] = "no"
    """Whether the request may use flavors of spot nodes; ``avoided``: only if no other flavor could serve it."""
    attained: _Seconds = 0.0
    """Attained service: GPU-seconds of earlier attempts of the step. 0 in queues without ``order: attained``."""
    first_start: _Seconds | None = None
    """Start of the first of these attempts, in Unix seconds; None where ``attained`` is not counted."""
    min_members: PositiveInt | None = None
    """Fewest members with which an elastic gang continues, and with which it queues. None: the gang is not elastic."""
    max_members: PositiveInt | None = None
    """Members with which an elastic gang starts if they fit at its turn."""
    item_index: NonNegativeInt | None = None
    """Index of the fan-out item that the step is; None for another step, or if it is unknown."""
    gpu_types: tuple[str, ...] = ()
    """Types of which each may serve the request, in the order in which they are tried. Empty for ``gpu_type``, or any
    type."""
    within: Proximity | None = None
    """Domain of the topology that all members must share; None: none."""
    avoided_nodes: tuple[str, ...] = ()
    """Nodes that failed the step before; the request gets others if there are any."""
    cohort: str | None = None
    """Cohort of the queue when the GPUs were granted, empty if it had none; None: not granted yet, or unknown."""

    @property
    def type_text(self) -> str | None:
        """The wanted type or types for people; None: any."""
        return self.gpu_type or " or ".join(self.gpu_types) or None

    @classmethod
    def from_gpu_request(cls, gpu: GpuRequest, attempt: StepAttempt, members: int | None = None) -> "LeaseRequest":
        """The request of one attempt for the GPUs that the author of the step asked for.

        An elastic gang requests the ``members`` that it already has (None: its fewest), and names the most that it can
        use. Other steps ignore them.
        """
        is_elastic = gpu.min_members is not None
        requested_members = (members or gpu.min_members or gpu.members) if is_elastic else gpu.members
        item = find_item(attempt.instance)
        return cls(
            uid=attempt.uid,
            step=attempt.step,
            node_hash=hash_node_name(attempt.node),
            namespace=attempt.namespace,
            workflow=attempt.workflow,
            instance_hash=hash_node_name(attempt.instance),
            run=attempt.run,
            attempt=attempt.number,
            queue=gpu.queue,
            gpus=gpu.gpus_for(requested_members),
            resource=gpu.resource,
            gpu_type=gpu.gpu_type,
            gpu_types=gpu.gpu_types_by_speed,
            min_gpu_memory_mb=gpu.min_gpu_memory_mb,
            priority=gpu.priority,
            seconds=gpu.seconds,
            members=requested_members,
            tensor_parallel=gpu.tensor_parallel,
            within=gpu.within,
            spot=gpu.spot,
            min_members=gpu.min_members,
            max_members=gpu.members if is_elastic else None,
            item_index=item.index if item else None,
        )

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.uid, self.step, self.node_hash)

    @property
    def step_name(self) -> str:
        """Name of the step or item for people, such as ``fit[2]``."""
        return step_display_name(self.step, self.item_index)

    @property
    def log_fields(self) -> dict[str, str | int]:
        """What names the attempt in the log."""
        return {"run": self.run, "step": self.step, "attempt": self.attempt}

    @property
    def workflow_step(self) -> tuple[str, str]:
        """UID of the workflow and name of the step. Retries of a step differ in ``node_hash`` and share this key."""
        return (self.uid, self.step)

    @property
    def gpus_per_member(self) -> int:
        """GPUs of each pod."""
        return self.gpus // self.members

    @property
    def most_gpus(self) -> int:
        """GPUs with all the members that an elastic gang can have; of other requests those that they ask for."""
        return self.gpus_per_member * (self.max_members or self.members)

    @property
    def larger_sizes(self) -> "Iterator[LeaseRequest]":
        """The same request with more members, up to ``max_members``, the largest first."""
        for members in range(self.max_members or self.members, self.members, -1):
            if members % self.tensor_parallel == 0:
                yield self.with_members(members)

    def with_members(self, members: int) -> "LeaseRequest":
        """The same request for ``members`` members, each with as many GPUs as before."""
        return replace(self, members=members, gpus=self.gpus_per_member * members)


def declared_end(request: LeaseRequest, started_at: datetime) -> datetime | None:
    """Latest end of a lease that started at ``started_at``; None without a declared time limit."""
    return started_at + timedelta(seconds=request.seconds) if request.seconds is not None else None


@with_config(_STORED)
@dataclass(frozen=True)
class PreemptionNotice:
    """Mark of a victim: its attempt was asked to save and exit for the step ``step`` of the workflow ``uid``.

    The lease holds its GPUs until its pods have ended. At ``deadline`` the pods are killed, saved or not.
    """

    uid: str
    step: str
    asked_at: AwareDatetime
    deadline: AwareDatetime
    keeps: PositiveInt | None = None
    """Members with which an elastic gang continues; None: the whole attempt exits."""
    reason: str = ""
    """Why another authority took the GPUs back, in its words; empty if a preemptor needs them."""
    moves: bool = False
    """Whether the attempt only leaves its nodes: GPUs on others are kept for the next one, as for the preemptor."""

    @property
    def preemptor(self) -> tuple[str, str]:
        """`LeaseRequest.workflow_step` of the preemptor."""
        return (self.uid, self.step)

    def is_for(self, request: "LeaseRequest") -> bool:
        """Whether ``request`` is the preemptor."""
        return self.preemptor == request.workflow_step


@with_config(_STORED)
@dataclass(frozen=True)
class Growth:
    """The last time that an elastic gang was granted more members within its attempt."""

    at: AwareDatetime
    made: PositiveInt
    """Members that its workload has made once the growth is carried out, lost ones included."""
    usage_from: AwareDatetime
    """When the lease would have started, had it held for its usage the GPUs that it holds now."""


@with_config(_STORED)
@dataclass(frozen=True)
class Lease:
    """GPUs that an attempt holds. From ``check_at`` on, `AdmissionBackend.release_dead_leases` checks that it lives."""

    id: str
    request: LeaseRequest
    pool: str
    """Granted flavor or GPU type; ``*``: from the quota for all types that the queue does not name."""
    granted_at: AwareDatetime
    check_at: AwareDatetime
    nodes: tuple[str, ...] = ()
    """The node of each member; empty where no nodes are declared."""
    preemption: PreemptionNotice | None = None
    flavor: Flavor | None = None
    """The granted flavor, if its declaration is not among the queue rules of the ledger."""
    growth: Growth | None = None

    @property
    def usage_from(self) -> datetime:
        """From when its usage counts, with the GPUs that it holds now."""
        return self.growth.usage_from if self.growth is not None else self.granted_at


@with_config(_STORED)
@dataclass(frozen=True)
class PendingRequest:
    """A deferred request. It holds no GPUs, and keeps its place as long as the step repeats the request."""

    request: LeaseRequest
    arrival: PositiveInt
    since: AwareDatetime
    seen_at: AwareDatetime
    promised_at: AwareDatetime | None = None
    """When a victim of this request released its GPUs; they are kept until the request is repeated."""


@dataclass(frozen=True)
class Admitted:
    """The lease is granted. ``pool`` is a flavor or a GPU type, or ``*`` if the ledger did not choose one."""

    lease: str
    pool: str
    waited_seconds: float = 0.0
    nodes: tuple[str, ...] = ()
    """The node of each member; empty where no nodes are declared."""
    flavor: Flavor | None = None
    """The flavor that ``pool`` names, if it names one; the pods must run on its nodes."""
    members: int | None = None
    """Granted members of an elastic gang; None for other requests."""


@dataclass(frozen=True)
class DeferralReason:
    """One reason, with a sentence that gives its numbers."""

    reason: AdmissionReason
    message: str


@dataclass(frozen=True)
class Deferred:
    """The request has to wait and is repeated. ``position`` counts from 1 among the competing requests.

    ``reason`` and ``message`` are the first of ``reasons``, which lists every obstacle.
    """

    reason: AdmissionReason
    message: str
    position: int
    reasons: tuple[DeferralReason, ...] = field(default=(), compare=False)
    expected_start: datetime | None = field(default=None, compare=False)
    """Latest expected start; None if no reservation gives one."""


@dataclass(frozen=True)
class Rejected:
    """The request can never be admitted under the current queues."""

    reason: AdmissionReason
    message: str


Admission = Admitted | Deferred | Rejected


@dataclass(frozen=True)
class LedgerState:
    """Leases, pending requests in order of arrival, decayed usage of ended leases, and the queue rules that apply.

    A replay key has at most one lease, and a step of a workflow at most one pending request. Two states are equal if
    they have the same entries, whatever the rules: a ledger stores the entries only.
    """

    leases: tuple[Lease, ...] = ()
    pending: tuple[PendingRequest, ...] = ()
    history: tuple[EndedUsage, ...] = ()
    queues: QueueRules = field(default=None, compare=False)

    @property
    def next_arrival(self) -> int:
        """Arrival number of the next pending request. The number of a request that left the end may be reused."""
        return self.pending[-1].arrival + 1 if self.pending else 1
