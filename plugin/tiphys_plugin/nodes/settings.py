"""How the nodes of a cluster are read: ``cluster_nodes`` of a queue file.

    cluster_nodes:                  # {} takes the usual labels
      selector: {pool: training}    # optional: only nodes with these labels
      rack_label: example.com/rack  # optional, and likewise the other labels
      signs:                        # optional: what else says something about the health of a node
        - {kind: condition, name: DiskPressure, means: hint}

Labels of GPU type and host are not among the settings: pods are sent by them.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

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
