"""Fits a table to the width of a terminal: which columns it shows, and how wide each one is.

A table that is too wide hides columns in the order of their rank, then cuts the
widest cells, and marks both with ``…``. It never folds a word to a few letters a line.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console

ELLIPSIS = "…"
_GAP = 3
_NARROW_GAP = 2
_SHORTEST_LAST = 24
"""Columns that the last column keeps, which holds sentences, before others are hidden."""
_SHORTEST_CUT = 8


class TableLayout(NamedTuple):
    """The shown columns by index, their widths, and the spaces between two columns."""

    shown: tuple[int, ...]
    widths: tuple[int, ...]
    gap: int


def fit_columns(natural: Sequence[int], width: int | None, hide: Sequence[int] = ()) -> TableLayout:
    """Choose columns and widths.

    ``natural`` has the width of each column that cuts nothing; without ``width`` everything is shown. The columns
    ``hide`` may be hidden, the first one first. If hiding and cutting are not enough, the other columns between the
    first and the last follow, from the right.
    """
    everything = tuple(range(len(natural)))
    if width is None or sum(natural) + _GAP * (len(natural) - 1) <= width:
        return TableLayout(everything, tuple(natural), _GAP)
    middle = [column for column in reversed(everything[1:-1]) if column not in hide]
    shown = list(everything)

    def room() -> int:
        marked = _NARROW_GAP + len(ELLIPSIS) if len(shown) < len(natural) else 0
        return width - marked - _NARROW_GAP * (len(shown) - 1)

    for column in hide:
        if sum(min(natural[c], _SHORTEST_LAST) if c == everything[-1] else natural[c] for c in shown) <= room():
            break
        shown.remove(column)
    for column in middle:
        if sum(min(natural[c], _SHORTEST_CUT) for c in shown) <= room():
            break
        shown.remove(column)
    return TableLayout(tuple(shown), tuple(_cut_widest([natural[c] for c in shown], room())), _NARROW_GAP)


def _cut_widest(widths: list[int], room: int) -> list[int]:
    """Take columns from the last one first, as far as it keeps its shortest length, then from the widest."""
    widths = list(widths)
    spare = min(max(0, sum(widths) - room), max(0, widths[-1] - _SHORTEST_LAST))
    widths[-1] -= spare
    while sum(widths) > room and max(widths) > 1:
        widths[widths.index(max(widths))] -= 1
    return widths


class FittedTable(NamedTuple):
    """The lines of a table, the header first, and the names of the columns that are hidden."""

    lines: list[Text]
    hidden: list[str]


def fit_table(
    console: "Console",
    columns: Sequence[str],
    rows: Sequence[Sequence[Text]],
    width: int | None,
    *,
    hide: Sequence[str] = (),
    wraps: bool = False,
) -> FittedTable:
    """Lay out a table without borders, as ``kubectl`` prints it; see `Screen.table`.

    A cell may have several lines. ``width`` is that of the terminal; None shows everything.
    """
    natural = [
        max([len(title), *(line.cell_len for row in rows for line in row[index].split("\n"))])
        for index, title in enumerate(columns)
    ]
    layout = fit_columns(natural, width, [columns.index(title) for title in hide if title in columns])
    hidden = [title for index, title in enumerate(columns) if index not in layout.shown]
    header = [Text(title, style="bold") for title in columns]
    lines = list(_row_lines(console, header, layout, wraps=False))
    if hidden:
        lines[0].append(" " * (layout.gap + _table_width(layout) - lines[0].cell_len) + ELLIPSIS)
    for row in rows:
        lines.extend(_row_lines(console, row, layout, wraps=wraps))
    return FittedTable(lines, hidden)


def _table_width(layout: TableLayout) -> int:
    return sum(layout.widths) + layout.gap * (len(layout.widths) - 1)


def _row_lines(console: "Console", row: Sequence[Text], layout: TableLayout, *, wraps: bool) -> Iterator[Text]:
    cells = []
    for index, width in zip(layout.shown, layout.widths, strict=True):
        is_wrapped = wraps and index == layout.shown[-1]
        cell = row[index]
        cells.append(list(cell.wrap(console, max(1, width)) if is_wrapped else cell.split("\n", allow_blank=True)))
    for number in range(max(map(len, cells))):
        line = Text()
        start = 0
        for lines, width in zip(cells, layout.widths, strict=True):
            if number < len(lines) and lines[number].cell_len:
                cell = lines[number].copy()
                cell.truncate(width, overflow="ellipsis")
                line.append(" " * (start - line.cell_len)).append_text(cell)
            start += width + layout.gap
        line.rstrip()
        yield line
