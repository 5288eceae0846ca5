"""Flavors: GPUs of one type that are told apart by where they stand, such as spot nodes from those that stay.

    flavors:
      - name: a100-reserved
        gpu_type: A100              # value of the node label nvidia.com/gpu.product, as a step asks for it
        memory_mb: 81920            # optional: memory of each, where nodes or inventory do not say it
        node_labels: {pool: reserved}
      - name: a100-spot
        gpu_type: A100
        node_labels: {pool: spot}
        tolerations: [{key: spot, value: "true", effect: NoSchedule}]
        spot: true                  # optional: only for steps that allow it

A type that a flavor names means its flavors from then on: a quota is of one of
them, and a node of that type belongs to the one whose labels it has, or to none.
A type that no flavor names goes on meaning itself. Source of the word: Kueue,
"Resource Flavor".

How the nodes of a cluster are read: ``cluster_nodes`` of a queue file.

    cluster_nodes:                  # {} takes the usual labels
      selector: {pool: training}    # optional: only nodes with these labels
      rack_label: example.com/rack  # optional, and likewise the other labels
      signs:                        # optional: what else says something about the health of a node
        - {kind: condition, name: DiskPressure, means: hint}

Labels of GPU type and host are not among the settings: pods are sent by them.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from tiphys.protocol.step_spec import SpotUse
from tiphys_plugin.quota.placement.model import Node

GPU = "nvidia.com/gpu"
"""The resource that pods of trainings ask for."""
GPU_TYPE_LABEL = "nvidia.com/gpu.product"

_Name = Annotated[str, Field(min_length=1)]


class Sign(BaseModel):
    """A condition, label or taint of a node that says something about its health.

    Without ``values`` a condition says it while it is ``True``, a label or
    taint while it is there. All but hints are believed as they stand:

    * ``cordon``: nothing new starts on the node;
    * ``fault``: its hardware is broken, so what runs there is asked to save and go, too;
    * ``notice``: the node will go, and what runs there before it;
    * ``hint``: does nothing alone, see `tiphys_plugin.nodes.health`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["condition", "label", "taint"]
    name: _Name
    values: tuple[str, ...] = ()
    means: Literal["cordon", "fault", "notice", "hint", "nothing"] = "cordon"


class ClusterNodes(BaseModel):
    """Which labels are read, and what speaks against a node."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    selector: dict[str, str] = {}
    """Only nodes with these labels; those without GPUs are never counted."""
    memory_label: _Name = "nvidia.com/gpu.memory"
    """Memory of each GPU in MB, as GPU feature discovery writes it."""
    block_label: _Name = "topology.kubernetes.io/zone"
    rack_label: _Name = "topology.kubernetes.io/rack"
    nvlink_label: _Name = "nvidia.com/gpu.clique"
    """Nodes with the same value reach each other over NVLink (GPU feature discovery, multi-node NVLink)."""
    signs: tuple[Sign, ...] = ()
    """Looked up before the usual ones: the first that names a condition, label or taint says what it means."""
    suspect_hours: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 6.0
    """Hints are forgotten after so long."""


class Toleration(BaseModel):
    """A taint that pods on nodes of the flavor do not mind, in the words of Kubernetes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: _Name
    operator: Literal["Equal", "Exists"] = "Equal"
    value: str = ""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """None: of every effect."""

    @model_validator(mode="after")
    def _exists_has_no_value(self) -> "Toleration":
        if self.operator == "Exists" and self.value:
            raise ValueError(f"the toleration of {self.key!r} has a value, which `operator: Exists` does not look at")
        return self

    def manifest(self) -> dict[str, Any]:
        """As a pod has it."""
        told = self.model_dump(exclude_defaults=True)
        return {"operator": self.operator, **told}


class Flavor(BaseModel):
    """One flavor. Its nodes have ``gpu_type`` and all of ``node_labels``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: _Name
    gpu_type: _Name
    memory_mb: PositiveInt | None = None
    """Memory of each GPU; None: taken as enough where nodes or inventory do not say it."""
    node_labels: dict[str, str] = {}
    tolerations: tuple[Toleration, ...] = ()
    spot: bool = False
    """Whether the nodes may be taken away: then only steps that allow it go there."""

    @model_validator(mode="after")
    def _is_a_flavor(self) -> "Flavor":
        if "*" in (self.name, self.gpu_type):
            raise ValueError("* stands for all types that a queue does not name, and can be no flavor")
        if self.node_labels.get(GPU_TYPE_LABEL, self.gpu_type) != self.gpu_type:
            raise ValueError(f"flavor {self.name!r} has a label {GPU_TYPE_LABEL} that is not its gpu_type")
        return self

    @property
    def selector(self) -> dict[str, str]:
        """Labels of the nodes that its pods have to run on."""
        return {GPU_TYPE_LABEL: self.gpu_type, **self.node_labels}

    def serves(self, spot: SpotUse | Literal["avoided"]) -> bool:
        """Whether it is for a request that uses spot nodes in this way."""
        return spot != "no" if self.spot else spot != "only"


class Flavors:
    """What follows from the flavors of a queue file; ``in_order`` is the order in which they are declared."""

    def __init__(self, declared: Sequence[Flavor]) -> None:
        self.in_order = tuple(declared)
        self.by_name: Mapping[str, Flavor] = {one.name: one for one in declared}
        of_type: defaultdict[str, list[Flavor]] = defaultdict(list)
        for one in declared:
            of_type[one.gpu_type].append(one)
        self.of_type: Mapping[str, Sequence[Flavor]] = dict(of_type)

    @cached_property
    def labels(self) -> frozenset[str]:
        """Keys of the node labels by which nodes are told apart."""
        return frozenset(key for one in self.in_order for key in one.node_labels)

    def is_plain(self, gpu_type: str) -> bool:
        """Whether the type means itself."""
        return gpu_type not in self.of_type and gpu_type not in self.by_name

    def type_of(self, kind: str) -> str:
        """GPU type of a flavor, or of a type that means itself."""
        return self.by_name[kind].gpu_type if kind in self.by_name else kind

    def kind_of(self, node: Node) -> str:
        """What the GPUs of a node count as: a flavor, or their type; empty for those of no flavor."""
        if self.is_plain(node.gpu_type):
            return node.gpu_type
        own = (one for one in self.of_type.get(node.gpu_type, ()) if one.node_labels.items() <= node.labels.items())
        return next((one.name for one in own), "")

    def sorted(self, kinds: Iterable[str]) -> list[str]:
        """As they are declared; types that mean themselves come last."""
        place = {one.name: number for number, one in enumerate(self.in_order)}
        return sorted(kinds, key=lambda kind: (place.get(kind, len(place)), kind))


def complaint(declared: Sequence[Flavor]) -> str | None:
    """The first thing that is wrong with flavors beside each other."""
    return next(_complaints(declared), None)


def _complaints(declared: Sequence[Flavor]) -> Iterator[str]:
    types = {one.gpu_type for one in declared}
    for one in declared:
        if one.name in types and one.name != one.gpu_type:
            yield f"flavor {one.name!r} has the name of another GPU type than its own; give it another name"
    for one, other in combinations(declared, 2):
        if one.name == other.name:
            yield f"flavor {one.name!r} is declared twice"
        elif one.gpu_type == other.gpu_type and not _differ(one, other):
            yield (
                f"flavors {one.name!r} and {other.name!r} could claim the same nodes of {one.gpu_type}; "
                "give both a label of the same name in node_labels, with different values"
            )


def _differ(one: Flavor, other: Flavor) -> bool:
    return any(other.node_labels.get(key, value) != value for key, value in one.node_labels.items())
