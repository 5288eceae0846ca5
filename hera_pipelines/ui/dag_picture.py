"""Places the tasks of a pipeline in columns: each stands right of all tasks that it needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BOX_WIDTH, BOX_HEIGHT = 168, 46
_COLUMN, _ROW, _EDGE = 216, 62, 8
MAX_TASKS = 80
"""Most tasks in a picture that a person can read."""


@dataclass(frozen=True)
class TaskBox:
    """A task with the upper left corner of its box, in pixels."""

    name: str
    x: int
    y: int


@dataclass(frozen=True)
class DagPicture:
    """Boxes, and the curves between them as SVG path data."""

    boxes: tuple[TaskBox, ...]
    curves: tuple[str, ...]
    width: int
    height: int


def place_tasks(needs: Mapping[str, Sequence[str]]) -> DagPicture:
    """Lay out tasks.

    ``needs`` has, by task in topological order, the tasks that must end before it starts.
    """
    columns: dict[str, int] = {}
    rows: dict[str, float] = {}
    for name, before in needs.items():
        columns[name] = max((columns[task] + 1 for task in before), default=0)
    for column in range(max(columns.values(), default=-1) + 1):
        names = [name for name in needs if columns[name] == column]
        # A task stands beside those that it needs, so that few curves cross.
        wanted = {
            name: sum(rows[task] for task in needs[name]) / len(needs[name]) if needs[name] else index
            for index, name in enumerate(names)
        }
        first = _first_row(list(wanted.values()), len(names))
        for index, name in enumerate(sorted(names, key=lambda task: wanted[task])):
            rows[name] = first + index
    top = min(rows.values(), default=0)
    boxes = {
        name: TaskBox(name, _EDGE + columns[name] * _COLUMN, round(_EDGE + (rows[name] - top) * _ROW)) for name in needs
    }
    return DagPicture(
        tuple(boxes.values()),
        tuple(_curve(boxes[need], box) for name, box in boxes.items() for need in needs[name]),
        max((box.x for box in boxes.values()), default=0) + BOX_WIDTH + _EDGE,
        max((box.y for box in boxes.values()), default=0) + BOX_HEIGHT + _EDGE,
    )


def _first_row(wanted: Sequence[float], count: int) -> float:
    """Row of the first of ``count`` tasks, so that their middle is the middle of the rows that they want."""
    return (min(wanted) + max(wanted)) / 2 - (count - 1) / 2


def _curve(before: TaskBox, after: TaskBox) -> str:
    x1, y1 = before.x + BOX_WIDTH, before.y + BOX_HEIGHT // 2
    x2, y2 = after.x, after.y + BOX_HEIGHT // 2
    bend = (x2 - x1) // 2 if x2 - x1 < _COLUMN else 48
    return f"M{x1} {y1}C{x1 + bend} {y1} {x2 - bend} {y2} {x2} {y2}"
