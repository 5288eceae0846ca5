"""Pictures: the lineage of a run, also as a tree in the terminal, and the rehearsal of queues.

Picture and tree of a lineage are made from the same `Lineage`, collapsed by the
same rule, so that they never tell different stories.
"""

from hera_pipelines.draw.lineage_graph import Dot, Ending, Lane, Lineage, Place, lineages_of
from hera_pipelines.draw.lineage_svg import lineage_svg
from hera_pipelines.draw.lineage_text import lineage_tree
from hera_pipelines.draw.simulation_svg import Band, Rehearsal, largest, rehearsal_of, rehearsal_svg

__all__ = [
    "Band",
    "Dot",
    "Ending",
    "Lane",
    "Lineage",
    "Place",
    "Rehearsal",
    "largest",
    "lineage_svg",
    "lineage_tree",
    "lineages_of",
    "rehearsal_of",
    "rehearsal_svg",
]
