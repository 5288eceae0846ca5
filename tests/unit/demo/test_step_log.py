"""Repeated work is counted exactly, also when a kill cut the last line short."""

from pathlib import Path

import pytest

from hera_pipelines.demo.facts import ExecutedStep, count_repeated_steps, open_step_log, read_steps


def executed(attempt: int, steps: range) -> list[ExecutedStep]:
    return [ExecutedStep(attempt, 7, step) for step in steps]


def test_what_is_appended_reads_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for attempt in ("1", "2"):
        monkeypatch.setenv("TIPHYS_ATTEMPT", attempt)
        with open_step_log(tmp_path) as log_step:
            log_step(5)
    assert [(step.attempt, step.global_step) for step in read_steps(tmp_path)] == [(1, 5), (2, 5)]


def test_without_a_folder_nothing_is_kept(tmp_path: Path) -> None:
    with open_step_log(None) as log_step:
        log_step(1)
    assert list(tmp_path.iterdir()) == []


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "0001.log").write_text("7 1\n7 2")
    assert [step.global_step for step in read_steps(tmp_path)] == [1]


@pytest.mark.parametrize(
    ("steps", "again"),
    [
        ([], 0),
        (executed(1, range(1, 11)), 0),
        (executed(1, range(1, 11)) + executed(2, range(11, 15)), 0),
        (executed(1, range(1, 11)) + executed(2, range(8, 15)), 3),
        (executed(1, range(1, 11)) + executed(2, range(8, 10)) + executed(3, range(8, 15)), 5),
    ],
)
def test_only_repetitions_count(steps: list[ExecutedStep], again: int) -> None:
    assert count_repeated_steps(steps) == again
