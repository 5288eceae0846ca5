"""Pictures: the lineage of a run, also as a tree in the terminal, and the rehearsal of queues.

Picture and tree of a lineage are made from the same `Lineage`, collapsed by the
same rule, so that they never tell different stories.
"""

from hera_pipelines.draw.model import Dot, Ending, Lane, Lineage, Place
from hera_pipelines.draw.reading import lineages_of
from hera_pipelines.draw.rehearsal import Band, Rehearsal, largest, rehearsal_of
from hera_pipelines.draw.rehearsal_svg import rehearsal_svg
from hera_pipelines.draw.svg import lineage_svg
from hera_pipelines.draw.terminal import lineage_tree

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
