"""The lineage of a run as a picture and as a tree in the terminal.

Both are made from the same `Lineage`, collapsed by the same rule, so that they
never tell different stories.
"""

from hera_pipelines.draw.model import Dot, Ending, Lane, Lineage, Place
from hera_pipelines.draw.reading import lineages_of
from hera_pipelines.draw.svg import lineage_svg
from hera_pipelines.draw.terminal import lineage_tree

__all__ = ["Dot", "Ending", "Lane", "Lineage", "Place", "lineage_svg", "lineage_tree", "lineages_of"]
