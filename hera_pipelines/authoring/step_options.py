"""The options of `@step` and `@train`, and their way into the settings that compile reads.

`TrainOptions` builds the step's `GpuRequest`, which stays the only form of the
request for GPUs until the plugin makes a `LeaseRequest` of it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hera_pipelines.authoring.policies import (
    DEFAULT_CHECKPOINTS,
    Checkpoints,
    Duration,
    Retries,
    build_model,
    resolve_duration,
)
from hera_pipelines.authoring.tracking import Mlflow, Wandb
from hera_pipelines.compile.settings import DataSource, Spot, StepSettings
from tiphys.errors import UsageError
from tiphys.protocol.gang import GangBackend, GangSpec
from tiphys.protocol.step_spec import GPU_RESOURCE, GpuRequest, Proximity, StepKind

GKE_SPOT = Spot(label="cloud.google.com/gke-spot")
EKS_SPOT = Spot(label="eks.amazonaws.com/capacityType", value="SPOT", tainted=False)
AKS_SPOT = Spot(label="kubernetes.azure.com/scalesetpriority", value="spot")
KARPENTER_SPOT = Spot(label="karpenter.sh/capacity-type", value="spot", tainted=False)

_TAINTED_SPOT_NODES = (GKE_SPOT, AKS_SPOT)


@dataclass(kw_only=True)
class StepOptions:
    """Options of `@step` and `Step`, beside Hera's own arguments.

    `@step` documents them. `Step` inherits them as its fields.
    """

    cache: bool = True
    share: bool = False
    retries: Retries | None = None
    grace: Duration | None = None
    deadline: Duration | None = None
    spot: bool | Spot = False
    data: DataSource | Sequence[DataSource] = ()
    tracking: Mlflow | Wandb | None = None
    gate: bool = False

    def step_settings(self, step: str) -> StepSettings:
        """The settings for the annotation of the template ``step``.

        Raises:
            UsageError: a value is not valid; the message names it.
        """
        where = f"step {step!r}"
        return build_model(StepSettings, where, **self._setting_values(where))

    def _setting_values(self, where: str) -> dict[str, Any]:
        deadline = None if self.deadline is None else resolve_duration(self.deadline, f"{where}: deadline")
        return {
            "kind": StepKind.STEP,
            "gate": self.gate,
            "cache": self.cache,
            "share": self.share,
            "retry": (self.retries or Retries()).policy(),
            "grace_seconds": None if self.grace is None else resolve_duration(self.grace, f"{where}: grace"),
            "deadline_seconds": None if deadline is None else round(deadline),
            "spot": _spot_kinds(self.spot),
            "data": _data_sources(self.data, where),
            "tracking": None if self.tracking is None else self.tracking.settings(),
        }


@dataclass(kw_only=True)
class TrainOptions(StepOptions):
    """Options of `@train` and `Train`, beside Hera's own arguments.

    `@train` documents them. `Train` inherits them as its fields.
    """

    gpus: int = 0
    gpu_resource: str = GPU_RESOURCE
    gpu_type: str | Sequence[str] | None = None
    speed: Mapping[str, float] | None = None
    min_gpu_memory_mb: int | None = None
    queue: str = "default"
    priority: int = 0
    checkpoints: Checkpoints | None = DEFAULT_CHECKPOINTS
    runtime_image: str | None = None
    nodes: int | str = 1
    within: Proximity | None = None
    tensor_parallel: int = 1
    backend: GangBackend | str = GangBackend.JOB

    def _setting_values(self, where: str) -> dict[str, Any]:
        if self.gate:
            raise UsageError(f"{where} is a training, which always has a gate; drop gate=True")
        return {
            **super()._setting_values(where),
            "kind": StepKind.TRAIN,
            "gang": self._gang_spec(where),
            "gpu": self._gpu_request(where),
            "checkpoints": None if self.checkpoints is None else self.checkpoints.policy(),
            "runtime_image": self.runtime_image,
            "volume": None if self.checkpoints is None else self.checkpoints.volume,
        }

    def _gang_spec(self, where: str) -> GangSpec | None:
        if self.nodes == 1:
            if self.backend != GangBackend.JOB:
                raise UsageError(f"{where} has a backend, which is for several nodes; add nodes=2, or drop it")
            return None
        fewest, most = _node_range(self.nodes, where)
        return build_model(GangSpec, where, members=most, min_members=fewest, backend=self.backend)

    def _gpu_request(self, where: str) -> GpuRequest | None:
        if not self.gpus:
            wishes = (self.gpu_type, self.speed, self.min_gpu_memory_mb, self.within, self.tensor_parallel)
            if (*wishes, self.gpu_resource) != (None, None, None, None, 1, GPU_RESOURCE):
                raise UsageError(
                    f"{where} has gpu_resource, gpu_type, speed, min_gpu_memory_mb, within or tensor_parallel, but "
                    "gpus=0; add gpus=1"
                )
            return None
        fewest, most = _node_range(self.nodes, where)
        if (self.within is not None or self.tensor_parallel != 1) and most == 1:
            raise UsageError(f"{where} has within or tensor_parallel, but one node; add nodes=2, or drop them")
        types = _gpu_types(self.gpu_type, where)
        return build_model(
            GpuRequest,
            where,
            gpus=self.gpus * most,
            resource=self.gpu_resource,
            members=most,
            min_members=fewest,
            gpu_type=types[0] if len(types) == 1 else None,
            gpu_types=types if len(types) > 1 else (),
            speed=dict(self.speed or {}),
            min_gpu_memory_mb=self.min_gpu_memory_mb,
            within=self.within,
            tensor_parallel=self.tensor_parallel,
            queue=self.queue,
            priority=self.priority,
        )


def _gpu_types(given: str | Sequence[str] | None, where: str) -> tuple[str, ...]:
    """The wanted types in order of preference; empty for any."""
    if given is None or given == "any":
        return ()
    types = tuple(dict.fromkeys([given] if isinstance(given, str) else given))
    if not types:
        raise UsageError(f"{where} has an empty list of GPU types; name some, or leave gpu_type out for any")
    return types


def _node_range(nodes: int | str, where: str) -> tuple[int | None, int]:
    """The fewest and the most nodes; the fewest is None for a gang that is not elastic."""
    if isinstance(nodes, int):
        return None, nodes
    if (match := re.fullmatch(r"(\d{1,6}):(\d{1,6})", nodes)) is None:
        raise UsageError(
            f"{where}: nodes={nodes!r} is not valid: write a number, or the fewest and the most as in '2:4'"
        )
    return int(match[1]), int(match[2])


def _spot_kinds(spot: bool | Spot) -> tuple[Spot, ...]:
    if isinstance(spot, Spot):
        return (spot,)
    return _TAINTED_SPOT_NODES if spot else ()


def _data_sources(data: DataSource | Sequence[DataSource], where: str) -> tuple[DataSource, ...]:
    sources = (data,) if isinstance(data, DataSource) else data if isinstance(data, list | tuple) else (data,)
    for source in sources:
        if not isinstance(source, DataSource):
            raise UsageError(
                f"{where}: data cannot be {source!r}; write Dvc('data/train'), Lakefs('lakefs://repository/ref/path'), "
                "or a list of these"
            )
    return tuple(sources)
