"""A node with GPUs as somebody declared it: what it has, and where it stands.

The words of the topology are those of Kueue's topology-aware scheduling (block,
rack, host) and of NVIDIA's multi-node NVLink (domain). What is not known is
left empty, and no two nodes are taken to be near each other because of it.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

_MOST_GPUS = 1024


class Node(BaseModel):
    """One host. ``memory_mb`` is the memory of each of its GPUs; None if not declared, and then taken as enough.

    ``cordoned`` nodes keep what runs on them and get nothing new. ``cpu_milli``
    and ``host_memory_mb`` limit only requests that say how much they need.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(min_length=1)]
    gpu_type: str = ""
    gpus: Annotated[int, Field(ge=0, le=_MOST_GPUS)]
    memory_mb: PositiveInt | None = None
    block: str = ""
    rack: str = ""
    nvlink_domain: str = ""
    """Nodes whose GPUs reach each other over NVLink; empty: no further than those of one node."""
    labels: dict[str, str] = {}
    """Labels of the node by which flavors are told apart."""
    cordoned: bool = False
    foreign_gpus: NonNegativeInt = 0
    """GPUs that are used by what Tiphys did not start."""
    cpu_milli: NonNegativeInt | None = None
    host_memory_mb: NonNegativeInt | None = None

    @model_validator(mode="after")
    def _gpus_have_a_type(self) -> "Node":
        if self.gpus and not self.gpu_type:
            raise ValueError(f"node {self.name!r} has GPUs of no type; add `gpu_type: NAME`")
        return self
