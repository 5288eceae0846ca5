"""``tiphys checkpoint advice``, as a person meets it."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.lineage import RUN, claim_of, commit, end_of, ref, write_claim, write_end, write_run

from tiphys.store import DirectoryStore

from .conftest import Command

BEGAN = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    made = DirectoryStore(tmp_path / "store")
    write_run(made)
    return made


def saves(store: DirectoryStore, seconds: float) -> None:
    write_claim(store, claim_of(1).model_copy(update={"written_at": BEGAN}))
    for step in range(1, 6):
        at = BEGAN + timedelta(seconds=seconds * step)
        commit(store, ref(1, step), stage_seconds=1.0, upload_seconds=2.0, written_at=at)
    write_end(store, end_of(1).model_copy(update={"written_at": BEGAN + timedelta(hours=4)}))


@pytest.mark.parametrize(
    ("seconds", "verdict"), [(10, "rarer saves"), (3000, "more frequent saves"), (223, "within 20% of the best one")]
)
def test_it_compares_what_was_used_with_what_loses_least(
    tiphys: Command, store: DirectoryStore, seconds: float, verdict: str
) -> None:
    saves(store, seconds)
    answer = tiphys("checkpoint", "advice", RUN, "--store", "store")
    assert answer.code == 0
    assert verdict in answer.err
    rows = dict(line.split(maxsplit=1) for line in answer.out.splitlines())
    assert rows["failures"].split() == ["preemption", "1"]


def test_a_program_gets_the_numbers(tiphys: Command, store: DirectoryStore) -> None:
    saves(store, 600)
    document = json.loads(tiphys("checkpoint", "advice", f"{RUN}/fit", "--store", "store", "-o", "json").out)
    assert (document["kind"], document["step"], document["saves"]) == ("CheckpointAdvice", "fit", 5)
    assert document["used_seconds"] == 600
    assert 60 <= document["advised_seconds"] <= 3600


def test_without_a_checkpoint_there_is_nothing_to_judge(tiphys: Command, store: DirectoryStore) -> None:
    write_claim(store, claim_of(1))
    answer = tiphys("checkpoint", "advice", RUN, "--store", "store")
    assert answer.code == 3
    assert "has no checkpoint yet" in answer.error
