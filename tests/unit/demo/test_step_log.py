"""Repeated work is counted exactly, also when a kill cut the last line short."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from hera_pipelines.demo.facts import ExecutedStep, StepLog, count_repeated_steps, read_steps, seconds_lost

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def executed(attempt: int, steps: range, begins: float) -> list[ExecutedStep]:
    return [ExecutedStep(attempt, 7, step, NOON + timedelta(seconds=begins + i)) for i, step in enumerate(steps)]


def test_what_is_appended_reads_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for attempt in ("1", "2"):
        monkeypatch.setenv("TIPHYS_ATTEMPT", attempt)
        with StepLog(tmp_path) as log:
            log.append(5, NOON)
    assert [(s.attempt, s.global_step, s.executed_at) for s in read_steps(tmp_path)] == [(1, 5, NOON), (2, 5, NOON)]


def test_without_a_folder_nothing_is_kept(tmp_path: Path) -> None:
    with StepLog(None) as log:
        log.append(1, NOON)
    assert list(tmp_path.iterdir()) == []


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "0001.log").write_text(f"7 1 {NOON.isoformat()}\n7 2 2026-01-0")
    assert [step.global_step for step in read_steps(tmp_path)] == [1]


@pytest.mark.parametrize(
    ("steps", "again"),
    [
        ([], 0),
        (executed(1, range(1, 11), 0), 0),
        (executed(1, range(1, 11), 0) + executed(2, range(11, 15), 20), 0),
        (executed(1, range(1, 11), 0) + executed(2, range(8, 15), 20), 3),
        (executed(1, range(1, 11), 0) + executed(2, range(8, 10), 20) + executed(3, range(8, 15), 40), 5),
    ],
)
def test_only_repetitions_count(steps: list[ExecutedStep], again: int) -> None:
    assert count_repeated_steps(steps) == again


def test_lost_seconds_run_until_training_is_back_where_it_was() -> None:
    steps = executed(1, range(1, 11), 0) + executed(2, range(8, 15), 20)
    assert seconds_lost(steps) == [22 - 9]


def test_an_interruption_without_a_successor_loses_no_known_time() -> None:
    assert seconds_lost(executed(1, range(1, 11), 0)) == []
