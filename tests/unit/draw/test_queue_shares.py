"""GPUs held over time: means of intervals, plots by queue, quota, and names made of markup."""

import re
from datetime import UTC, datetime, timedelta
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.builders.hostile_text import HOSTILE, control_characters

from hera_pipelines.draw.queue_shares import (
    INTERVALS,
    LEFT,
    MAX_QUEUES,
    PLOT_HEIGHT,
    PLOT_WIDTH,
    TOP,
    GpuHold,
    average_held,
    render_shares_svg,
)

SVG = "{http://www.w3.org/2000/svg}"
BEGIN = datetime(2030, 1, 1, tzinfo=UTC)
NOW = BEGIN + timedelta(hours=24)
INTERVAL_SECONDS = 24 * 3600 / INTERVALS


def hold(begin: float, end: float | None, gpus: int = 8, queue: str = "research") -> GpuHold:
    """``begin`` and ``end`` in hours after `BEGIN`."""
    last = None if end is None else BEGIN + timedelta(hours=end)
    return GpuHold(queue, gpus, BEGIN + timedelta(hours=begin), last)


def test_a_lease_held_all_the_time_counts_in_each_interval() -> None:
    assert average_held([hold(-5, None), hold(-9, 30, 2)], BEGIN, NOW) == [10.0] * INTERVALS


def test_a_short_attempt_counts_for_its_part_of_an_interval() -> None:
    held = average_held([hold(1.0, 1.0 + INTERVAL_SECONDS / 4 / 3600)], BEGIN, NOW)
    assert held[10] == pytest.approx(2.0, abs=1e-4)
    assert sum(held) == pytest.approx(2.0, abs=1e-4)


def test_an_end_before_its_begin_holds_nothing() -> None:
    assert average_held([hold(6, 5)], BEGIN, NOW) == [0.0] * INTERVALS


@given(
    st.lists(
        st.tuples(
            st.floats(-30, 40, allow_nan=False), st.floats(0, 50, allow_nan=False), st.integers(1, 64), st.booleans()
        ),
        max_size=20,
    )
)
def test_gpu_time_is_neither_lost_nor_made(drawn: list[tuple[float, float, int, bool]]) -> None:
    holds = [hold(begin, None if goes_on else begin + length, gpus) for begin, length, gpus, goes_on in drawn]
    inside = 0.0
    for one in holds:
        first, last = max(one.begin, BEGIN), min(one.end or NOW, NOW)
        inside += one.gpus * max(0.0, (last - first).total_seconds())
    shown = [one for one in holds if one.begin < NOW and (one.end or NOW) > BEGIN]
    held = average_held(shown, BEGIN, NOW)
    assert sum(held) * INTERVAL_SECONDS == pytest.approx(inside, rel=1e-5, abs=0.5)
    assert min(held) > -1e-3


def draw(holds: list[GpuHold], quotas: dict[str, int]) -> ElementTree.Element:
    return ElementTree.fromstring(render_shares_svg("GPUs", holds, BEGIN, NOW, quotas))


def texts(root: ElementTree.Element) -> list[str]:
    return [label.text or "" for label in root.iter(f"{SVG}text")]


def paths(root: ElementTree.Element, tooltip: str) -> list[str]:
    """The shapes whose tooltip begins with ``tooltip``."""
    return [
        path.get("d", "")
        for path in root.iter(f"{SVG}path")
        if (path.findtext(f"{SVG}title") or "").startswith(tooltip)
    ]


def test_a_queue_has_a_plot_with_its_mean_share_and_quota() -> None:
    root = draw([hold(0, 12), hold(0, None, 4, "batch"), hold(-9, -1, 64, "gone")], {"research": 16})
    marks, plots = texts(root)[:-10], texts(root)[-10:]
    assert marks
    assert all(mark.endswith("ago") for mark in marks)
    assert sorted([plots[:5], plots[5:]]) == [
        ["batch", "4.0 on average", "50% of all GPU time", "4", "0"],
        ["research", "4.0 of 16 (25%) on average", "50% of all GPU time", "16", "0"],
    ]
    assert len(paths(root, "quota")) == 1


def test_borrowed_gpus_stand_above_the_quota() -> None:
    root = draw([hold(0, None, 12)], {"research": 6})
    bottom, right = TOP + PLOT_HEIGHT, LEFT + PLOT_WIDTH
    assert paths(root, "quota") == [f"M{LEFT} {TOP + PLOT_HEIGHT // 2}H{right}"]
    assert paths(root, "research") == [f"M{LEFT} {TOP}V{TOP}H{right}V{bottom}H{LEFT}Z"]


def test_the_queues_that_held_most_are_shown() -> None:
    root = draw([hold(0, None, gpus, f"queue-{gpus:02}") for gpus in range(1, MAX_QUEUES + 6)], {})
    names = [text for text in texts(root) if text.startswith("queue-")]
    assert (names[:2], len(names)) == (["queue-25", "queue-24"], MAX_QUEUES)
    assert "5 more queues are left out." in texts(root)


@pytest.mark.parametrize("holds", [[], [hold(0, None, 8, f"<script>{HOSTILE}" + "n" * 1024)]])
def test_a_picture_is_well_formed_whatever_a_queue_is_called(holds: list[GpuHold]) -> None:
    svg = render_shares_svg("GPUs", holds, BEGIN, NOW, {})
    tags = {re.sub("{.*}", "", node.tag) for node in ElementTree.fromstring(svg).iter()}
    assert "script" not in tags
    assert not control_characters(svg)
    assert ("No run of this store held GPUs" in svg) == (not holds)
