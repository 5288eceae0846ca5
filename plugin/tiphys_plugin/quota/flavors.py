"""Flavors divide the GPUs of one type by node labels, such as spot nodes from reserved ones.

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

      - name: mi300x
        gpu_type: MI300X            # with another resource than nvidia.com/gpu: a name for steps, and no label
        resource: amd.com/gpu
        node_labels: {pool: mi300x}

Once a flavor names a GPU type, quotas are of its flavors and no longer of the
type. A node of that type belongs to the flavor whose labels it has, or to none.
A GPU type that no flavor names is its own kind. Source of the term: Kueue,
"Resource Flavor".

``cluster_nodes`` of a queue file says how the nodes of the cluster are read:

    cluster_nodes:                  # {} takes the default labels
      selector: {pool: training}    # optional: only nodes with these labels
      rack_label: example.com/rack  # optional, and likewise the other labels
      signs:                        # optional: further signals of the health of a node
        - {kind: condition, name: DiskPressure, means: hint}

The labels of the GPU type and of the host cannot be configured, because the node
selectors of pods use them.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from tiphys.protocol.step_spec import GPU_RESOURCE, GPU_TYPE_LABEL, GpuResourceName, SpotUse, is_label_value
from tiphys_plugin.quota.placement.model import GpuNode, LabelKey, LabelValue, Name


class HealthSignal(BaseModel):
    """A condition, label or taint of a node that signals its health.

    Without ``values`` a condition counts while it is ``True``, a label or taint
    while it is present. One signal suffices, except for hints:

    * ``cordon``: nothing new starts on the node;
    * ``fault``: the hardware is broken, so its trainings are also asked to save and exit;
    * ``notice``: the node will be removed, so its trainings are also asked to save and exit;
    * ``hint``: has no effect alone, see `tiphys_plugin.nodes.health`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["condition", "label", "taint"]
    name: Name
    values: tuple[str, ...] = ()
    means: Literal["cordon", "fault", "notice", "hint", "nothing"] = "cordon"


class ClusterNodes(BaseModel):
    """Labels that are read from the nodes of the cluster, and signals of their health."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    selector: dict[LabelKey, LabelValue] = {}
    """Only nodes with these labels; those without GPUs are never counted."""
    memory_label: LabelKey = "nvidia.com/gpu.memory"
    """Memory of each GPU in MB, as GPU feature discovery writes it."""
    block_label: LabelKey = "topology.kubernetes.io/zone"
    rack_label: LabelKey = "topology.kubernetes.io/rack"
    nvlink_label: LabelKey = "nvidia.com/gpu.clique"
    """Nodes with the same value reach each other over NVLink (GPU feature discovery, multi-node NVLink)."""
    signs: tuple[HealthSignal, ...] = ()
    """Take precedence over the default signals: the first that names a condition, label or taint applies."""
    suspect_hours: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 6.0
    """Time after which a hint expires."""


class Toleration(BaseModel):
    """A Kubernetes toleration for the pods on nodes of the flavor."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: Name
    operator: Literal["Equal", "Exists"] = "Equal"
    value: str = ""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """None: every effect."""

    @model_validator(mode="after")
    def _exists_has_no_value(self) -> "Toleration":
        if self.operator == "Exists" and self.value:
            raise ValueError(f"the toleration of {self.key!r} has a value, which `operator: Exists` ignores")
        return self

    def manifest(self) -> dict[str, Any]:
        """The entry for ``tolerations`` of a pod spec."""
        return {"operator": self.operator, **self.model_dump(exclude_defaults=True)}


class Flavor(BaseModel):
    """One flavor. Its nodes offer ``resource`` and have all of ``node_labels``, and for ``nvidia.com/gpu`` the type."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name
    gpu_type: Name
    resource: GpuResourceName = GPU_RESOURCE
    """Only steps that ask for this resource get its GPUs."""
    memory_mb: PositiveInt | None = None
    """Memory of each GPU; None: nodes or inventory give it, otherwise it counts as enough."""
    node_labels: dict[LabelKey, LabelValue] = {}
    tolerations: tuple[Toleration, ...] = ()
    spot: bool = False
    """Whether the provider may reclaim the nodes; then only steps that allow spot nodes run there."""

    @model_validator(mode="after")
    def _is_a_flavor(self) -> "Flavor":
        if "*" in (self.name, self.gpu_type):
            raise ValueError("* stands for all types that a queue does not name, and can be no flavor")
        if not is_label_value(self.gpu_type):
            raise ValueError(
                f"flavor {self.name!r} has the gpu_type {self.gpu_type!r}, which no node label {GPU_TYPE_LABEL} can "
                "have; give the value that this label has on its nodes"
            )
        if self.resource == GPU_RESOURCE and self.node_labels.get(GPU_TYPE_LABEL, self.gpu_type) != self.gpu_type:
            raise ValueError(f"flavor {self.name!r} has a label {GPU_TYPE_LABEL} that is not its gpu_type")
        return self

    @property
    def node_selector(self) -> dict[str, str]:
        """Node selector of the pods of this flavor."""
        type_label = {GPU_TYPE_LABEL: self.gpu_type} if self.resource == GPU_RESOURCE else {}
        return {**type_label, **self.node_labels}

    def accepts_spot_use(self, spot: SpotUse | Literal["avoided"]) -> bool:
        """Whether a request with this ``spot`` may use the flavor."""
        return spot != "no" if self.spot else spot != "only"


class FlavorSet:
    """Lookups over the flavors of a queue file; ``flavors`` keeps the order of declaration."""

    def __init__(self, declared: Sequence[Flavor]) -> None:
        self.flavors = tuple(declared)
        self.by_name: Mapping[str, Flavor] = {flavor.name: flavor for flavor in declared}
        by_gpu_type: defaultdict[str, list[Flavor]] = defaultdict(list)
        for flavor in declared:
            by_gpu_type[flavor.gpu_type].append(flavor)
        self.by_gpu_type: Mapping[str, Sequence[Flavor]] = dict(by_gpu_type)

    @cached_property
    def label_keys(self) -> frozenset[str]:
        """Keys of all node labels that flavors use."""
        return frozenset(key for flavor in self.flavors for key in flavor.node_labels)

    def is_unflavored(self, gpu_type: str) -> bool:
        """Whether no flavor has this GPU type or name."""
        return gpu_type not in self.by_gpu_type and gpu_type not in self.by_name

    def gpu_type_of(self, gpu_kind: str) -> str:
        """GPU type of a flavor; a type that no flavor names is returned as it is."""
        return self.by_name[gpu_kind].gpu_type if gpu_kind in self.by_name else gpu_kind

    def resource_of(self, gpu_kind: str) -> str:
        """Resource of a flavor; a type that no flavor names is of NVIDIA's GPUs."""
        return self.by_name[gpu_kind].resource if gpu_kind in self.by_name else GPU_RESOURCE

    def find_offered(self, labels: Mapping[str, str], resources: Mapping[str, int]) -> Flavor | None:
        """The first flavor whose labels and resource a node has."""
        offered = (flavor for flavor in self.flavors if resources.get(flavor.resource))
        return next((flavor for flavor in offered if flavor.node_selector.items() <= labels.items()), None)

    def kinds_of_type(self, gpu_type: str) -> tuple[str, ...]:
        """GPU kinds of a type: its flavors, or the type itself."""
        return tuple(flavor.name for flavor in self.by_gpu_type.get(gpu_type, ())) or (gpu_type,)

    def gpu_kind_of(self, node: GpuNode) -> str:
        """GPU kind of a node: its flavor, or its type if that has no flavors; empty if no flavor matches its labels."""
        if self.is_unflavored(node.gpu_type):
            return node.gpu_type
        candidates = self.by_gpu_type.get(node.gpu_type, ())
        return next(
            (candidate.name for candidate in candidates if candidate.node_labels.items() <= node.labels.items()), ""
        )

    def sort_gpu_kinds(self, kinds: Iterable[str]) -> list[str]:
        """Flavors in the order of declaration, then types without flavors by name."""
        rank = {flavor.name: number for number, flavor in enumerate(self.flavors)}
        return sorted(kinds, key=lambda kind: (rank.get(kind, len(rank)), kind))


def find_flavor_error(declared: Sequence[Flavor]) -> str | None:
    """The first conflict between the declared flavors; None if there is none."""
    return next(_flavor_errors(declared), None)


def _flavor_errors(declared: Sequence[Flavor]) -> Iterator[str]:
    gpu_types = {flavor.gpu_type for flavor in declared}
    for flavor in declared:
        if flavor.name in gpu_types and flavor.name != flavor.gpu_type:
            yield f"flavor {flavor.name!r} has the name of another GPU type than its own; give it another name"
    for flavor, other in combinations(declared, 2):
        if flavor.name == other.name:
            yield f"flavor {flavor.name!r} is declared twice"
        elif _are_of_same_gpus(flavor, other) and not _have_exclusive_labels(flavor, other):
            gpus = flavor.gpu_type if flavor.gpu_type == other.gpu_type else flavor.resource
            yield (
                f"flavors {flavor.name!r} and {other.name!r} could claim the same nodes of {gpus}; "
                "give both a label of the same name in node_labels, with different values"
            )


def _are_of_same_gpus(flavor: Flavor, other: Flavor) -> bool:
    """Whether labels alone keep their nodes apart: no label of the type does where the resource is another."""
    return flavor.gpu_type == other.gpu_type or flavor.resource == other.resource != GPU_RESOURCE


def _have_exclusive_labels(flavor: Flavor, other: Flavor) -> bool:
    return any(other.node_labels.get(key, value) != value for key, value in flavor.node_labels.items())
