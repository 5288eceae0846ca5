"""The tree in the terminal says the same as the picture."""

import dataclasses
import io

from rich.console import Console

from hera_pipelines.draw.lineage_graph import AttemptEnding, CheckpointPosition, Dot, Lane, LineageGraph
from hera_pipelines.draw.lineage_text import render_lineage_tree
from tiphys.lineage.tree import CheckpointStatus


def rendered(lineage: LineageGraph) -> list[str]:
    console = Console(width=200, file=io.StringIO(), no_color=True)
    with console.capture() as capture:
        console.print(render_lineage_tree(lineage))
    return capture.get().splitlines()


def lane(
    attempt: int,
    steps: list[int],
    origin: CheckpointPosition | None = None,
    status: CheckpointStatus = CheckpointStatus.COMMITTED,
) -> Lane:
    dots = tuple(Dot(CheckpointPosition(attempt, step), status, facts=("1.4 MB",)) for step in steps)
    return Lane(attempt, 2, origin, AttemptEnding.FENCED, "resumed by submission 3", dots)


def test_attempts_tell_where_they_started_and_how_they_ended() -> None:
    lines = rendered(LineageGraph("digits", "train", (lane(1, [10]), lane(2, [20], CheckpointPosition(1, 10)))))
    assert lines[0] == "digits/train"
    assert "attempt 1, submission 2, from scratch: fenced, resumed by submission 3" in lines[1]
    assert "attempt 2, submission 2, from step 10 of attempt 1: fenced" in lines[3]


def test_a_checkpoint_that_is_not_simply_committed_says_what_it_is() -> None:
    lines = rendered(LineageGraph("digits", "train", (lane(1, [10], status=CheckpointStatus.QUARANTINED),)))
    assert lines[2].endswith("✗ step 10 quarantined  1.4 MB")


def test_long_lineages_are_counted_instead_of_listed() -> None:
    lines = rendered(LineageGraph("digits", "train", (lane(1, list(range(1, 101))),)))
    assert len(lines) == 5
    assert lines[3].endswith("⋮ 98 checkpoints, steps 2 to 99")


def test_markup_in_names_is_printed_as_it_is() -> None:
    assert rendered(LineageGraph("digits", "[bold]fit[/bold]", ())) == ["digits/[bold]fit[/bold]"]


def test_data_is_described_where_it_changes() -> None:
    lanes = [
        dataclasses.replace(lane(number, []), data=data) for number, data in enumerate(("", "a 1", "a 1", "a 2", ""))
    ]
    lines = rendered(LineageGraph("digits", "train", tuple(lanes)))
    assert [line.split("data: ")[1] for line in lines if "data: " in line] == ["a 1", "a 2", "none"]


def test_the_report_on_the_grace_period_stands_below_the_checkpoints() -> None:
    stopped = dataclasses.replace(lane(1, [10]), report="told to stop at step 10: it was committed 0.2 s after SIGTERM")
    assert rendered(LineageGraph("digits", "train", (stopped,)))[3].endswith(f"⚑ {stopped.report}")
