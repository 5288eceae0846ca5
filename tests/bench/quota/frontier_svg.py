"""Draws what bounds on overtaking cost: mean completion against the longest wait of a gang, a curve for each trace."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FRONTIER_PICTURE = Path(__file__).parents[3] / "docs/images/backfill.svg"
_WIDTH, _HEIGHT, _MARGIN = 640, 320, 50
_COLORS = ("#4e79a7", "#e15759")


def render_frontier(frontier: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """An SVG picture: to the right the mean, upwards the wait, both times those of skipping."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        *_axes(),
    ]
    for number, (trace, points) in enumerate(frontier.items()):
        lines += _curve(trace, points, _COLORS[number % len(_COLORS)], number)
    return "\n".join([*lines, "</svg>", ""])


def _at(ratio: float, wait: float) -> tuple[float, float]:
    """Pixels of a mean from 0.8 to 2.2 and of a wait from 0 to 1.2, both relative to skipping."""
    x = _MARGIN + (ratio - 0.8) / 1.4 * (_WIDTH - 2 * _MARGIN)
    return round(x, 1), round(_HEIGHT - _MARGIN - wait / 1.2 * (_HEIGHT - 2 * _MARGIN), 1)


def _axes() -> Iterator[str]:
    right, middle = _WIDTH - _MARGIN, _WIDTH / 2
    for ratio in (1.0, 1.2, 1.4, 1.6, 1.8, 2.0):
        x, y = _at(ratio, 0)
        yield f'<path d="M{x} {y}V{_MARGIN}" stroke="#ddd"/>'
        yield f'<text x="{x}" y="{y + 14}" text-anchor="middle">{ratio}</text>'
    for wait in (0.0, 0.5, 1.0):
        x, y = _at(0.8, wait)
        yield f'<path d="M{x} {y}H{right}" stroke="#ddd"/><text x="{x - 6}" y="{y}" text-anchor="end">{wait}</text>'
    axis = "mean completion, times that of skipping"
    yield f'<text x="{middle}" y="{_HEIGHT - 12}" text-anchor="middle">{axis}</text>'
    yield f'<text x="{_MARGIN}" y="20">longest wait of a gang, times that of skipping; labels: backfill_hours</text>'


def _curve(trace: str, points: Mapping[str, Mapping[str, Any]], color: str, number: int) -> Iterator[str]:
    longest = points["skip"]["gang_wait_hours"]
    hours = sorted((name for name in points if name not in ("skip", "strict")), key=float)
    placed = [
        (name, *_at(points[name]["ratio"], points[name]["gang_wait_hours"] / longest))
        for name in ("strict", *hours, "skip")
    ]
    path = " ".join(f"{x},{y}" for _, x, y in placed)
    yield f'<polyline points="{path}" fill="none" stroke="{color}"/>'
    for name, x, y in placed:
        yield f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/><text x="{x + 4}" y="{y - 5}">{name}</text>'
    yield f'<text x="{_WIDTH - _MARGIN}" y="{36 + 14 * number}" text-anchor="end" fill="{color}">{trace}</text>'
