"""Lineages: the checkpoints of a training step across attempts, their selection, validity, retention and audit.

Decisions, such as `order_candidates` and `evaluate_retention`, are pure. Separate
functions read the records that they need.
"""

from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.timeline import read_timeline
from tiphys.lineage.tree import (
    AttemptNode,
    CheckpointNode,
    CheckpointStatus,
    LineageTree,
    StepLineage,
    read_lineage_tree,
)

__all__ = [
    "AttemptNode",
    "CheckpointNode",
    "CheckpointStatus",
    "LineageTree",
    "RunHistory",
    "StepLineage",
    "read_lineage_tree",
    "read_timeline",
]
