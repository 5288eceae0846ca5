"""Quota and rules of one GPU queue, as an administrator declares them.

`docs/queues.md` shows a queue with all its fields.
"""

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, model_validator

from tiphys.protocol.step_spec import Priority
from tiphys_plugin.quota.placement.model import Name

ANY_TYPE = "*"
"""Pool of all GPU types that the queue does not name."""

DEFAULT_LEVEL_GPU_HOURS = (1.0, 10.0, 100.0, 1000.0)
"""Each level is ten times as long as the one before. Few levels keep preemptions rare, because trainings of one level
do not replace each other; a short first level lets short experiments start soon."""
_HOURS_PER_GPU = 0.1
"""Part of the hours at which its level ends that a training yields to others of its level, for each of its GPUs."""
PREEMPTIBLE_MIN_RUNTIME_SECONDS = 1200
"""About four times what a preemption usually costs: a save of 30 s, and a restart of 5 minutes."""
MIN_SETTLED_SECONDS = 3600
"""A move costs a training as much as a preemption, and nothing is gained for it: at most a tenth of its time."""
DEFAULT_BACKFILL_HOURS = 48.0
"""On two public traces the mean completion is less than 1.4 times that of a queue that passes over blocked requests."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
StrictCount = Annotated[int, Field(strict=True, ge=0)]
"""A number of GPUs, and no text or truth value that could be read as one."""
_Namespace = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
"""A name and never a pattern: an account that can create namespaces could create one that matches."""


class Queue(BaseModel):
    """Quota and rules of one queue.

    ``gpus`` is the quota by flavor or GPU type. ``*`` is shared by all types that
    the queue does not name and that have no flavors.

    The scheduler tries flavors in the order of ``flavor_order``, then in that of their
    declaration. It takes the first with room within the quota, else the first from which
    the queue can borrow (Kueue's ``whenCanBorrow: TryNextFlavor``).

    ``namespaces`` are the owners of the queue: only their requests are accepted. None:
    the queue is shared by all namespaces. ``max_priority`` is the highest priority of
    a request. A request beyond either limit is rejected, because a silently lowered
    priority would only show as a wait.

    Queues of one ``cohort`` lend each other free GPUs. ``borrowing_limit`` is the most that
    a queue may hold beyond its quota, ``lending_limit`` the most of its quota that other
    queues may hold, by pool; a pool that is not named has no limit. Requests within their
    quota go first, then those of the queue that uses least for its ``weight``. A ``stopped``
    queue admits nothing; its running trainings continue.

    With ``preempts_lower_priority`` a pending request preempts trainings of its own
    queue that have a strictly lower priority. With ``reclaims`` a pending request
    within the quota of its queue preempts trainings of queues of its cohort that
    hold more than their own quota (Kueue's withinClusterQueue and reclaimWithinCohort).
    Trainings of a queue are protected for ``min_runtime_seconds`` after their grant.

    With ``order: attained``, the request with the least attained service goes first
    within one priority, by levels that begin at ``attained_gpu_hours`` (J. Gu et al.,
    "Tiresias", NSDI 2019), and beyond the last one by time slices. Within a level the order
    is that of the first request, and a training with more GPUs counts as later
    (`yield_seconds`). With ``preempts_longer`` a
    pending request preempts trainings of its queue that have reached a higher level.

    ``backfill: bounded`` lets requests of the same priority behind a blocked one start
    on idle GPUs, until it has been the first of the queue for ``backfill_hours``.
    ``preemptible`` lets them start because the blocked one may preempt them.
    ``strict`` keeps for a blocked request all that it lacks.

    A queue that ``consolidates`` moves trainings to other nodes, by a preemption, if enough
    GPUs are idle for a blocked request and no nodes have room for it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name
    gpus: dict[str, StrictCount]
    namespaces: tuple[_Namespace, ...] | None = Field(default=None, min_length=1)
    max_priority: Priority | None = None
    cohort: Name | None = None
    borrowing_limit: dict[str, StrictCount] = {}
    lending_limit: dict[str, StrictCount] = {}
    flavor_order: tuple[str, ...] = ()
    weight: Positive = 1.0
    stopped: bool = False
    preempts_lower_priority: bool = False
    reclaims: bool = False
    min_runtime_seconds: NonNegativeInt | None = None
    """None: `PREEMPTIBLE_MIN_RUNTIME_SECONDS` with preemptible backfill, else 0."""
    order: Literal["arrival", "attained"] = "arrival"
    attained_gpu_hours: tuple[Positive, ...] = Field(default=DEFAULT_LEVEL_GPU_HOURS, min_length=1, max_length=20)
    preempts_longer: bool = False
    backfill: Literal["strict", "bounded", "preemptible"] | None = None
    """None: bounded, or preemptible with ``preempts_longer``."""
    backfill_hours: Annotated[float, Field(ge=0, allow_inf_nan=False)] = DEFAULT_BACKFILL_HOURS
    consolidates: bool | None = None
    """None: with preemptible backfill, the only one with which it can be true."""

    @model_validator(mode="after")
    def _limits_are_of_this_queue(self) -> "Queue":
        for field, limits in (("borrowing_limit", self.borrowing_limit), ("lending_limit", self.lending_limit)):
            if limits and self.cohort is None:
                raise ValueError(f"queue {self.name!r} has a {field} and no cohort to share with; add `cohort: NAME`")
            if unknown := sorted(limits.keys() - self.gpus.keys()):
                raise ValueError(f"queue {self.name!r} limits {unknown[0]} in its {field} and has no quota of it")
        if strange := [name for name in self.flavor_order if name not in self.gpus or name == ANY_TYPE]:
            raise ValueError(f"queue {self.name!r} has {strange[0]} in its flavor_order and no quota of it")
        if self.reclaims and self.cohort is None:
            raise ValueError(f"queue {self.name!r} reclaims and has no cohort to lend to; add `cohort: NAME`")
        for pool, limit in self.lending_limit.items():
            if limit > self.gpus[pool]:
                raise ValueError(f"queue {self.name!r} lends {limit} of its {self.gpus[pool]} {pool}")
        return self

    @model_validator(mode="after")
    def _order_is_consistent(self) -> "Queue":
        if self.backfill_hours != DEFAULT_BACKFILL_HOURS and not self.is_backfill_bounded:
            raise ValueError(f"queue {self.name!r} has backfill_hours, which only `backfill: bounded` goes by")
        if self.consolidates and not self.is_backfill_preemptible:
            raise ValueError(f"queue {self.name!r} consolidates, which needs `backfill: preemptible`")
        if list(self.attained_gpu_hours) != sorted(set(self.attained_gpu_hours)):
            raise ValueError(f"queue {self.name!r} has attained_gpu_hours that do not rise from one to the next")
        if self.order != "attained":
            levels = "attained_gpu_hours" if self.attained_gpu_hours != DEFAULT_LEVEL_GPU_HOURS else None
            if (field := "preempts_longer" if self.preempts_longer else levels) is not None:
                raise ValueError(f"queue {self.name!r} has {field} and goes by arrival; add `order: attained`")
        return self

    @property
    def preempts(self) -> bool:
        """Whether requests of this queue may preempt running trainings."""
        return self.preempts_lower_priority or self.reclaims or self.preempts_longer or self.is_backfill_preemptible

    @property
    def is_backfill_preemptible(self) -> bool:
        """Whether a blocked request may preempt trainings that started behind it."""
        return self.backfill == "preemptible" or (self.backfill is None and self.preempts_longer)

    @property
    def moves_trainings(self) -> bool:
        """Whether a blocked request may move trainings to other nodes."""
        return self.is_backfill_preemptible and self.consolidates is not False

    @property
    def is_backfill_bounded(self) -> bool:
        """Whether others may overtake the first blocked request of the queue, for ``backfill_hours``."""
        return self.backfill == "bounded" or (self.backfill is None and not self.preempts_longer)

    @property
    def protected_seconds(self) -> int:
        """How long a training of this queue cannot be preempted after the grant of its lease."""
        default = PREEMPTIBLE_MIN_RUNTIME_SECONDS if self.is_backfill_preemptible else 0
        return default if self.min_runtime_seconds is None else self.min_runtime_seconds

    @property
    def settled_seconds(self) -> int:
        """How long a training of this queue cannot be moved to other nodes after the grant of its lease."""
        return max(MIN_SETTLED_SECONDS, 3 * self.protected_seconds)

    def is_usable_by(self, namespace: str) -> bool:
        """Whether requests of the namespace may use the queue."""
        return self.namespaces is None or namespace in self.namespaces

    def accepts(self, namespace: str, priority: int) -> bool:
        """Whether a request of the namespace with this priority may use the queue."""
        return self.is_usable_by(namespace) and (self.max_priority is None or priority <= self.max_priority)

    def yield_seconds(self, level: int, gpus: int) -> float:
        """How much later than it did a training of this level counts as having asked; 0 with ``order: arrival``."""
        if self.order != "attained":
            return 0.0
        ends_at = [*self.attained_gpu_hours, 10 * self.attained_gpu_hours[-1]][min(level, len(self.attained_gpu_hours))]
        return _HOURS_PER_GPU * ends_at * 3600 * gpus

    def guaranteed_quota(self, pool: str) -> int:
        """GPUs of the quota that no other queue may hold."""
        lent = self.lending_limit.get(pool, self.gpus[pool]) if self.cohort is not None else 0
        return self.gpus[pool] - lent

    def max_with_borrowing(self, pool: str) -> float:
        """Most GPUs that the queue may hold if the other queues of its cohort lend enough."""
        if self.cohort is None:
            return self.gpus[pool]
        return self.gpus[pool] + self.borrowing_limit.get(pool, math.inf)
