"""Which queue may use how many GPUs: the one file that an administrator writes, and the spec of a `GPULedger`.

    queues:
      - name: research
        gpus: {A100: 8, "*": 4}     # 8 A100, and 4 of all other types together
        cohort: lab                 # optional: who lends to each other what is free
        borrowing_limit: {A100: 4}  # optional: no more than so many of others
        lending_limit: {A100: 6}    # optional: no more than so many to others
        weight: 2                   # optional: twice the share of what is left over
      - name: nightly
        gpus: {A100: 4, "*": 2}
        cohort: lab
        stopped: true               # optional: nothing new starts
        preempts_lower_priority: true  # optional: asks its own trainings of lower priority to save and go
        reclaims: true              # optional: asks those that borrow its quota to save and go
        min_runtime_seconds: 1800   # optional: its trainings are asked no earlier than so long after their start
        order: attained             # optional: who has had the least GPU time goes first, not who came first
        attained_gpu_hours: [1, 8, 64]  # optional: where one level of that ends and the next begins
        preempts_longer: true       # optional: asks its own trainings of a higher level to save and go
    inventory:                      # optional: what the cluster has
      A100: {count: 16, memory_mb: 81920}

In the place of the inventory, the nodes can be declared, and then each pod is given one:

    nodes:
      - {name: n1, gpu_type: A100, gpus: 8, rack: r1}
      - {name: n2, gpu_type: A100, gpus: 8, rack: r1}
    placement: fragmentation        # optional: keep holes large for requests as they usually come

or be those that the cluster has now, see `tiphys_plugin.quota.flavors`:

    cluster_nodes: {}

GPUs of one type can be told apart as `flavors`, see `tiphys_plugin.quota.flavors`; then a quota is of a flavor.

Without a queue file every queue name is accepted and nothing is limited.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from tiphys.errors import UsageError
from tiphys_plugin.quota.flavors import ClusterNodes, Flavor, Flavors, complaint
from tiphys_plugin.quota.placement.inventory import Free, Inventory
from tiphys_plugin.quota.placement.model import Ask, Node
from tiphys_plugin.quota.placement.scoring import Fragmentation, Policy, best_fit

ANY_TYPE = "*"


GPU_HOURS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0)
"""Each level is four times as long as the one before: few enough that a training is seldom asked to go, and so
short at the begin that who only tries something out hardly waits."""

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Queue(BaseModel):
    """``gpus`` is the quota by flavor or GPU type; ``*`` is shared by all types that are not named and have no flavors.

    Flavors are tried in the order of ``flavor_order``, then as they are declared:
    the first that suits and has room within the quota, else the first from which
    it can borrow (Kueue's flavor fungibility with ``whenCanBorrow: TryNextFlavor``).

    Queues of one ``cohort`` lend each other what is free. ``borrowing_limit``
    is the most that a queue may hold beyond its quota, ``lending_limit`` the
    most of its quota that others may hold, by the same types; a type that is
    not named there has no such limit. What is free goes first to whoever stays
    within its quota, then to the queue that uses least for its ``weight``.
    ``stopped`` admits nobody; what runs goes on.

    Nobody that runs has to go for another unless a queue says so. With
    ``preempts_lower_priority`` a request that waits has trainings of its own
    queue asked to save and go that have a strictly lower priority. With
    ``reclaims`` one that stays within the quota of its queue has trainings asked
    of queues of its cohort that hold more than their own quota. Trainings of a
    queue are left alone for ``min_runtime_seconds`` after they got their GPUs.
    Source of the words: Kueue, "Cluster Queue" (withinClusterQueue,
    reclaimWithinCohort).

    With the ``order`` ``attained``, who has had the least GPU time goes first
    among those of one priority, which needs nobody to know how long a training
    takes. GPU time is compared by levels that begin at ``attained_gpu_hours``,
    so that trainings that had about as much keep the order in which they began.
    With ``preempts_longer`` a request has trainings asked of its own queue that
    have reached a higher level. Source: J. Gu et al., "Tiresias", NSDI 2019
    (discretized two-dimensional least attained service).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    gpus: dict[str, NonNegativeInt]
    cohort: str | None = None
    borrowing_limit: dict[str, NonNegativeInt] = {}
    lending_limit: dict[str, NonNegativeInt] = {}
    flavor_order: tuple[str, ...] = ()
    weight: _Positive = 1.0
    stopped: bool = False
    preempts_lower_priority: bool = False
    reclaims: bool = False
    min_runtime_seconds: NonNegativeInt = 0
    order: Literal["arrival", "attained"] = "arrival"
    attained_gpu_hours: tuple[_Positive, ...] = Field(default=GPU_HOURS, min_length=1, max_length=20)
    preempts_longer: bool = False

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
    def _levels_rise(self) -> "Queue":
        if list(self.attained_gpu_hours) != sorted(set(self.attained_gpu_hours)):
            raise ValueError(f"queue {self.name!r} has attained_gpu_hours that do not rise from one to the next")
        if self.order != "attained":
            levels = "attained_gpu_hours" if self.attained_gpu_hours != GPU_HOURS else None
            if (field := "preempts_longer" if self.preempts_longer else levels) is not None:
                raise ValueError(f"queue {self.name!r} has {field} and goes by arrival; add `order: attained`")
        return self

    @property
    def preempts(self) -> bool:
        """Whether anybody that runs may have to go for one of its requests."""
        return self.preempts_lower_priority or self.reclaims or self.preempts_longer

    def level(self, gpu_seconds: float) -> int:
        """The level of a training that has had so much; 0 for all of them where the order is that of arrival."""
        return bisect_right(self.attained_gpu_hours, gpu_seconds / 3600) if self.order == "attained" else 0

    def keeps(self, pool: str) -> int:
        """GPUs of its quota that nobody else may hold."""
        lent = self.lending_limit.get(pool, self.gpus[pool]) if self.cohort is not None else 0
        return self.gpus[pool] - lent

    def ceiling(self, pool: str) -> float:
        """The most it may hold, if the others of its cohort lend that much."""
        if self.cohort is None:
            return self.gpus[pool]
        return self.gpus[pool] + self.borrowing_limit.get(pool, math.inf)


class Stock(BaseModel):
    """GPUs of one flavor or type that the cluster has; ``memory_mb`` is the memory of each, None if not declared."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    count: NonNegativeInt
    memory_mb: PositiveInt | None = None


class Queues(BaseModel):
    """A queue file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    queues: tuple[Queue, ...]
    flavors: tuple[Flavor, ...] = ()
    """Types that none of them names mean themselves."""
    inventory: dict[str, Stock] | None = None
    """By flavor or type. None: not declared, and only quotas are held, unless there are ``nodes``."""
    nodes: tuple[Node, ...] | None = None
    """None: not declared, and on which nodes pods run is left to Kubernetes."""
    cluster_nodes: ClusterNodes | None = None
    """None: the nodes of the cluster are not looked at."""
    placement: Literal["best-fit", "fragmentation"] = "best-fit"
    """Whether a pod takes the smallest hole that fits, or one where it breaks up least of what others want."""
    typical_gpus: dict[PositiveInt, _Positive] = {1: 1, 2: 1, 4: 1, 8: 1}
    """What pods usually ask for, for the placement by fragmentation: GPUs, and how often beside the others."""
    usage_half_life_hours: _Positive = 24.0
    """After so long, what a queue has used counts half when queues are compared."""
    force_release_after_seconds: PositiveInt | None = None
    """GPUs of an attempt that is over come back after so long though its pods were not seen to end; None: never."""
    _changing: bool = PrivateAttr(default=False)

    @model_validator(mode="after")
    def _names_are_unique(self) -> "Queues":
        names = [queue.name for queue in self.queues]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"queue {twice[0]!r} is declared twice")
        return self

    @model_validator(mode="after")
    def _gpus_are_declared_once(self) -> "Queues":
        if self.nodes is not None and self.inventory is not None:
            raise ValueError("declare the inventory or the nodes: the inventory of declared nodes is counted")
        if self.cluster_nodes is not None and (self.nodes is not None or self.inventory is not None):
            raise ValueError("cluster_nodes takes the place of nodes and inventory; declare one of them")
        _ = self.fleet  # refuses nodes that it cannot tell apart
        return self

    @model_validator(mode="after")
    def _flavors_are_told_apart(self, info: ValidationInfo) -> "Queues":
        if (wrong := complaint(self.flavors)) is not None:
            raise ValueError(wrong)
        for queue in self.queues:
            self._check_names(f"queue {queue.name!r}", queue.gpus)
            if queue.flavor_order and not self.flavors:
                raise ValueError(f"queue {queue.name!r} has a flavor_order, and there are no flavors; declare them")
        self._check_names("the inventory", self.inventory or {})
        if self.flavors and self.stock is not None and not (info.context or {}).get("changing"):
            self._check_existence(self.stock)
        return self

    def _check_names(self, where: str, names: Iterable[str]) -> None:
        for name in names:
            if name in self.kinds.of_type and name not in self.kinds.by_name:
                known = ", ".join(one.name for one in self.kinds.of_type[name])
                raise ValueError(f"{where} names {name}, which has flavors; name one of them: {known}")

    def _check_existence(self, stock: Mapping[str, Stock]) -> None:
        """Of GPUs that somebody declared, so that what is not there was forgotten, or has another name."""
        if missing := [one.name for one in self.flavors if one.name not in stock]:
            raise ValueError(f"there are no GPUs of flavor {missing[0]!r}; declare them, or drop the flavor")
        for queue in self.queues:
            if unknown := [name for name in queue.gpus if name != ANY_TYPE and name not in stock]:
                raise ValueError(
                    f"queue {queue.name!r} names {unknown[0]}, which is no flavor and no type of the GPUs that are "
                    f"declared; these are: {', '.join(stock)}"
                )

    def find(self, name: str) -> Queue | None:
        return self._by_name.get(name)

    def most(self, queue: Queue, pool: str) -> int:
        """The most of ``pool`` that ``queue`` can ever hold."""
        if queue.cohort is None:
            return queue.gpus[pool]
        return int(min(queue.ceiling(pool), queue.keeps(pool) + self.lent[queue.cohort, pool]))

    def shared(self, queue: Queue, pool: str) -> int:
        """All quotas of ``pool`` in the cohort of ``queue``; its own without one."""
        return queue.gpus[pool] if queue.cohort is None else self._nominal[queue.cohort, pool]

    @property
    def preempts(self) -> bool:
        """Whether anybody that runs may have to go for another."""
        return any(queue.preempts for queue in self.queues)

    def on(self, nodes: Iterable[Node] | None, *, changing: bool = False) -> "Queues":
        """The same quotas on these nodes, whatever was declared; None: on no nodes that are known.

        ``changing`` if they are those of today, so that what they could never serve another day's might.
        """
        declared = {name: getattr(self, name) for name in Queues.model_fields}
        where = {"nodes": None if nodes is None else tuple(nodes), "inventory": None, "cluster_nodes": None}
        made = Queues.model_validate({**declared, **where}, context={"changing": changing})
        made._changing = changing
        return made

    @property
    def changing(self) -> bool:
        """Whether the nodes are those of today."""
        return self._changing

    @cached_property
    def quotas(self) -> "Queues":
        """The same, whatever GPUs exist."""
        return self.on(None)

    @cached_property
    def kinds(self) -> Flavors:
        """What the flavors mean. A kind of GPUs is a flavor, or a type that means itself."""
        return Flavors(self.flavors)

    @cached_property
    def foreign(self) -> Counter[str]:
        """GPUs that are used by what Tiphys did not start, by kind."""
        used: Counter[str] = Counter()
        for node in self._nodes_by_kind or ():
            if node.foreign_gpus and node.gpu_type:
                used[node.gpu_type] += node.foreign_gpus
        return used

    @cached_property
    def stock(self) -> dict[str, Stock] | None:
        """GPUs that exist, by kind, those of cordoned nodes included; None if nobody said."""
        nodes, inventory = self._nodes_by_kind, self.inventory
        if nodes is None:
            return inventory and {kind: self._remembered(kind, stock) for kind, stock in inventory.items()}
        kinds = sorted({node.gpu_type for node in nodes if node.gpus})
        return {kind: _stock([node for node in nodes if node.gpus and node.gpu_type == kind]) for kind in kinds}

    @cached_property
    def types(self) -> frozenset[str]:
        """GPU types of the stock."""
        return frozenset(self.kinds.type_of(kind) for kind in self.stock or ())

    @cached_property
    def fleet(self) -> Inventory | None:
        """The nodes, as placements look at them; None if nobody declared them."""
        return None if self._nodes_by_kind is None else Inventory(self._nodes_by_kind)

    @cached_property
    def _nodes_by_kind(self) -> tuple[Node, ...] | None:
        """The nodes, each with the kind of its GPUs for a type; those of no flavor offer none."""
        if self.nodes is None or not self.flavors:
            return self.nodes
        return tuple(map(self._by_kind, self.nodes))

    def _by_kind(self, node: Node) -> Node:
        kind = self.kinds.kind_of(node)
        if not kind:
            return node.model_copy(update={"gpus": 0, "gpu_type": "", "foreign_gpus": 0})
        return node.model_copy(update={"gpu_type": kind, "memory_mb": node.memory_mb or self._declared_memory(kind)})

    def _remembered(self, kind: str, stock: Stock) -> Stock:
        memory = stock.memory_mb or self._declared_memory(kind)
        return stock if memory == stock.memory_mb else Stock(count=stock.count, memory_mb=memory)

    def _declared_memory(self, kind: str) -> int | None:
        flavor = self.kinds.by_name.get(kind)
        return None if flavor is None else flavor.memory_mb

    @cached_property
    def drawn(self) -> dict[tuple[object, ...], list[str]]:
        """What requests may draw from where there are flavors, as it was found; see `ledger.pools`."""
        return {}

    @cached_property
    def terms(self) -> dict[tuple[object, ...], object]:
        """What requests meet under these queues, as it was found; see `ledger.terms`."""
        return {}

    @cached_property
    def emptied(self) -> Free | None:
        """All of the nodes, as if nobody used them; to look at."""
        return None if self.fleet is None else Free(self.fleet, cordoned_too=True)

    @cached_property
    def existing(self) -> float:
        """GPUs of all types that exist; infinite if nobody said."""
        return math.inf if self.stock is None else sum(stock.count for stock in self.stock.values())

    @cached_property
    def placing(self) -> Policy:
        """Which of the nodes that fit is taken."""
        usual = {Ask(gpus): weight for gpus, weight in self.typical_gpus.items()}
        return Policy(Fragmentation(usual) if self.placement == "fragmentation" and usual else best_fit)

    @property
    def usage_half_life(self) -> timedelta:
        return timedelta(hours=self.usage_half_life_hours)

    @cached_property
    def lent(self) -> Counter[tuple[str, str]]:
        """GPUs that the queues of a cohort may lend to each other, by cohort and type."""
        return self._sum(lambda queue, pool: queue.gpus[pool] - queue.keeps(pool))

    @cached_property
    def _nominal(self) -> Counter[tuple[str, str]]:
        return self._sum(lambda queue, pool: queue.gpus[pool])

    @cached_property
    def _by_name(self) -> Mapping[str, Queue]:
        return {queue.name: queue for queue in self.queues}

    def _sum(self, of: Callable[[Queue, str], int]) -> Counter[tuple[str, str]]:
        total: Counter[tuple[str, str]] = Counter()
        for queue in self.queues:
            for pool in queue.gpus if queue.cohort is not None else ():
                total[queue.cohort or "", pool] += of(queue, pool)
        return total

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(queue.name for queue in self.queues)


@dataclass(frozen=True)
class Misconfigured:
    """Queues that somebody declared and nobody can read. Nothing new is granted until they are repaired."""

    why: str


QueueRules = Queues | Misconfigured | None
"""What a decision goes by; None: nothing is limited."""


def _stock(nodes: list[Node]) -> Stock:
    memories = [node.memory_mb for node in nodes]
    known = [memory for memory in memories if memory is not None]
    return Stock(count=sum(node.gpus for node in nodes), memory_mb=max(known) if len(known) == len(memories) else None)


def in_words(gpus: int, gpu_type: str | None) -> str:
    """GPUs for a person: ``4 A100``; ``1 GPU`` or ``2 GPUs`` where the type does not matter."""
    return f"{gpus} {gpu_type or ('GPU' if gpus == 1 else 'GPUs')}"


def parse_queues(document: object, source: str) -> Queues:
    """Read what a queue file holds; ``source`` names it in errors.

    Raises:
        UsageError: a field is wrong; the message names it.
    """
    try:
        return Queues.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UsageError(
            f"{source}: {field}: {first['msg']}; expected `queues: [{{name: research, gpus: {{A100: 8}}}}]`"
        ) from error


def load_queues(path: Path) -> Queues:
    """Read a queue file.

    Raises:
        UsageError: it is missing, is not YAML, or a field is wrong; the message names the field.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"queue file {path} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"queue file {path} is not valid YAML: {' '.join(str(error).split())}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"queue file {path} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    return parse_queues(document, f"queue file {path}")
