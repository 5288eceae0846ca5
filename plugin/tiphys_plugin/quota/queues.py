"""All GPU queues of a ledger: the queue file of an administrator, and the spec of a `GPULedger`.

`docs/queues.md` shows one with all its fields.

Without a queue file every queue name is accepted and nothing is limited.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal
from weakref import WeakValueDictionary

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from tiphys.errors import UsageError
from tiphys.protocol.step_spec import GPU_TYPE_LABEL, is_label_value
from tiphys.protocol.validation import describe_mistake, locate_mistake
from tiphys.service.yaml_documents import UniqueKeyLoader, find_yaml_line, parse_yaml
from tiphys_plugin.quota.flavors import ClusterNodes, Flavor, FlavorSet, find_flavor_error
from tiphys_plugin.quota.placement.inventory import ClusterFreeCapacity, NodeInventory
from tiphys_plugin.quota.placement.model import GangRequest, GpuNode
from tiphys_plugin.quota.placement.scoring import PlacementPolicy, TypicalGpus, build_placement_policy
from tiphys_plugin.quota.queue import ANY_TYPE, Positive, Queue, StrictCount

DEFAULT_LEDGER_SHARE = 0.25


class InventoryEntry(BaseModel):
    """GPUs of one flavor or type that the cluster has; ``memory_mb`` is the memory of each, None if not declared."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    count: StrictCount
    memory_mb: PositiveInt | None = None


class Queues(BaseModel):
    """The content of a queue file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    queues: tuple[Queue, ...]
    flavors: tuple[Flavor, ...] = ()
    """A GPU type that no flavor names is its own kind."""
    inventory: dict[str, InventoryEntry] | None = None
    """By flavor or type. None: not declared; then only quotas limit, unless there are ``nodes``."""
    nodes: tuple[GpuNode, ...] | None = None
    """None: not declared; then Kubernetes alone places the pods."""
    cluster_nodes: ClusterNodes | None = None
    """How the nodes of the cluster are read; None: they are not read."""
    placement: Literal["best-fit", "fragmentation"] = "best-fit"
    """Best fit, or least fragmentation for the requests of ``typical_gpus`` (see `FragmentationScorer`)."""
    typical_gpus: dict[PositiveInt | TypicalGpus, Positive] = {1: 1, 2: 1, 4: 1, 8: 1}
    """Typical requests of pods: number of GPUs, or these with their types, and relative frequency."""
    usage_half_life_hours: Positive = 24.0
    """Half-life of past usage in the fair shares of queues."""
    ledger_share: Annotated[float, Field(gt=0, le=1)] = DEFAULT_LEDGER_SHARE
    """Part of the room of a ledger object that the leases and pending requests of one namespace may take."""
    gpu_prices: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = {}
    """Price of one GPU for one hour, by flavor or type, ``*`` for all others, in a currency of one's own."""
    force_release_after_seconds: PositiveInt | None = None
    """Time after which GPUs of an ended attempt are released although its pods were not seen to end; None: never."""
    _has_current_nodes: bool = PrivateAttr(default=False)

    @model_validator(mode="after")
    def _names_are_unique(self) -> "Queues":
        names = [queue.name for queue in self.queues]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"queue {duplicates[0]!r} is declared twice")
        return self

    @model_validator(mode="after")
    def _gpus_are_declared_once(self) -> "Queues":
        if self.nodes is not None and self.inventory is not None:
            raise ValueError("declare the inventory or the nodes: the inventory of declared nodes is counted")
        if self.cluster_nodes is not None and (self.nodes is not None or self.inventory is not None):
            raise ValueError("cluster_nodes takes the place of nodes and inventory; declare one of them")
        _ = self.node_inventory  # raises ValueError for two nodes of the same name
        return self

    @model_validator(mode="after")
    def _flavors_are_distinct(self, info: ValidationInfo) -> "Queues":
        if (error := find_flavor_error(self.flavors)) is not None:
            raise ValueError(error)
        for queue in self.queues:
            self._check_names(f"queue {queue.name!r}", queue.gpus)
            if queue.flavor_order and not self.flavors:
                raise ValueError(f"queue {queue.name!r} has a flavor_order, and there are no flavors; declare them")
        self._check_names("the inventory", self.inventory or {})
        if self.flavors and self.gpu_inventory is not None and not (info.context or {}).get("changing"):
            self._check_existence(self.gpu_inventory)
        return self

    def _check_names(self, location: str, names: Iterable[str]) -> None:
        for name in names:
            if name in self.flavor_set.by_gpu_type and name not in self.flavor_set.by_name:
                flavor_names = ", ".join(flavor.name for flavor in self.flavor_set.by_gpu_type[name])
                raise ValueError(f"{location} names {name}, which has flavors; name one of them: {flavor_names}")
            if name not in (ANY_TYPE, *self.flavor_set.by_name) and not is_label_value(name):
                raise ValueError(
                    f"{location} names the GPU type {name!r}, which no node label {GPU_TYPE_LABEL} can have; give the "
                    "value that this label has on the nodes, or * for all types"
                )

    def _check_existence(self, gpu_inventory: Mapping[str, InventoryEntry]) -> None:
        """Only for declared GPUs: a kind that is missing there was forgotten or misspelt."""
        if missing := [flavor.name for flavor in self.flavors if flavor.name not in gpu_inventory]:
            raise ValueError(f"there are no GPUs of flavor {missing[0]!r}; declare them, or drop the flavor")
        for queue in self.queues:
            if unknown := [name for name in queue.gpus if name != ANY_TYPE and name not in gpu_inventory]:
                raise ValueError(
                    f"queue {queue.name!r} names {unknown[0]}, which is no flavor and no type of the GPUs that are "
                    f"declared; these are: {', '.join(gpu_inventory)}"
                )

    def find(self, name: str) -> Queue | None:
        return self._by_name.get(name)

    def list_usable_by(self, namespace: str) -> str:
        """Names of the queues that the namespace may use, for messages."""
        return ", ".join(queue.name for queue in self.queues if queue.is_usable_by(namespace)) or "none"

    def max_gpus(self, queue: Queue, pool: str) -> int:
        """Most GPUs of ``pool`` that ``queue`` can ever hold."""
        if queue.cohort is None:
            return queue.gpus[pool]
        return int(
            min(queue.max_with_borrowing(pool), queue.guaranteed_quota(pool) + self.lendable_gpus[queue.cohort, pool])
        )

    def cohort_quota(self, queue: Queue, pool: str) -> int:
        """Sum of the quotas of ``pool`` in the cohort of ``queue``; its own quota without a cohort."""
        return queue.gpus[pool] if queue.cohort is None else self._nominal_quota[queue.cohort, pool]

    def find_gpu_price(self, gpu_kind: str) -> float | None:
        """Price of an hour of one GPU of this flavor or type; None if the file names none."""
        names = (gpu_kind, self.flavor_set.gpu_type_of(gpu_kind), ANY_TYPE)
        return next((self.gpu_prices[name] for name in names if name in self.gpu_prices), None)

    @cached_property
    def restricts_use(self) -> bool:
        """Whether any queue has owners or a limit of the priority."""
        return any(queue.namespaces is not None or queue.max_priority is not None for queue in self.queues)

    @property
    def preempts(self) -> bool:
        """Whether any queue may preempt running trainings."""
        return any(queue.preempts for queue in self.queues)

    def with_nodes(self, nodes: Iterable[GpuNode] | None, *, are_current: bool = False) -> "Queues":
        """The same quotas on these nodes instead of the declared ones; None: without an inventory.

        ``are_current`` if they are the present nodes of a cluster that changes: a request that does not fit on
        them is deferred and not rejected, because nodes may be added.
        """
        declared = {name: getattr(self, name) for name in Queues.model_fields}
        replaced = {"nodes": None if nodes is None else tuple(nodes), "inventory": None, "cluster_nodes": None}
        queues = Queues.model_validate({**declared, **replaced}, context={"changing": are_current})
        queues._has_current_nodes = are_current
        return queues

    @property
    def has_current_nodes(self) -> bool:
        """Whether the nodes are the present ones of a cluster that changes."""
        return self._has_current_nodes

    @cached_property
    def without_nodes(self) -> "Queues":
        """The same queues without an inventory."""
        return self.with_nodes(None)

    @cached_property
    def flavor_set(self) -> FlavorSet:
        """Lookups over the flavors. A GPU kind is a flavor, or a GPU type that no flavor names."""
        return FlavorSet(self.flavors)

    @cached_property
    def foreign_gpus(self) -> Counter[str]:
        """GPUs by kind that pods hold which Tiphys did not start."""
        gpus_by_kind: Counter[str] = Counter()
        for node in self._nodes_by_kind or ():
            if node.foreign_gpus and node.gpu_type:
                gpus_by_kind[node.gpu_type] += node.foreign_gpus
        return gpus_by_kind

    @cached_property
    def gpu_inventory(self) -> dict[str, InventoryEntry] | None:
        """Existing GPUs by kind, those of cordoned nodes included; None if neither nodes nor inventory are known."""
        nodes, inventory = self._nodes_by_kind, self.inventory
        if nodes is None:
            return inventory and {kind: self._with_declared_memory(kind, stock) for kind, stock in inventory.items()}
        kinds = sorted({node.gpu_type for node in nodes if node.gpus})
        return {
            kind: _inventory_of_nodes([node for node in nodes if node.gpus and node.gpu_type == kind]) for kind in kinds
        }

    @cached_property
    def gpu_types(self) -> frozenset[str]:
        """GPU types of the inventory."""
        return frozenset(self.flavor_set.gpu_type_of(kind) for kind in self.gpu_inventory or ())

    @cached_property
    def node_inventory(self) -> NodeInventory | None:
        """The nodes in the form that placement needs; None if no nodes are known."""
        return None if self._nodes_by_kind is None else NodeInventory(self._nodes_by_kind)

    @cached_property
    def _nodes_by_kind(self) -> tuple[GpuNode, ...] | None:
        """The nodes with their GPU kind in the place of their type; a node that matches no flavor has no GPUs."""
        if self.nodes is None or not self.flavors:
            return self.nodes
        return tuple(map(self._with_gpu_kind, self.nodes))

    def _with_gpu_kind(self, node: GpuNode) -> GpuNode:
        kind = self.flavor_set.gpu_kind_of(node)
        if not kind:
            return node.model_copy(update={"gpus": 0, "gpu_type": "", "foreign_gpus": 0})
        return node.model_copy(update={"gpu_type": kind, "memory_mb": node.memory_mb or self._declared_memory(kind)})

    def _with_declared_memory(self, kind: str, entry: InventoryEntry) -> InventoryEntry:
        memory = entry.memory_mb or self._declared_memory(kind)
        return entry if memory == entry.memory_mb else InventoryEntry(count=entry.count, memory_mb=memory)

    def _declared_memory(self, kind: str) -> int | None:
        flavor = self.flavor_set.by_name.get(kind)
        return None if flavor is None else flavor.memory_mb

    @cached_property
    def pool_options_caches(self) -> tuple[MutableMapping[tuple[object, ...], object], ...]:
        """Results of `tiphys_plugin.quota.scheduler.pool_options.get_pool_options`: recent ones, and all in use."""
        return {}, WeakValueDictionary()

    @cached_property
    def feasibility_cache(self) -> dict[object, bool]:
        """Results of `is_feasible` in `tiphys_plugin.quota.scheduler.pool_options`, by pool options."""
        return {}

    @cached_property
    def gang_requests_cache(self) -> dict[tuple[object, ...], GangRequest]:
        """Results of `build_gang_request` in `tiphys_plugin.quota.scheduler.pools`."""
        return {}

    @cached_property
    def empty_cluster_capacity(self) -> ClusterFreeCapacity | None:
        """All nodes, cordoned ones included, with all GPUs free. Shared: do not change it."""
        return None if self.node_inventory is None else ClusterFreeCapacity(self.node_inventory, include_cordoned=True)

    @cached_property
    def total_gpus(self) -> float:
        """Existing GPUs of all types; infinite without an inventory."""
        return math.inf if self.gpu_inventory is None else sum(stock.count for stock in self.gpu_inventory.values())

    @cached_property
    def placement_policy(self) -> PlacementPolicy:
        """Chooses among the nodes that fit."""
        stock = {kind: entry.count for kind, entry in (self.gpu_inventory or {}).items()}
        return build_placement_policy(self.placement, self.typical_gpus, stock, self.flavor_set.kinds_of_type)

    @property
    def usage_half_life(self) -> timedelta:
        return timedelta(hours=self.usage_half_life_hours)

    @cached_property
    def lendable_gpus(self) -> Counter[tuple[str, str]]:
        """GPUs that the queues of a cohort may lend each other, by cohort and pool."""
        return self._sum_by_cohort(lambda queue, pool: queue.gpus[pool] - queue.guaranteed_quota(pool))

    @cached_property
    def _nominal_quota(self) -> Counter[tuple[str, str]]:
        return self._sum_by_cohort(lambda queue, pool: queue.gpus[pool])

    @cached_property
    def _by_name(self) -> Mapping[str, Queue]:
        return {queue.name: queue for queue in self.queues}

    def _sum_by_cohort(self, amount_of: Callable[[Queue, str], int]) -> Counter[tuple[str, str]]:
        total: Counter[tuple[str, str]] = Counter()
        for queue in self.queues:
            for pool in queue.gpus if queue.cohort is not None else ():
                total[queue.cohort or "", pool] += amount_of(queue, pool)
        return total

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(queue.name for queue in self.queues)


@dataclass(frozen=True)
class MisconfiguredQueues:
    """Stands for declared queues that cannot be parsed. Nothing new is granted until they are repaired."""

    message: str


QueueRules = Queues | MisconfiguredQueues | None
"""The queues under which the scheduler decides; None: nothing is limited."""


def _inventory_of_nodes(nodes: list[GpuNode]) -> InventoryEntry:
    memories = [node.memory_mb for node in nodes]
    declared = [memory for memory in memories if memory is not None]
    return InventoryEntry(
        count=sum(node.gpus for node in nodes), memory_mb=max(declared) if len(declared) == len(memories) else None
    )


def format_gpus(gpus: int, gpu_type: str | None) -> str:
    """Text for a number of GPUs: ``4 A100``; ``1 GPU`` or ``2 GPUs`` without a type."""
    return f"{gpus} {gpu_type or ('GPU' if gpus == 1 else 'GPUs')}"


def parse_queues(document: object, source: str, text: str | None = None) -> Queues:
    """Parse the content of a queue file; ``source`` names the file in errors, and ``text`` has its lines.

    Raises:
        UsageError: a field is wrong; the message names it.
    """
    try:
        return Queues.model_validate(document)
    except ValidationError as error:
        if text is not None and (path := locate_mistake(error)):
            source = f"{source}, line {find_yaml_line(text, path)}"
        mistake = describe_mistake(error, Queues, "the file")
        raise UsageError(f"{source}: {mistake}; expected `queues: [{{name: research, gpus: {{A100: 8}}}}]`") from error


def load_queues(path: Path) -> Queues:
    """Read a queue file.

    Raises:
        UsageError: it is missing, is not YAML, or a field is wrong; the message names the field.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"queue file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"queue file {path} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    source = f"queue file {path}"
    return parse_queues(parse_yaml(text, source, UniqueKeyLoader), source, text)
