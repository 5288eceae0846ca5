"""`tiphys checkpoint list` and `show`, over a run with two checkpoints."""

import json
from pathlib import Path

import pytest
from support.builders.lineage import write_run
from support.stories.sessions import open_session, state_at

from tiphys.store import DirectoryStore

from .conftest import Command, snapshot

IDS = ["1-10", "1-20"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a run that has saved steps 10 and 20. Nobody may change it."""
    folder = tmp_path_factory.mktemp("saved") / "store"
    place = DirectoryStore(folder)
    write_run(place)
    with open_session(place) as session:
        for step in (10, 20):
            session.save(step, state_at(step), metrics={"loss": 1 / step})
    return folder


def test_the_list_shows_each_checkpoint_and_its_status(tiphys: Command, store: Path) -> None:
    header, *rows = tiphys("checkpoint", "list", "digits-1", "--store", store).out.splitlines()
    assert header.split()[:4] == ["STEP", "CHECKPOINT", "STATUS", "SIZE"]
    assert [row.split()[1] for row in rows] == IDS
    assert tiphys("checkpoint", "list", "digits-1/fit", "--store", store).out.count("fit") == len(IDS)


def test_latest_is_the_newest(tiphys: Command, store: Path) -> None:
    for which in ("latest", IDS[-1]):
        document = json.loads(tiphys("checkpoint", "show", "digits-1", which, "-o", "json", "--store", store).out)
        assert (document["kind"], document["id"], document["quarantined"]) == ("Checkpoint", IDS[-1], False)
        assert document["facts"]["versions"]["python"]


def test_show_names_what_it_was_made_with(tiphys: Command, store: Path) -> None:
    out = tiphys("checkpoint", "show", "digits-1/fit", "latest", "--store", store).out
    names = [line.split()[0] for line in out.splitlines()]
    assert {"lineage", "global_step", "world_size", "versions.python", "size", "parent"} <= set(names)


def test_looking_writes_nothing(tiphys: Command, store: Path) -> None:
    before = snapshot(store)
    tiphys("checkpoint", "list", "digits-1", "--store", store)
    tiphys("checkpoint", "show", "digits-1", "latest", "--store", store)
    assert snapshot(store) == before


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["show", "digits-1", "7-7"], 3, "has no checkpoint 7-7"),
        (["show", "digits-1", "newest"], 2, "names no checkpoint"),
        (["list", "digits-1/report"], 3, "has no step 'report'; it has: fit"),
        (["list", "other"], 3, "no run 'other'"),
    ],
)
def test_mistakes(tiphys: Command, store: Path, arguments: list[str | Path], code: int, words: str) -> None:
    answer = tiphys("checkpoint", *arguments, "--store", store)
    assert answer.code == code
    assert words in answer.error
