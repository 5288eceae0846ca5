"""`tiphys verify`: what a person and a script see, and the exit code."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from .conftest import Command, Finished, snapshot


@pytest.fixture
def store(finished: Finished, tmp_path: Path) -> Path:
    """A copy of a finished run's store, to be damaged."""
    return Path(shutil.copytree(finished.store, tmp_path / "store"))


def newest_shard(store: Path) -> Path:
    """The last shard of the newest checkpoint."""
    shards = max((store / "data" / "lineages" / "tiny-done" / "fit" / "shards").iterdir())
    return max(path for path in shards.iterdir())


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("deep", [[], ["--deep"], ["--deep", "--jobs", "2"]])
def test_a_sound_run_is_sound_and_nothing_is_written(tiphys: Command, finished: Finished, deep: list[str]) -> None:
    before = snapshot(finished.store)
    answer = tiphys("verify", "tiny-done", *deep, "--store", finished.store)
    assert (answer.code, answer.out) == (0, "")
    assert "0 damaged" in answer.err
    assert snapshot(finished.store) == before


def test_damage_is_shown_with_place_bytes_and_remedy_and_the_exit_code_is_5(tiphys: Command, store: Path) -> None:
    shard = newest_shard(store)
    flip(shard)
    assert tiphys("verify", "tiny-done", "--store", store).code == 0
    answer = tiphys("verify", "tiny-done/fit", "--deep", "--store", store)
    assert answer.code == 5
    assert str(shard.relative_to(store)) in answer.out
    assert f"within 0-{shard.stat().st_size - 1}" in answer.out
    assert "--quarantine" in answer.out
    assert answer.error == "tiphys: tiny-done/fit: 1 object does not match the records; the findings say what to do"


def test_a_quarantined_checkpoint_fails_no_later_verification(tiphys: Command, store: Path) -> None:
    flip(newest_shard(store))
    first = tiphys("verify", "tiny-done", "--deep", "--quarantine", "--store", store)
    assert first.code == 5
    assert "put in quarantine: checkpoint" in first.err
    again = tiphys("verify", "tiny-done", "--deep", "--store", store)
    assert again.code == 0
    assert "QUARANTINED" in again.out
    assert "quarantined" in tiphys("lineage", "tiny-done", "--store", store).out


@pytest.mark.parametrize(("form", "load"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_programs_get_one_document(tiphys: Command, store: Path, form: str, load) -> None:
    shard = newest_shard(store)
    flip(shard)
    answer = tiphys("verify", "tiny-done", "--deep", "-o", form, "--store", store)
    document = load(answer.out)
    assert answer.code == 5
    assert (document["kind"], document["run"], document["deep"], document["sound"]) == (
        "Audit",
        "tiny-done",
        True,
        False,
    )
    [damage] = document["damage"]
    assert damage["layer"] == "shard"
    assert damage["key"] == str(shard.relative_to(store))
    assert set(damage) == {
        *("layer", "step", "attempt", "checkpoint", "key", "fault", "damaged_bytes", "remedy", "barred"),
    }


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["tiny-don"], 3, "did you mean tiny-done"),
        (["tiny-done/nothing"], 3, "no step 'nothing'"),
        (["tiny-done", "--jobs", "0"], 2, "--jobs"),
    ],
)
def test_mistakes(tiphys: Command, finished: Finished, arguments: list[str], code: int, words: str) -> None:
    answer = tiphys("verify", *arguments, "--store", finished.store)
    assert answer.code == code
    assert words in answer.error
