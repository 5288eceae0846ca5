"""A checkpoint that crashes whoever loads it, with real processes: bypassed after two deaths, and people are told."""

from pathlib import Path

import pytest
from support.stories.bad_checkpoint import POISON, Desk

from tiphys.lineage.quarantine import read_quarantine_records
from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.timeline import read_timeline
from tiphys.lineage.tree import CheckpointStatus, read_lineage_tree

pytestmark = pytest.mark.heavy


@pytest.mark.parametrize(("fate", "after"), [("error", 0), ("error", 3), ("signal", 0)])
def test_the_third_attempt_succeeds_from_the_checkpoint_before(tmp_path: Path, fate: str, after: int) -> None:
    desk = Desk(tmp_path, fate, after)
    assert desk.start(user_errors=1) == "Succeeded"
    assert desk.starts() == [0, 6, 6, 5]
    causes = [str(end.cause or end.outcome) for end in desk.ends() if end]
    assert causes == ["preemption", "user_error", "user_error", "done"]
    record = read_quarantine_records(desk.store, "night/fit")[POISON]
    assert (record.by, "2 attempts that loaded it crashed in the same way" in record.reason) == ("conclude", True)
    history = RunHistory.for_display(desk.store, "night")
    nodes = [node for attempt in read_lineage_tree(history).steps[0].attempts for node in attempt.checkpoints]
    assert [node.ref for node in nodes if node.status is CheckpointStatus.QUARANTINED] == [POISON]
    messages = [event.message for event in read_timeline(history)]
    [quarantined] = [message for message in messages if "checkpoint 6 of attempt 1 was quarantined" in message]
    if fate == "error":
        assert "loss is <number>" in quarantined
        assert any(f"ValueError: loss is nan at step {6 + after}" in message for message in messages)


def test_without_a_budget_the_second_death_comes_after_a_resume_and_is_followed_by_the_try(tmp_path: Path) -> None:
    desk = Desk(tmp_path, "error", 0)
    assert desk.start(user_errors=0) == "Failed"
    assert desk.starts() == [0, 6]
    assert desk.resume() == "Succeeded"
    assert desk.starts() == [0, 6, 6, 5]
