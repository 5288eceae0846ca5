"""Pictures of a run's lineage, also as a tree in the terminal, of its failure costs, and of simulated queues.

Picture and tree of a lineage show the same `LineageGraph`, collapsed by the same
rule, so that they always agree.
"""

from hera_pipelines.draw.lineage_graph import (
    AttemptEnding,
    CheckpointPosition,
    Dot,
    Lane,
    LineageGraph,
    build_lineage_graphs,
)
from hera_pipelines.draw.lineage_svg import render_lineage_svg
from hera_pipelines.draw.lineage_text import render_lineage_tree
from hera_pipelines.draw.simulation_svg import (
    Band,
    SimulationTimeline,
    build_simulation_timeline,
    largest_queues,
    render_simulation_svg,
)

__all__ = [
    "AttemptEnding",
    "Band",
    "CheckpointPosition",
    "Dot",
    "Lane",
    "LineageGraph",
    "SimulationTimeline",
    "build_lineage_graphs",
    "build_simulation_timeline",
    "largest_queues",
    "render_lineage_svg",
    "render_lineage_tree",
    "render_simulation_svg",
]
