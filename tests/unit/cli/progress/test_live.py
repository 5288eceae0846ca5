"""The table that refreshes on a terminal, wide or narrow."""

from datetime import UTC, datetime

import pytest
from rich.console import Console

from hera_pipelines.cli.progress.table import ProgressTable, TrainingSnapshot, render_progress
from hera_pipelines.local.nodes import NodeChange, NodePhase
from tiphys.records import TrainingProgress

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def rendered(board: ProgressTable, width: int) -> list[str]:
    console = Console(width=width, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(render_progress(board, width))
    return capture.get().splitlines()


@pytest.fixture
def board() -> ProgressTable:
    made = ProgressTable(["preprocess", "fit"])
    for phase, message in ((NodePhase.PENDING, "a long message " * 10), (NodePhase.SUCCEEDED, "")):
        made.apply_change(NodeChange(NOON, "wf.preprocess.admit", "preprocess", "Plugin", "t", phase, message))
        made.apply_change(NodeChange(NOON, "wf.preprocess", "preprocess", "Steps", "t", phase, ""))
    return made


@pytest.mark.parametrize("width", [40, 60, 120])
def test_only_messages_are_cut_and_a_few_columns_stay_free_for_an_echo(board: ProgressTable, width: int) -> None:
    first, second = rendered(board, width)
    assert first.startswith("✓  preprocess  0s")
    assert first.rstrip().endswith("…")
    assert second.startswith("·  fit")
    assert max(len(line.rstrip()) for line in (first, second)) <= width - 4


def test_a_notice_about_the_run_stands_below_the_table(board: ProgressTable) -> None:
    board.notice = "stopping"
    assert rendered(board, 60)[-1].strip() == "stopping"


@pytest.mark.parametrize("width", [80, 120])
def test_a_running_training_shows_its_progress_in_the_place_of_a_message(width: int) -> None:
    board = ProgressTable(["fit"])
    board.apply_change(NodeChange(NOON, "wf.fit", "fit", "Steps", "t", NodePhase.RUNNING, ""))
    said = "Attempt 1 starts from the beginning"
    board.apply_change(NodeChange(NOON, "wf.fit.admit", "fit", "Plugin", "t", NodePhase.SUCCEEDED, said))
    now = datetime.now(UTC)
    reported = TrainingProgress(global_step=120, total_steps=500, metrics={"loss": 0.25}, written_at=now)
    board.record_training("fit", TrainingSnapshot(100, reported))
    [line] = rendered(board, width)
    assert "step 120 of 500, loss 0.25" in line
    assert "Attempt 1" not in line
    board.apply_change(NodeChange(NOON, "wf.fit", "fit", "Steps", "t", NodePhase.SUCCEEDED, ""))
    [line] = rendered(board, width)
    assert "step 100 saved" in line
    assert "120" not in line
