"""Lease requests, leases, pending requests and admission decisions.

The scheduler, the ledgers and the plugin share these records. `AdmissionBackend`
is the only interface between the plugin and the authority that decides on GPUs,
so another authority can replace the built-in ledger.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Literal, Protocol

from tiphys.errors import StoreError
from tiphys.protocol.fan_out import find_item, step_display_name
from tiphys.protocol.step_spec import GpuRequest, Proximity, SpotUse
from tiphys_plugin.quota.flavors import Flavor
from tiphys_plugin.quota.queues import QueueRules


@dataclass(frozen=True)
class EndedUsage:
    """Decayed mean usage that ended leases left to a queue: GPUs of a pool, as of ``measured_at``."""

    queue: str
    pool: str
    gpus: float
    measured_at: datetime


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
    gpus: int
    gpu_type: str | None = None
    min_gpu_memory_mb: int | None = None
    priority: int = 0
    seconds: int | None = None
    """Time limit of an attempt, after which it is ended; None: the author declared none."""
    members: int = 1
    """Pods that share the ``gpus`` evenly: a gang, which starts as a whole or not at all."""
    tensor_parallel: int = 1
    """Size of the groups of consecutive members that stay within one NVLink domain."""
    spot: SpotUse | Literal["avoided"] = "no"
    """Whether the request may use flavors of spot nodes; ``avoided``: only if no other flavor could serve it."""
    attained: float = 0.0
    """Attained service: GPU-seconds of earlier attempts of the step. 0 in queues without ``order: attained``."""
    first_start: float | None = None
    """Start of the first of these attempts, in Unix seconds; None where ``attained`` is not counted."""
    min_members: int | None = None
    """Fewest members with which an elastic gang continues, and with which it queues. None: the gang is not elastic."""
    max_members: int | None = None
    """Members with which an elastic gang starts if they fit at its turn."""
    item_index: int | None = None
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
    def from_gpu_request(
        cls,
        gpu: GpuRequest,
        *,
        uid: str,
        step: str,
        node: str,
        namespace: str,
        workflow: str,
        instance: str,
        run: str,
        attempt: int,
        members: int | None = None,
        avoid_spot: bool = False,
        attained: float = 0.0,
        first_start: float | None = None,
        avoided_nodes: tuple[str, ...] = (),
    ) -> "LeaseRequest":
        """The request of one attempt for the GPUs that the author of the step asked for.

        An elastic gang requests its fewest members, and names the most that it can use.

        Args:
            gpu: GPUs of the step.
            uid: UID of the workflow.
            step: Name of the step.
            node: Name of the admit node.
            namespace: Namespace of the workflow.
            workflow: Name of the workflow.
            instance: Node name of the step within the workflow.
            run: Name of the run.
            attempt: Number of the attempt.
            members: Members that an elastic gang already has; None: its fewest. Other steps ignore it.
            avoid_spot: Use flavors of spot nodes only where no others could serve the request.
            attained: GPU-seconds that earlier attempts of the step held.
            first_start: When the first of these attempts got its GPUs, in seconds of Unix time.
            avoided_nodes: Nodes to use only if no others can serve the request.
        """
        is_elastic = gpu.min_members is not None
        item = find_item(instance)
        requested_members = (members or gpu.min_members or gpu.members) if is_elastic else gpu.members
        return cls(
            uid=uid,
            step=step,
            node_hash=hash_node_name(node),
            namespace=namespace,
            workflow=workflow,
            instance_hash=hash_node_name(instance),
            run=run,
            attempt=attempt,
            queue=gpu.queue,
            gpus=gpu.gpus_for(requested_members),
            gpu_type=gpu.gpu_type,
            gpu_types=gpu.gpu_types_by_speed,
            min_gpu_memory_mb=gpu.min_gpu_memory_mb,
            priority=gpu.priority,
            seconds=gpu.seconds,
            members=requested_members,
            tensor_parallel=gpu.tensor_parallel,
            within=gpu.within,
            avoided_nodes=avoided_nodes,
            spot="avoided" if avoid_spot else gpu.spot,
            attained=attained,
            first_start=first_start,
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


@dataclass(frozen=True)
class PreemptionNotice:
    """Mark of a victim: its attempt was asked to save and exit for the step ``step`` of the workflow ``uid``.

    The lease holds its GPUs until its pods have ended. At ``deadline`` the pods are killed, saved or not.
    """

    uid: str
    step: str
    asked_at: datetime
    deadline: datetime
    keeps: int | None = None
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


@dataclass(frozen=True)
class Lease:
    """GPUs that an attempt holds. From ``check_at`` on, `AdmissionBackend.release_dead_leases` checks that it lives."""

    id: str
    request: LeaseRequest
    pool: str
    """Granted flavor or GPU type; ``*``: from the quota for all types that the queue does not name."""
    granted_at: datetime
    check_at: datetime
    nodes: tuple[str, ...] = ()
    """The node of each member; empty where no nodes are declared."""
    preemption: PreemptionNotice | None = None
    flavor: Flavor | None = None
    """The granted flavor, if its declaration is not among the queue rules of the ledger."""


@dataclass(frozen=True)
class PendingRequest:
    """A deferred request. It holds no GPUs, and keeps its place as long as the step repeats the request."""

    request: LeaseRequest
    arrival: int
    since: datetime
    seen_at: datetime
    promised_at: datetime | None = None
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
class LedgerSnapshot:
    """Leases, pending requests, queue rules and usage history at one instant."""

    leases: tuple[Lease, ...]
    pending: tuple[PendingRequest, ...]
    queues: QueueRules = field(default=None, compare=False)
    history: "tuple[EndedUsage, ...]" = field(default=(), compare=False)


class LedgerLostError(StoreError):
    """The ledger was deleted or replaced, or is not there; nothing is granted until it is recovered."""


class AdmissionBackend(Protocol):
    """Decides on lease requests and records the decisions. Every method raises `StoreError` if it cannot answer."""

    def request(self, request: LeaseRequest) -> Admission:
        """Decide and record in one step. A repeated request gets the lease that it already holds."""

    def restore(
        self,
        lease: str,
        request: LeaseRequest,
        gpu_type: str | None,
        nodes: tuple[str, ...] = (),
        running_members: int | None = None,
    ) -> int:
        """Record a lease that was granted before; no effect if the attempt has one. Returns the GPUs of its lease.

        The first ``running_members`` members (None: all) hold their GPUs, which count even beyond a quota. The others
        count only if the quota has room for the whole lease. A lease is never recorded in a queue that the namespace
        may not use.

        Args:
            lease: Id of the lease.
            request: What the lease was granted for.
            gpu_type: The type that was chosen for a request without one.
            nodes: The node of each member.
            running_members: Members whose pods run.
        """

    def withdraw(self, uid: str) -> None:
        """Drop the pending requests of a workflow that will not repeat them."""

    def release(self, lease: str) -> None:
        """Return the GPUs of a lease whose pods are gone. No error if they were returned before."""

    def shrink(self, lease: str, members: int, nodes: tuple[str, ...] = ()) -> None:
        """Return the GPUs of lost members of an elastic gang, of which ``members`` remain and the other pods are gone.

        ``nodes`` are the nodes of the remaining members, where nodes are declared. No error if the lease is not
        larger, has ended, or holds nothing on one of ``nodes``.
        """

    def release_workflow(self, uid: str) -> None:
        """Withdraw the requests of a workflow, and make its leases due for the next `release_dead_leases`."""

    def mark_preempted(self, preemptor: tuple[str, str], grace_seconds: Mapping[str, float]) -> tuple[Lease, ...]:
        """Mark leases as victims of ``preemptor``, a pending `LeaseRequest.workflow_step`: all of them or none.

        They are marked only if the newest ledger state keeps every rule of preemption. ``grace_seconds`` gives the
        termination grace period by lease id. Returns the marked leases.
        """

    def release_dead_leases(
        self, is_gone: Callable[[Lease], bool], leases: Sequence[Lease] | None = None
    ) -> list[Lease]:
        """Release and return those of ``leases`` for which ``is_gone`` is true; the others are kept.

        None: those whose check is due.
        """

    def snapshot(self) -> LedgerSnapshot:
        """Leases, pending requests, queue rules and usage history; changes nothing."""
