"""The story on the local engine; `tests/argo` tells the same one on a cluster.

| what the first attempt meets | cause | what follows |
|---|---|---|
| nothing | | done |
| SIGKILL | infrastructure | resumed from the newest checkpoint |
| its own error | user error | given up |
| SIGKILL, in a training on two nodes | infrastructure | resumed, by both |
"""

from pathlib import Path

import pytest
from support.stories.interrupted_training.pipelines import Place, expected_version, story
from support.stories.interrupted_training.scenarios import FATES, MET_AT, STEPS, Fate, check_starts, ended, version
from tiphys_controller import start_run

from hera_pipelines.local.run_session import LocalSession
from tiphys.records import AttemptEndOutcome, Cause
from tiphys.store import DirectoryStore, read_step_attempts


@pytest.mark.parametrize(
    "fate",
    [
        # A run that is killed once does all that an undisturbed one does.
        pytest.param(fate, id=fate.name, marks=[pytest.mark.heavy] * (fate.name in ("undisturbed", "killed")))
        for fate in FATES
        if fate.without_cluster
    ],
)
def test_a_failure_of_the_training_gets_its_cause_and_the_run_survives_it(fate: Fate, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    manifest = story(Place("any", store.url), pause=0.01, **fate.arguments).compile()
    with LocalSession(store, tmp_path / "state", speed=20) as session:
        run = start_run(store, session, manifest, "story-1")
        phase = session.run(run.workflow_name)
    assert str(phase) == fate.phase
    fate.check(store, "story-1")


@pytest.mark.heavy
def test_a_training_on_two_nodes_goes_on_where_it_had_saved(tmp_path: Path) -> None:
    """Both ranks are killed once they have done so many steps; who is first ends the other."""
    store = DirectoryStore(tmp_path / "store")
    fate = f"kill@{MET_AT}"
    manifest = story(Place("any", store.url), steps=STEPS, pause=0.01, fate=fate, training={"nodes": 2}).compile()
    with LocalSession(store, tmp_path / "state", speed=20) as session:
        run = start_run(store, session, manifest, "story-1")
        assert str(session.run(run.workflow_name)) == "Succeeded"
    first, last = (ended(attempt) for attempt in read_step_attempts(store, "story-1", "train"))
    assert (first.cause, first.exit_code, last.outcome) == (Cause.INFRASTRUCTURE, 137, AttemptEndOutcome.DONE)
    assert first.message.startswith("rank ")
    assert version(store, "story-1") == expected_version(STEPS)
    check_starts(store, "story-1")
