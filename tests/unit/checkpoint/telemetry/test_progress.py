"""What a training says of its progress: seldom, small, and without harm to the training.

| step                                | reported |
|-------------------------------------|----------|
| within a second of the start        | no       |
| the first one after it              | yes, without a pace |
| within the interval                 | no       |
| after the interval                  | yes, with the pace |
| the last of all                     | yes      |
| of another rank than the first      | no       |
| while storage fails                 | dropped  |
"""

import math
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.builders.lineage import LINEAGE, ref
from support.fakes.memory_store import MemoryStore
from support.stories.sessions import Clock, open_session, state_at

from tiphys.checkpoint.ranks.barrier import RankInfo
from tiphys.checkpoint.session import Session
from tiphys.checkpoint.settings import SaveInterval
from tiphys.checkpoint.telemetry.progress import ProgressReporter, SavedStep
from tiphys.lineage.training_progress import read_training_progress
from tiphys.records import TrainingProgress
from tiphys.store import DirectoryStore, LineageLayout, Store

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
NEVER = SaveInterval(10**9, "steps")


class Commits:
    """The commits of an attempt: what it saved last, and why it commits nothing."""

    def __init__(self, saved: SavedStep | None = None, hindrance: str = "") -> None:
        self.newest_saved, self.hindrance = saved, hindrance

    def explain_missing_commit(self, global_step: int) -> str:
        return self.hindrance and f"{self.hindrance} after step {global_step}"


class Training:
    """A program that takes a step whenever the test says so."""

    def __init__(self, store: Store | None, argo_file: str = "", saved: SavedStep | None = None) -> None:
        self.store, self.clock = store, Clock()
        self.commits = Commits(saved)
        self.reporter = ProgressReporter(store, LINEAGE, 1, {"ARGO_PROGRESS_FILE": argo_file}, self.commits, self.clock)

    def step(self, number: int, after: float, total: int | None = 100, **metrics: float) -> TrainingProgress | None:
        """The newest report once the step is complete."""
        self.clock.advance(after)
        self.reporter.record_step(number, total, metrics)
        self.reporter.close()
        return read_training_progress(self.store, LINEAGE) if self.store else None


def test_reports_come_at_intervals_and_tell_the_pace_of_the_last_ones():
    training = Training(MemoryStore(), saved=SavedStep(7, NOON))
    assert training.step(10, 0.5) is None
    first = training.step(11, 0.5, loss=0.5)
    assert first is not None
    assert (first.global_step, first.total_steps, first.steps_per_second) == (11, 100, None)
    assert (first.metrics, first.checkpoint_step, first.checkpoint_at) == ({"loss": 0.5}, 7, NOON)
    assert training.step(12, 9.0) == first
    later = training.step(31, 1.0)
    assert later is not None
    assert (later.global_step, later.steps_per_second) == (31, pytest.approx(2.0))


def test_the_last_step_is_always_reported():
    training = Training(MemoryStore())
    training.step(98, 1.0)
    assert (last := training.step(100, 0.1)) is not None
    assert last.global_step == 100


def test_a_folder_is_written_more_often_than_a_bucket(tmp_path: Path):
    training = Training(DirectoryStore(tmp_path))
    training.step(1, 1.0)
    assert (second := training.step(2, 2.0)) is not None
    assert second.global_step == 2


def test_few_reports_stay_however_long_it_trains():
    store = MemoryStore()
    training = Training(store)
    for step in range(1, 30):
        training.step(step, 10.0)
    assert len(store.objects) <= 2


def test_a_report_is_small_whatever_metrics_the_program_gives():
    class Array:
        def __float__(self) -> float:
            raise RuntimeError("the device is lost")

    training = Training(MemoryStore())
    given = {
        "loss": math.nan,
        "lr": 0.1,
        "broken": Array(),
        "x" * 1000: 1.0,
        "a\nb": 2.0,
        **{f"m{i}": i for i in range(99)},
    }
    report = training.step(1, 1.0, **given)  # type: ignore[arg-type]
    assert report is not None
    assert math.isnan(report.metrics.pop("loss"))
    assert report.metrics == {"lr": 0.1, "m0": 0.0, "m1": 1.0, "m2": 2.0}
    assert len(report.to_bytes()) < TrainingProgress.max_bytes


def test_a_report_that_cannot_be_stored_is_dropped_and_the_next_one_follows():
    store = MemoryStore()
    store.refuses = lambda operation, key: True
    training = Training(store)
    training.reporter.record_step(1, None, None)
    training.clock.advance(1.0)
    training.reporter.record_step(2, None, None)
    training.reporter.close()
    store.refuses = lambda operation, key: False
    assert (report := training.step(3, 10.0, total=None)) is not None
    assert (report.global_step, report.total_steps) == (3, None)


def test_argo_reads_step_and_total_from_its_file(tmp_path: Path):
    path = tmp_path / "progress"
    training = Training(MemoryStore(), str(path))
    seen = []
    for step, after in [(1, 1.0), (2, 0.5), (3, 10.0), (4, 0.1)]:
        training.step(step, after, total=4)
        seen.append(path.read_text())
    assert seen == ["1/4\n", "1/4\n", "3/4\n", "4/4\n"]
    training.step(5, 10.0, total=4)
    assert path.read_text() == "4/4\n"


def test_a_file_of_argo_that_cannot_be_written_and_an_unknown_total_are_left_out(tmp_path: Path):
    Training(MemoryStore(), str(tmp_path / "absent" / "progress")).step(4, 1.0, total=4)
    Training(MemoryStore(), str(tmp_path / "progress")).step(4, 1.0, total=None)
    assert list(tmp_path.iterdir()) == []


def test_a_session_reports_its_steps_and_the_checkpoint_behind_them():
    store, clock = MemoryStore(), Clock()
    with open_session(store, clock=clock, total_steps=9) as session:
        session.step(1, state_at(1))
        clock.advance(1.0)
        session.step(2, state_at(2), metrics={"loss": 0.25})
    report = read_training_progress(store, LINEAGE)
    assert report is not None
    assert (report.global_step, report.total_steps, report.metrics) == (2, 9, {"loss": 0.25})
    assert (report.checkpoint_step, report.checkpoint_at is not None) == (1, True)


def test_a_resumed_session_reports_the_checkpoint_that_it_restored():
    store, clock = MemoryStore(), Clock()
    with open_session(store) as session:
        session.step(5, state_at(5))
    with open_session(store, 2, clock=clock, every=NEVER, resume_from=ref(1, 5)) as session:
        session.restore(state_at(0))
        session.total_steps = 20
        clock.advance(1.0)
        session.report(6, {"loss": 1.0})
    report = read_training_progress(store, LINEAGE, 2)
    assert report is not None
    assert (report.global_step, report.total_steps, report.checkpoint_step) == (6, 20, 5)
    assert read_training_progress(store, LINEAGE, 1) is None


def test_only_the_first_rank_reports():
    store, clock = MemoryStore(), Clock()
    with open_session(store, clock=clock, every=NEVER, rank_info=RankInfo(rank=1, world_size=2)) as session:
        clock.advance(60.0)
        session.report(6)
    assert not [key for key in store.objects if key.startswith(LineageLayout(LINEAGE).training_progress)]


def test_outside_of_tiphys_a_report_does_nothing():
    session = Session()
    session.total_steps = 5
    session.report(1, {"loss": 1.0})


def test_report_says_why_nothing_is_committed_until_a_commit():
    training = Training(MemoryStore())
    training.commits.hindrance = "the next save is due later"
    assert (before := training.step(10, 1.0)) is not None
    assert before.hindrance == "the next save is due later after step 10"
    training.commits.newest_saved, training.commits.hindrance = SavedStep(20, NOON), ""
    assert (after := training.step(20, 10.0)) is not None
    assert (after.hindrance, after.checkpoint_step) == ("", 20)


def test_writer_without_steps_reports_its_hindrance_at_once():
    store = MemoryStore()
    reporter = ProgressReporter(store, LINEAGE, 1, {}, Commits(), Clock())
    reporter.report_hindrance("Größe von\n/ckpt/épo.ckpt ändert sich noch\x1b[31m" + "…" * 300)
    reporter.close()
    assert (report := read_training_progress(store, LINEAGE)) is not None
    assert report.global_step is None
    assert report.hindrance.startswith("Größe von /ckpt/épo.ckpt ändert sich noch [31m…")
    assert len(report.hindrance) == 240
    ProgressReporter(None, LINEAGE, 1, {}, Commits(), Clock()).report_hindrance("of another rank")


def test_session_names_the_next_save_and_then_a_failed_one():
    store, clock = MemoryStore(), Clock()
    with open_session(store, every=SaveInterval(600, "seconds"), clock=clock, keep_last=1) as session:
        session.step(1, state_at(1))
        clock.advance(2)
        session.step(2, state_at(2))
        assert newest_hindrance(session, store).startswith("the next save is due in ")
    failing = MemoryStore()
    with open_session(failing, every=SaveInterval(100, "steps"), clock=clock) as session:
        clock.advance(2)
        session.step(150, lambda: state_at(150))
        assert newest_hindrance(session, failing) == "the next save is due at step 200"
        clock.advance(20)
        failing.refuses = lambda operation, key: operation == "create" and "/shards/" in key
        session.step(200, state_at(200))
        failing.refuses = lambda operation, key: False
        clock.advance(20)
        session.step(201, state_at(201))
        assert newest_hindrance(session, failing).startswith("step 200 could not be saved: ")
        session.save(202, state_at(202))
        clock.advance(20)
        session.step(203, state_at(203))
        assert newest_hindrance(session, failing) == ""


def newest_hindrance(session: Session, store: Store) -> str:
    session._progress.close()  # type: ignore[attr-defined]
    report = read_training_progress(store, LINEAGE, 1)
    assert report is not None
    return report.hindrance
