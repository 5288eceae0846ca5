"""The demo believes what lies in storage, counts repeated work exactly, and says what is not there."""

from pathlib import Path

import pytest
from support.builders.lineage import START_TIMES

from hera_pipelines.demo.processes import PromiseBrokenError
from hera_pipelines.demo.story import DemoRun, ExecutedStep
from tiphys.records import CheckpointManifest
from tiphys.store import LineageLayout


@pytest.fixture
def run(tmp_path: Path) -> DemoRun:
    return DemoRun(tmp_path, "digits")


def commit(run: DemoRun, attempt: int, step: int) -> None:
    layout = LineageLayout("digits/train")
    manifest = CheckpointManifest(
        lineage="digits/train",
        run="digits",
        step="train",
        attempt=attempt,
        global_step=step,
        shards=(),
        began=START_TIMES,
    )
    run.store.create(layout.manifest(attempt, step), manifest.with_seal().to_bytes())


def test_the_newest_checkpoint_is_that_of_the_attempt_asked_for(run: DemoRun) -> None:
    for attempt, step in ((1, 100), (1, 200), (2, 150)):
        commit(run, attempt, step)
    found = run.newest_checkpoint(1)
    assert found and (found.attempt, found.global_step) == (1, 200)
    assert run.newest_checkpoint(3) is None


def test_a_step_without_a_result_breaks_the_promise(run: DemoRun) -> None:
    with pytest.raises(PromiseBrokenError, match="step train has no result"):
        run.digest_model()


def test_a_line_cut_short_by_a_kill_is_left_out(run: DemoRun) -> None:
    assert (run.executed_steps(), run.last_step()) == ([], ExecutedStep(0, 0, 0))
    run.step_log.write_text("1 7 1\n1 7 2")
    assert run.executed_steps() == [run.last_step()] == [ExecutedStep(1, 7, 1)]


@pytest.mark.parametrize(
    ("attempts", "repeated"),
    [
        ([], 0),
        ([range(1, 11)], 0),
        ([range(1, 11), range(11, 15)], 0),
        ([range(1, 11), range(8, 15)], 3),
        ([range(1, 11), range(8, 10), range(8, 15)], 5),
    ],
)
def test_only_repetitions_count(run: DemoRun, attempts: list[range], repeated: int) -> None:
    lines = [f"{attempt} 7 {step}\n" for attempt, steps in enumerate(attempts, 1) for step in steps]
    run.step_log.write_text("".join(lines))
    assert run.count_repeated_steps() == repeated
