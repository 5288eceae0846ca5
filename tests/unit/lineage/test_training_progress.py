"""Training progress is the word of a program: read within bounds, told in one line.

| report                                  | told |
|-----------------------------------------|------|
| of the newest attempt                   | step, total, loss, pace, time left, age of the checkpoint |
| without total or pace                   | without time left |
| older than two minutes                  | its age instead of pace and time left |
| without a commit                        | why it commits nothing |
| too large, damaged, of another attempt  | nothing |
"""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from support.builders.lineage import LINEAGE
from support.fakes.memory_store import MemoryStore

from tiphys.errors import ObjectMissingError
from tiphys.lineage.training_progress import (
    NOTHING_REPORTED,
    describe_training_progress,
    explain_missing_checkpoints,
    read_training_progress,
)
from tiphys.protocol.step_spec import CheckpointPolicy, StepKind, StepSpec
from tiphys.records import AttemptEnd, AttemptEndOutcome, TrainingProgress
from tiphys.store import LineageLayout

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
LAYOUT = LineageLayout(LINEAGE)


def report(step: int | None = 1200, **fields: Any) -> TrainingProgress:
    return TrainingProgress(global_step=step, written_at=NOON, **fields)


def store_with(*reports: tuple[int, int, bytes]) -> MemoryStore:
    return MemoryStore({LAYOUT.training_progress_report(attempt, at): data for attempt, at, data in reports})


def test_the_newest_report_of_the_newest_attempt_counts():
    old, new, last = report(9), report(3), report(4)
    store = store_with((1, 900, old.to_bytes()), (2, 100, new.to_bytes()), (2, 200, last.to_bytes()))
    assert read_training_progress(store, LINEAGE) == last
    assert read_training_progress(store, LINEAGE, 2) == last
    assert read_training_progress(store, LINEAGE, 3) is None
    assert read_training_progress(MemoryStore(), LINEAGE) is None


def test_a_report_that_was_replaced_while_it_was_read_is_not_missed():
    class Replacing(MemoryStore):
        def read(self, key: str) -> bytes:
            if key == LAYOUT.training_progress_report(1, 200):
                raise ObjectMissingError("replaced")
            return super().read(key)

    store = Replacing(store_with((1, 100, report(3).to_bytes()), (1, 200, b"")).objects)
    assert read_training_progress(store, LINEAGE) == report(3).model_copy(
        update={"nonce": read_training_progress(store, LINEAGE).nonce}  # type: ignore[union-attr]
    )


@pytest.mark.parametrize(
    "data",
    [
        b"not json",
        b'{"global_step": -1}',
        b'{"global_step": 1, "steps_per_second": NaN}',
        b'{"global_step": 1' + b"0" * 30 + b"}",
        b'{"global_step": 1, "nonce": "' + b"x" * 5000 + b'"}',
        b'{"global_step": 1, "version": 99}',
        b'{"global_step": 1, "written_at": "0001-01-01T00:00:00+23:59"}',
    ],
)
def test_a_damaged_or_large_report_says_nothing(data: bytes):
    assert read_training_progress(store_with((1, 100, data)), LINEAGE) is None


def test_names_of_metrics_cannot_forge_lines_or_markup():
    names = {"loss": 1.0, "x" * 41: 1.0, "a\nb": 1.0, "[a](http://b)": 1.0, "\x1b[31m": 1.0, "": 1.0}
    assert list(report(metrics=names).metrics) == ["loss"]


def test_a_full_report_is_described_in_one_line():
    progress = report(
        total_steps=5000,
        steps_per_second=3.4,
        metrics={"lr": 1e-3, "loss": 0.41234},
        checkpoint_step=1000,
        checkpoint_at=NOON - timedelta(seconds=60),
    )
    assert describe_training_progress(progress, NOON + timedelta(seconds=4)) == (
        "step 1,200 of 5,000, loss 0.4123, 3.4 steps/s, 18m 34s left, saved 1m 4s ago"
    )


@pytest.mark.parametrize(
    ("progress", "after", "line"),
    [
        (report(), 0, "step 1,200"),
        (report(total_steps=5000), 0, "step 1,200 of 5,000"),
        (report(steps_per_second=0.0, total_steps=5000), 0, "step 1,200 of 5,000, 0 steps/s"),
        (report(steps_per_second=5e-324, total_steps=5000), 0, "step 1,200 of 5,000, 4.94e-324 steps/s"),
        (report(steps_per_second=2.0), 0, "step 1,200, 2 steps/s"),
        (report(steps_per_second=2.0, total_steps=1000), 0, "step 1,200 of 1,000, 2 steps/s, 0s left"),
        (report(steps_per_second=2.0, total_steps=5000), 600, "step 1,200 of 5,000, reported 10m ago"),
        (report(metrics={"train_loss": float("nan"), "acc": 1.0}), 0, "step 1,200, train_loss nan"),
        (report(checkpoint_step=1, checkpoint_at=NOON), -9, "step 1,200, saved 0s ago"),
        (report(hindrance="the disk is full"), 0, "step 1,200, no commit yet, because the disk is full"),
        (
            report(checkpoint_at=NOON, hindrance="the disk is full"),
            90,
            "step 1,200, saved 1m 30s ago, no commit since, because the disk is full",
        ),
        (report(None, hindrance="/ckpt is never quiet"), 0, "no commit yet, because /ckpt is never quiet"),
        (report(None, total_steps=5000, steps_per_second=1.0), 0, "1 steps/s"),
    ],
)
def test_unknown_parts_of_a_report_are_left_out(progress: TrainingProgress, after: int, line: str):
    assert describe_training_progress(progress, NOON + timedelta(seconds=after)) == line


EVERY_MINUTES = CheckpointPolicy(every=300)
KEEPS_NONE = "it keeps no checkpoints (checkpoints=None)"


@pytest.mark.parametrize(
    ("kind", "checkpoints", "minutes", "outcome", "committed", "clause"),
    [
        ("train", EVERY_MINUTES, 4, None, False, ""),
        ("train", EVERY_MINUTES, 6, None, False, NOTHING_REPORTED),
        ("train", EVERY_MINUTES, 6, None, True, ""),
        ("train", CheckpointPolicy(every=1), 0.5, None, False, ""),
        ("train", CheckpointPolicy(every=5, every_unit="steps"), 9, None, False, ""),
        ("train", CheckpointPolicy(every=5, every_unit="steps"), 11, None, False, NOTHING_REPORTED),
        ("train", CheckpointPolicy(every=300, every_bounds=(60, 1800)), 29, None, False, ""),
        ("train", EVERY_MINUTES, 4, "done", False, ""),
        ("train", EVERY_MINUTES, 6, "done", False, "it committed no checkpoint"),
        ("train", EVERY_MINUTES, 6, "failed", False, "it committed no checkpoint"),
        ("train", EVERY_MINUTES, 6, "failed", True, ""),
        ("train", None, 0, None, False, KEEPS_NONE),
        ("train", None, 0, "failed", False, KEEPS_NONE),
        ("train", None, 90, "done", False, ""),
        ("step", None, 90, None, False, ""),
    ],
)
def test_training_that_nothing_protects_is_named(
    kind: str, checkpoints: CheckpointPolicy | None, minutes: float, outcome: str | None, committed: bool, clause: str
):
    spec = StepSpec(name="füllen", template="füllen", kind=StepKind(kind), checkpoints=checkpoints)
    later = NOON + timedelta(minutes=minutes)
    end = outcome and AttemptEnd(
        run="zahlen-1",
        step="füllen",
        attempt=1,
        submission=1,
        outcome=AttemptEndOutcome(outcome),
        progress=committed,
        written_at=later,
    )
    asked_at = later + timedelta(days=3) if end else later
    assert explain_missing_checkpoints(spec, NOON, asked_at, end or None, lambda: committed) == clause
