"""The demo believes what lies in storage, and says so when it is not there."""

from pathlib import Path

import pytest
from support.lineage import START_TIMES

from hera_pipelines.demo.facts import DemoRunState
from hera_pipelines.demo.fault_injection import PromiseBrokenError
from tiphys.records import CheckpointManifest, Event
from tiphys.store import DirectoryStore, LineageLayout, append_events


@pytest.fixture
def facts(tmp_path: Path) -> DemoRunState:
    return DemoRunState(DirectoryStore(tmp_path / "store"), "digits", tmp_path / "steps")


def commit(facts: DemoRunState, attempt: int, step: int) -> None:
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
    facts.store.create(layout.manifest(attempt, step), manifest.with_seal().to_bytes())


def test_the_newest_commit_is_that_of_the_attempt_asked_for(facts: DemoRunState) -> None:
    for attempt, step in ((1, 100), (1, 200), (2, 150)):
        commit(facts, attempt, step)
    found = facts.newest_commit(1)
    assert found and (found.attempt, found.global_step) == (1, 200)
    assert facts.manifest(found).global_step == 200


def test_an_attempt_without_commits_has_no_newest(facts: DemoRunState) -> None:
    commit(facts, 1, 100)
    assert facts.newest_commit(2) is None


def test_a_step_without_a_result_breaks_the_promise(facts: DemoRunState) -> None:
    with pytest.raises(PromiseBrokenError, match="step train has no result"):
        facts.model_digest()


def test_only_the_event_that_a_checkpoint_was_skipped_counts(facts: DemoRunState) -> None:
    append_events(facts.store, "digits", "trainer", [Event(name="checkpoint.restored", message="from 100")])
    assert facts.checkpoint_skipped_event() is None
    append_events(facts.store, "digits", "trainer", [Event(name="checkpoint.skipped", message="200 is corrupt")])
    event = facts.checkpoint_skipped_event()
    assert event and event.message == "200 is corrupt"
