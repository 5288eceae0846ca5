"""The lineage as one self-contained SVG file that reads in light and in dark."""

import re
from collections.abc import Sequence
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from hera_pipelines.draw.collapse import collapse
from hera_pipelines.draw.layout import BAND_HEIGHT, Layout, lay_out
from hera_pipelines.draw.model import Lineage
from tiphys.lineage import Status

MOST_COLUMNS = 14
"""Distinct global steps that are shown one by one before the picture collapses them."""

_NOT_XML = re.compile(r"[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_LONGEST_MESSAGE = 46


def lineage_svg(title: str, lineages: Sequence[Lineage]) -> str:
    """An SVG document that shows all ``lineages`` below each other."""
    layouts = [lay_out(collapse(lineage, MOST_COLUMNS)) for lineage in lineages]
    statuses = {dot.dot.status for layout in layouts for row in layout.rows for dot in row.dots}
    return _template().render(
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


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("hera_pipelines.draw", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_printable,
    )
    environment.filters["shorten"] = _shorten
    return environment.get_template("lineage.svg.jinja")


def _printable(value: object) -> object:
    """Text without the characters that XML cannot hold even escaped."""
    return _NOT_XML.sub("\ufffd", value) if type(value) is str else value


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST_MESSAGE else text[: _LONGEST_MESSAGE - 1].rstrip() + "…"
