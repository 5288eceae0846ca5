"""What storage knows about attempts and checkpoints, and what follows from it.

Decisions (`chain`, `classify`, `decide`) are pure; around them are the few
functions that read the records they need.
"""

from tiphys.lineage.timeline import timeline
from tiphys.lineage.tree import AttemptNode, CheckpointNode, LineageTree, Status, StepLineage, tree

__all__ = ["AttemptNode", "CheckpointNode", "LineageTree", "Status", "StepLineage", "timeline", "tree"]
