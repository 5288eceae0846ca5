"""The picture of a replay: its areas are GPU-hours, within its frame, and any viewer can read it."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from support.builders.ledger import queues
from tiphys_plugin.quota.simulation.jobs import ReplayResult, TraceJob
from tiphys_plugin.quota.simulation.replay import replay_jobs

from hera_pipelines.draw.charts import axis_maximum, time_marks
from hera_pipelines.draw.simulation_svg import (
    CHART_WIDTH,
    COLUMNS,
    HELD_HEIGHT,
    LEFT,
    MAX_BANDS,
    OTHER_QUEUES,
    PANEL_HEIGHT,
    WIDTH,
    build_bands,
    largest_queues,
    render_simulation_svg,
)

SVG = "{http://www.w3.org/2000/svg}"
JOBS = (
    TraceJob("a", 0, 100, 4, "research"),
    TraceJob("b", 0, 100, 4, "research"),
    TraceJob("c", 50, 50, 2, "nightly"),
    TraceJob("d", 10, 20, 1, "nightly"),
)
RULES = queues(research={"*": 4}, nightly={"*": 2})


REPLAY = replay_jobs(RULES, JOBS)


def draw(*replays: ReplayResult, seconds: float = 200.0, title: str = "jobs.csv") -> ElementTree.Element:
    named = {f"queues-{number}.yaml": replay for number, replay in enumerate(replays)}
    return ElementTree.fromstring(render_simulation_svg(title, named, 0.0, seconds))


def areas(root: ElementTree.Element) -> list[str]:
    """Paths of the bands, those of a panel one after the other."""
    return [path.get("d", "") for path in root.iter(f"{SVG}path") if path.get("d", "").count("V") and path[:]]


def corners(path: str) -> list[tuple[float, float]]:
    """Points of a path of M, H, V and Z alone."""
    x = y = 0.0
    points = []
    for verb, numbers in re.findall(r"([MHVZ])([^MHVZ]*)", path):
        given = [float(number) for number in numbers.split()]
        if verb == "M":
            x, y = given
        elif verb == "H":
            (x,) = given
        elif verb == "V":
            (y,) = given
        points.append((x, y))
    return points


def area(points: list[tuple[float, float]]) -> float:
    closed = zip(points, [*points[1:], points[0]], strict=True)
    return abs(sum(x1 * y2 - x2 * y1 for (x1, y1), (x2, y2) in closed)) / 2


def test_columns_hold_the_gpu_seconds_of_each_queue():
    width = 200.0 / COLUMNS
    research, nightly = build_bands(REPLAY, 0.0, 200.0, ["research", "nightly"])
    assert sum(research.held) * width == pytest.approx(4 * 200)
    assert sum(nightly.held) * width == pytest.approx(2 * 50 + 1 * 20)
    assert sum(research.waiting) * width == pytest.approx(4 * 100)
    assert sum(nightly.waiting) == pytest.approx(0)
    assert (research.held[0], nightly.held[0]) == (4, 0)


def test_a_column_shows_the_mean_of_its_time():
    done = replay_jobs(queues(research={"*": 8}), [TraceJob("blink", 30, 1, 8, "research")])
    (band,) = build_bands(done, 0.0, 100.0 * COLUMNS, ["research"])
    assert band.held[0] == pytest.approx(0.08)
    assert sum(band.held) == pytest.approx(0.08)


def test_a_job_that_never_starts_waits_until_the_end():
    stopped = queues(research={"*": 8}, stopped={"*": 8})
    done = replay_jobs(RULES, JOBS)
    never = replace(done, queues=stopped, runs=(), never_started=(TraceJob("never", 50, 1, 8, "stopped"),))
    (band,) = build_bands(never, 0.0, 100.0, ["stopped"])[:1]
    assert sum(band.waiting) * 100 / COLUMNS == pytest.approx(8 * 50)


def test_areas_are_the_gpu_seconds_that_were_held():
    pixels = [area(corners(path)) for path in areas(draw(REPLAY))]
    per_gpu_second = CHART_WIDTH / 200 * HELD_HEIGHT / 8
    assert pixels[0] / per_gpu_second == pytest.approx(800, rel=0.01)
    assert pixels[1] / per_gpu_second == pytest.approx(120, rel=0.02)


def test_marks_of_a_simulation_are_within_their_panel():
    root = draw(REPLAY, REPLAY)
    paths = areas(root)
    assert len(paths) == 2 * 3
    top = float(root.get("height", "0")) - 2 * PANEL_HEIGHT
    for number, path in enumerate(paths):
        xs, ys = zip(*corners(path), strict=True)
        assert LEFT <= min(xs) <= max(xs) <= LEFT + CHART_WIDTH < WIDTH
        panel = top + number // 3 * PANEL_HEIGHT
        assert panel < min(ys) <= max(ys) < panel + PANEL_HEIGHT


def texts(root: ElementTree.Element) -> list[str]:
    return ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]


def test_quota_and_inventory_are_lines():
    rules = queues({"A100": {"count": 6}}, research={"A100": 8})
    done = replay_jobs(rules, [TraceJob("a", 0, 10, 4, "research")])
    assert {"quotas 8", "inventory 6"} <= set(texts(draw(done)))
    equal = replay_jobs(queues({"A100": {"count": 8}}, research={"A100": 8}), [])
    assert "quotas and inventory 8" in texts(draw(equal))


def test_names_cannot_break_out_of_the_picture():
    done = replay_jobs(queues(**{"<a&b>": {"*": 1}}), [TraceJob("x", 0, 1, 1, "<a&b>")])
    assert {"<t>", "<a&b><a&b>"} <= set(texts(draw(done, title="<t>")))


def test_beyond_some_queues_the_smaller_ones_are_drawn_together():
    rules = queues(**{f"q{n:02}": {"*": 4} for n in range(12)})
    done = replay_jobs(rules, [TraceJob(f"j{n}", 0, 10 * (n + 1), 1, f"q{n:02}") for n in range(12)])
    shown = largest_queues([done])
    assert shown == [f"q{n:02}" for n in range(5, 12)]
    bands = build_bands(done, 0.0, 120.0, shown)
    assert [band.label for band in bands] == [*shown, OTHER_QUEUES]
    assert len(bands) == MAX_BANDS
    assert sum(sum(band.held) for band in bands) * 120 / COLUMNS == pytest.approx(sum(10 * (n + 1) for n in range(12)))
    assert OTHER_QUEUES in "".join(texts(draw(done, seconds=120.0)))


def test_an_empty_replay_is_a_picture():
    draw(replay_jobs(queues(), []), seconds=1.0)


@pytest.mark.parametrize(("most", "top"), [(0, 1), (0.3, 1), (1, 1), (3, 4), (9, 10), (10, 10), (64, 80), (101, 200)])
def test_an_axis_ends_at_a_round_number(most, top):
    assert axis_maximum(most) == top


@pytest.mark.parametrize(
    ("seconds", "labels"),
    [
        (4, ["1s", "2s", "3s", "4s"]),
        (3600, ["15m", "30m", "45m", "60m"]),
        (86400, ["3h", "6h", "9h", "12h", "15h", "18h", "21h", "24h"]),
        (10 * 86400, ["2d", "4d", "6d", "8d", "10d"]),
        (400 * 86400, ["50d", "100d", "150d", "200d", "250d", "300d", "350d", "400d"]),
    ],
)
def test_time_is_marked_at_numbers_that_a_person_would_choose(seconds, labels):
    assert [label for _, label in time_marks(seconds)] == labels


@pytest.mark.parametrize("seconds", [1, 17, 500, 12345, 1e6, 3.3e7, 1e9, 1e11])
def test_the_time_axis_has_one_to_eight_marks(seconds):
    marks = time_marks(seconds)
    assert 1 <= len(marks) <= 8
    assert all(0 < at <= seconds for at, _ in marks)
