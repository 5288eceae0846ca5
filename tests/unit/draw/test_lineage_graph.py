"""What storage knows becomes what is drawn."""

from datetime import UTC, datetime

import pytest

from hera_pipelines.draw.lineage_graph import AttemptEnding, CheckpointPosition, build_lineage_graphs
from tiphys.lineage.tree import AttemptNode, CheckpointNode, CheckpointStatus, LineageTree, StepLineage
from tiphys.records import AttemptEndOutcome, Cause, CheckpointRef

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def ref(attempt: int, step: int) -> CheckpointRef:
    return CheckpointRef(lineage="digits/train", attempt=attempt, global_step=step)


def tree(*attempts: AttemptNode, note: str = "") -> LineageTree:
    step = StepLineage(step="train", lineage="digits/train", attempts=attempts, note=note)
    return LineageTree(run="digits", steps=(step,))


def attempt(number: int, **fields: object) -> AttemptNode:
    return AttemptNode.model_validate({"attempt": number, "submission": 1, "started_at": NOON, **fields})


def checkpoint(number: int, step: int, **fields: object) -> CheckpointNode:
    return CheckpointNode.model_validate(
        {"ref": ref(number, step), "status": CheckpointStatus.COMMITTED, "committed_at": NOON, **fields}
    )


def test_the_origin_is_what_the_trainer_really_restored_not_what_admission_proposed() -> None:
    saved = checkpoint(2, 40, parent=ref(1, 20), restored=ref(1, 20))
    [drawn] = build_lineage_graphs(tree(attempt(2, starts_from=ref(1, 30), checkpoints=(saved,))))
    assert drawn.lanes[0].origin == CheckpointPosition(1, 20)


def test_an_attempt_that_a_person_stopped_is_not_fenced() -> None:
    stopped = attempt(1, outcome=AttemptEndOutcome.FENCED, stopped=True, message="stopped by a person")
    [lane] = build_lineage_graphs(tree(stopped))[0].lanes
    assert (lane.ending_text, lane.message) == ("stopped", "")


def test_the_origin_is_known_after_retention_removed_the_first_checkpoints() -> None:
    kept = checkpoint(2, 90, parent=ref(2, 80), restored=ref(1, 20))
    gone = checkpoint(2, 80, status=CheckpointStatus.REMOVED, committed_at=None)
    [drawn] = build_lineage_graphs(tree(attempt(2, starts_from=ref(1, 30), checkpoints=(gone, kept))))
    assert drawn.lanes[0].origin == CheckpointPosition(1, 20)


def test_an_attempt_that_could_use_no_checkpoint_began_from_scratch() -> None:
    [drawn] = build_lineage_graphs(tree(attempt(2, starts_from=ref(1, 30), checkpoints=(checkpoint(2, 10),))))
    assert drawn.lanes[0].origin is None


def test_before_the_first_commit_the_origin_is_what_admission_proposed() -> None:
    [drawn] = build_lineage_graphs(tree(attempt(2, starts_from=ref(1, 30))))
    assert drawn.lanes[0].origin == CheckpointPosition(1, 30)


def test_an_attempt_from_scratch_has_no_origin() -> None:
    [drawn] = build_lineage_graphs(
        tree(attempt(1, checkpoints=(checkpoint(1, 10), checkpoint(1, 20, parent=ref(1, 10)))))
    )
    assert drawn.lanes[0].origin is None


def test_an_attempt_without_an_end_is_open() -> None:
    [drawn] = build_lineage_graphs(tree(attempt(1)))
    assert (drawn.lanes[0].ending, drawn.lanes[0].message) == (AttemptEnding.OPEN, "")


def test_a_failed_attempt_says_why() -> None:
    ended = attempt(1, outcome=AttemptEndOutcome.FAILED, cause=Cause.OUT_OF_MEMORY, message="exit code 137")
    [drawn] = build_lineage_graphs(tree(ended))
    assert (drawn.lanes[0].ending, drawn.lanes[0].message) == (AttemptEnding.FAILED, "out of memory: exit code 137")


@pytest.mark.parametrize(
    ("size_bytes", "words"),
    [(0, ()), (512, ("512 B",)), (1536, ("1.5 KiB",)), (5 << 40, ("5 TiB",)), (5 << 50, ("5120 TiB",))],
)
def test_sizes_are_in_binary_units(size_bytes: int, words: tuple[str, ...]) -> None:
    [drawn] = build_lineage_graphs(tree(attempt(1, checkpoints=(checkpoint(1, 10, size_bytes=size_bytes),))))
    assert drawn.lanes[0].dots[0].facts == words


def test_a_checkpoint_tells_its_metrics_and_why_it_must_not_be_used() -> None:
    barred = checkpoint(
        1,
        10,
        status=CheckpointStatus.QUARANTINED,
        metrics={"loss": 0.123456},
        reason="sha256 differs",
        saved_because="sigterm",
    )
    [drawn] = build_lineage_graphs(tree(attempt(1, checkpoints=(barred,))))
    assert drawn.lanes[0].dots[0].facts == ("loss 0.1235", "saved after sigterm", "sha256 differs")
    assert drawn.lanes[0].dots[0].status is CheckpointStatus.QUARANTINED


def test_a_note_about_an_unreadable_lineage_is_drawn() -> None:
    [drawn] = build_lineage_graphs(tree(note="the volume is not mounted here"))
    assert drawn.note == "the volume is not mounted here"
