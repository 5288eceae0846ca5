"""The lineage as one self-contained SVG file that reads in light and in dark."""

from collections.abc import Sequence

from hera_pipelines.draw.collapse import collapse
from hera_pipelines.draw.layout import BAND_HEIGHT, Layout, lay_out
from hera_pipelines.draw.model import Lineage
from hera_pipelines.draw.templates import template
from tiphys.lineage import Status

MOST_COLUMNS = 14
"""Distinct global steps that are shown one by one before the picture collapses them."""


def lineage_svg(title: str, lineages: Sequence[Lineage]) -> str:
    """An SVG document that shows all ``lineages`` below each other."""
    layouts = [lay_out(collapse(lineage, MOST_COLUMNS)) for lineage in lineages]
    statuses = {dot.dot.status for layout in layouts for row in layout.rows for dot in row.dots}
    return template("lineage.svg.jinja").render(
        title=title,
        sections=list(zip(lineages, layouts, strict=True)),
        width=max([560.0, *(layout.width for layout in layouts)]),
        tops=_tops(layouts),
        band_height=BAND_HEIGHT,
        legend=[status for status in Status if status in statuses],
    )


def _tops(layouts: Sequence[Layout]) -> list[float]:
    """Where each section begins, its y, and where the last one ends."""
    tops = [76.0]
    for layout in layouts:
        tops.append(tops[-1] + layout.height + 22)
    return tops
