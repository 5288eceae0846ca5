"""Plots of the metrics of checkpoints: what led to the newest one, what was done again, and values that are none."""

import math
import re
from datetime import UTC, datetime
from xml.etree import ElementTree

import pytest

from hera_pipelines.draw.metric_plots import (
    MAX_PLOTS,
    MAX_POINTS,
    MetricPlot,
    find_line_of_descent,
    list_metric_plots,
    render_metrics_svg,
)
from tiphys.lineage.tree import AttemptNode, CheckpointNode, CheckpointStatus, LineageTree, StepLineage
from tiphys.records import CheckpointRef

SVG = "{http://www.w3.org/2000/svg}"
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def ref(attempt: int, step: int, lineage: str = "abc") -> CheckpointRef:
    return CheckpointRef(lineage=lineage, attempt=attempt, global_step=step)


def attempt(
    number: int,
    metrics: dict[int, dict[str, float]],
    begins: CheckpointRef | None = None,
    statuses: dict[int, CheckpointStatus] | None = None,
) -> AttemptNode:
    """An attempt with one checkpoint for each global step, each of which descends from the one before."""
    nodes, parent = [], begins
    for step, values in metrics.items():
        status = (statuses or {}).get(step, CheckpointStatus.COMMITTED)
        nodes.append(CheckpointNode(ref=ref(number, step), status=status, parent=parent, metrics=values))
        parent = ref(number, step)
    return AttemptNode(attempt=number, submission=1, started_at=NOW, starts_from=begins, checkpoints=tuple(nodes))


def loss(*steps: int, value: float = 1.0) -> dict[int, dict[str, float]]:
    return {step: {"loss": value / step} for step in steps}


def tree(*attempts: AttemptNode, step: str = "train") -> LineageTree:
    return LineageTree(run="digits", steps=(StepLineage(step=step, lineage="abc", attempts=attempts),))


def draw(found: LineageTree) -> tuple[list[MetricPlot], ElementTree.Element]:
    return list_metric_plots(found), ElementTree.fromstring(render_metrics_svg("Metrics", found))


def lines(root: ElementTree.Element) -> list[str]:
    """Paths of the lines; those of the grid and the point at the end have no tooltip."""
    return [path.get("d", "") for path in root.iter(f"{SVG}path") if path[:]]


def texts(root: ElementTree.Element) -> list[str]:
    return [label.text or "" for label in root.iter(f"{SVG}text")]


def test_the_line_of_descent_goes_through_attempts_and_leaves_out_what_was_done_again():
    lineage = tree(
        attempt(1, loss(10, 20, 30)), attempt(2, loss(30, 40, 50), ref(1, 20)), attempt(3, loss(50, 60), ref(2, 40))
    ).steps[0]
    assert find_line_of_descent(lineage) == [(1, 10), (1, 20), (2, 30), (2, 40), (3, 50), (3, 60)]
    (plot,), root = draw(LineageTree(run="digits", steps=(lineage,)))
    assert [line.is_kept for line in plot.lines] == [False, False, True]
    assert [line.tooltip for line in plot.lines[:2]] == [
        "attempt 1: steps 30 to 30 were done again or given up",
        "attempt 2: steps 50 to 50 were done again or given up",
    ]
    assert lines(root)[-1].count("L") == 5
    assert {"step 10", "60", format(1 / 60, ".4g")} <= set(texts(root))


def test_an_attempt_without_a_checkpoint_follows_the_one_from_which_it_started():
    lineage = tree(attempt(1, loss(10, 20, 30)), attempt(2, {}, ref(1, 20))).steps[0]
    assert find_line_of_descent(lineage) == [(1, 10), (1, 20)]


def test_parents_in_a_circle_or_in_another_lineage_end_the_line():
    circle = attempt(1, loss(10, 20), ref(1, 20))
    assert find_line_of_descent(tree(circle).steps[0]) == [(1, 10), (1, 20)]
    fork = attempt(1, loss(30), ref(4, 20, lineage="of-its-parent"))
    assert find_line_of_descent(tree(fork).steps[0]) == [(1, 30)]


@pytest.mark.parametrize("status", [CheckpointStatus.DAMAGED, CheckpointStatus.REMOVED])
def test_checkpoints_that_are_gone_or_damaged_have_no_point(status):
    _, root = draw(tree(attempt(1, loss(10, 20), statuses={10: status})))
    assert {"step 20", "20"} <= set(texts(root))


def test_values_that_are_no_numbers_leave_gaps_and_are_named():
    values = {10: {"loss": 2.0}, 20: {"loss": math.nan}, 30: {"loss": math.inf}}
    _, root = draw(tree(attempt(1, values)))
    assert "inf" in texts(root)
    assert not [path for path in root.iter(f"{SVG}path") if path.get("class") == "kept point"]
    assert all(math.isfinite(float(number)) for path in lines(root) for number in numbers(path))


@pytest.mark.parametrize("values", [(1.0, 1.0), (-1.7e308, 1.7e308), (0.0, 5e-324)])
def test_equal_and_extreme_values_stay_inside_the_plot(values):
    metrics = {10 * (index + 1): {"loss": value} for index, value in enumerate(values)}
    _, root = draw(tree(attempt(1, metrics)))
    assert all(0 <= float(number) <= 300 for path in lines(root) for number in numbers(path))


def numbers(path: str) -> list[str]:
    return re.findall(r"[-\w.]+", path.replace("M", " ").replace("L", " "))


def test_names_of_metrics_cannot_leave_the_picture():
    name = '</text><script>alert("1")</script>'
    plots, root = draw(tree(attempt(1, {10: {name: 1.0}}), step="<b>fit"))
    assert [plot.metric for plot in plots] == [name]
    assert not list(root.iter(f"{SVG}script"))
    assert not list(root.iter(f"{SVG}b"))


def test_losses_come_first_and_what_is_too_much_is_counted():
    many = {f"metric-{number:02d}": 1.0 for number in range(30)}
    plots, root = draw(tree(attempt(1, {10: {**many, "val_loss": 1.0}})))
    assert plots[0].metric == "val_loss"
    assert (len(plots), len(lines(root))) == (31, MAX_PLOTS)
    assert "7 more are left out." in "".join(root.itertext())


def test_a_long_line_is_drawn_by_few_points_and_keeps_its_ends():
    _, root = draw(tree(attempt(1, loss(*range(1, 5001)))))
    (line,) = lines(root)
    assert line.count("L") <= MAX_POINTS
    assert {"step 1", "5,000"} <= set(texts(root))
    (point,) = (path.get("d", "") for path in root.iter(f"{SVG}path") if path.get("class") == "kept point")
    assert line.endswith(point.removeprefix("M").removesuffix("h0"))


def test_a_run_without_metrics_says_so():
    plots, root = draw(tree(attempt(1, {10: {}})))
    assert not plots
    assert "No stored checkpoint has metrics yet." in "".join(root.itertext())
