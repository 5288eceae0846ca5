"""The words of admission, shared by the decision, the ledger that records it and the plugin.

`AdmissionBackend` is the one seam between the plugin and whoever decides on
GPUs, so that another authority can take the place of the built-in ledger.

How many members an elastic gang asks for: what of the author's wish stands in a request.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tiphys.protocol.step_spec import GpuRequest, SpotUse
from tiphys_plugin.quota.flavors import Flavor
from tiphys_plugin.quota.queues import QueueRules

if TYPE_CHECKING:
    from tiphys_plugin.quota.scheduler.fair_share import Consumed


class Reason(StrEnum):
    """Why GPUs were not given; Kueue's names where it has them."""

    QUEUE_UNKNOWN = "QueueUnknown"
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
    WAITING_FOR_PREEMPTED_CHECKPOINT = "WaitingForPreemptedCheckpoint"
    MIN_RUNTIME_PROTECTED = "MinRuntimeProtected"
    MISCONFIGURED = "Misconfigured"
    LEDGER_FULL = "LedgerFull"


@dataclass(frozen=True)
class LeaseRequest:
    """GPUs for one attempt, all of them or none. ``uid``, ``step`` and ``node`` are the replay key.

    From ``queue`` on the fields are those of `GpuRequest`, what the author of the step wants.
    """

    uid: str
    step: str
    node: str
    namespace: str
    workflow: str
    instance: str
    """Node name of the step within the workflow: its pods are found by it."""
    run: str
    attempt: int
    queue: str
    gpus: int
    gpu_type: str | None = None
    min_gpu_memory_mb: int | None = None
    priority: int = 0
    seconds: int | None = None
    """The longest that an attempt can hold them, since it is ended then; None: nobody said."""
    members: int = 1
    """Pods that share the ``gpus`` evenly: a gang, of which all start or none."""
    tensor_parallel: int = 1
    """So many members after one another form a group that stays within one NVLink domain."""
    spot: SpotUse | Literal["avoided"] = "no"
    """Whether flavors of nodes that may be taken away are for it; ``avoided``: only where no others could serve it."""
    attained: float = 0.0
    """GPU-seconds that earlier attempts of the step have had; counted in queues that go by it, and 0 in others."""
    first_start: float | None = None
    """When the first of these attempts got its GPUs, in seconds of Unix time; counted where ``attained`` is."""
    min_members: int | None = None
    """An elastic gang goes on while it has so many members; who waits asks for as few. None: it needs all of them."""
    max_members: int | None = None
    """So many members an elastic gang starts with if there is room for them at its turn."""

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.uid, self.step, self.node)

    @property
    def larger(self) -> "Iterator[LeaseRequest]":
        """The same for more members, as far as it may have more: for the most of them first."""
        for members in range(self.max_members or self.members, self.members, -1):
            if members % self.tensor_parallel == 0:
                yield self.of(members)

    def of(self, members: int) -> "LeaseRequest":
        """The same for so many members."""
        return replace(self, members=members, gpus=self.gpus // self.members * members)


@dataclass(frozen=True)
class Leaving:
    """An attempt was asked to save and to go, for the step ``step`` of the workflow ``uid``.

    Until its GPUs are back nothing is free; at ``deadline`` its pods are ended, whether or not it has saved.
    """

    uid: str
    step: str
    asked_at: datetime
    deadline: datetime
    keeps: int | None = None
    """So many members of an elastic gang stay, and it goes on with them; None: it leaves as a whole."""

    def is_for(self, request: "LeaseRequest") -> bool:
        return (self.uid, self.step) == (request.uid, request.step)


@dataclass(frozen=True)
class Lease:
    """GPUs that an attempt holds. From ``check_at`` on, a sweep looks whether it still lives."""

    id: str
    request: LeaseRequest
    pool: str
    """Flavor or GPU type that it was given; ``*`` from the quota of all types that its queue does not name."""
    granted_at: datetime
    check_at: datetime
    nodes: tuple[str, ...] = ()
    """The node of each member; empty where no nodes are declared."""
    leaving: Leaving | None = None


@dataclass(frozen=True)
class Waiting:
    """A deferred request. It holds nothing but its place, while it goes on asking."""

    request: LeaseRequest
    arrival: int
    since: datetime
    seen_at: datetime
    promised_at: datetime | None = None
    """When somebody was gone who was asked to leave for it: what came free is kept for it until it asks."""


@dataclass(frozen=True)
class Admitted:
    """The GPUs are reserved. ``pool`` is a flavor or a GPU type, or ``*`` when the ledger did not choose one."""

    lease: str
    pool: str
    waited_seconds: float = 0.0
    nodes: tuple[str, ...] = ()
    """The node of each member; empty where no nodes are declared."""
    flavor: Flavor | None = None
    """What ``pool`` names, where it is a flavor: its pods have to go there."""
    members: int | None = None
    """How many there are, where the request left that open."""


@dataclass(frozen=True)
class Because:
    """One reason, with a sentence that has its numbers."""

    reason: Reason
    message: str


@dataclass(frozen=True)
class Deferred:
    """Not now: ask again. ``position`` counts from 1 within the requests that compete.

    ``reason`` and ``message`` tell what weighs most, ``because`` everything that stands in the way.
    """

    reason: Reason
    message: str
    position: int
    because: tuple[Because, ...] = field(default=(), compare=False)
    start: datetime | None = field(default=None, compare=False)
    """When it is expected to start at the latest; None where that cannot be said."""


@dataclass(frozen=True)
class Rejected:
    """Never, as long as the queues are what they are."""

    reason: Reason
    message: str


Admission = Admitted | Deferred | Rejected


@dataclass(frozen=True)
class Snapshot:
    """What is held and what waits, at one instant, the queues that it is held under, and what was held before."""

    leases: tuple[Lease, ...]
    waiting: tuple[Waiting, ...]
    queues: QueueRules = field(default=None, compare=False)
    history: "tuple[Consumed, ...]" = field(default=(), compare=False)


class AdmissionBackend(Protocol):
    """Decides on GPUs and remembers it. Raises `StoreError` when it cannot answer."""

    def request(self, request: LeaseRequest) -> Admission:
        """Decide and record in one step. A repeated request gets the lease it already holds."""

    def restore(self, lease: str, request: LeaseRequest, gpu_type: str | None, nodes: tuple[str, ...] = ()) -> None:
        """Record a lease that was given before, whether or not it fits; nothing if it is recorded.

        ``gpu_type`` is the type that was chosen for a request without one, ``nodes`` those of its members.
        """

    def withdraw(self, uid: str) -> None:
        """Forget the waiting requests of a workflow that will not ask again."""

    def release(self, lease: str) -> None:
        """Give the GPUs back; call it once the pods are gone. No error if they were given back before."""

    def shrink(self, lease: str, members: int, nodes: tuple[str, ...] = ()) -> None:
        """Give back what other members than ``members`` of an elastic gang had; call it once their pods are gone.

        ``nodes`` are those of the members that are left, where nodes are declared. No error if the lease is not
        larger, is over, or holds nothing on one of ``nodes``.
        """

    def release_workflow(self, uid: str) -> None:
        """Withdraw the workflow's requests and have its leases checked at the next `sweep`."""

    def ask_to_leave(self, waiting: tuple[str, str], grace_seconds: Mapping[str, float]) -> tuple[Lease, ...]:
        """Mark leases as leaving for the step (uid, step) that waits: all of them, if every law of preemption is kept
        by what is there now, or none. ``grace_seconds`` names them by id, with the time that each may take. Those that
        were marked.
        """

    def sweep(self, is_gone: Callable[[Lease], bool]) -> list[Lease]:
        """Release the leases whose check is due and of which ``is_gone`` is true; the others are kept."""

    def snapshot(self) -> Snapshot:
        """Leases and waiting requests, without changing either."""


def asked_for(gpu: GpuRequest, members: int | None = None) -> dict[str, Any]:
    """The fields of a `LeaseRequest` that the author of the step decides.

    An elastic gang asks for the fewest members that it can do with, and says how
    many it would take. With ``members`` it is the request of one that has so many.
    """
    fields = gpu.model_dump()
    if gpu.min_members is None:
        return fields
    asked = members or gpu.min_members
    each = gpu.gpus // gpu.members
    return {**fields, "gpus": each * asked, "members": asked, "max_members": gpu.members}
