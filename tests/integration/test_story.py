"""The story on the local engine; `tests/argo` tells the same one on a cluster.

| what the first attempt meets | cause | what follows |
|---|---|---|
| nothing | | done |
| SIGKILL | infrastructure | resumed from the newest checkpoint |
| its own error | user error | given up |
"""

from pathlib import Path

import pytest
from support.story.pipelines import Place, story
from support.story.scenarios import FATES, Fate
from tiphys_controller import start

from hera_pipelines.local.session import LocalSession
from tiphys.store import DirectoryStore


@pytest.mark.parametrize("fate", [fate for fate in FATES if fate.without_cluster], ids=lambda fate: fate.name)
def test_what_a_training_meets_is_named_and_survived(fate: Fate, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    manifest = story(Place("any", store.url), pause=0.01, **fate.arguments).compile()
    with LocalSession(store, tmp_path / "state", speed=20) as session:
        run = start(store, session, manifest, "story-1")
        phase = session.run(run.workflow_name)
    assert str(phase) == fate.phase
    fate.check(store, "story-1")
