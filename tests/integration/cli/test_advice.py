"""``tiphys checkpoint advice``, as a person meets it."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.builders.lineage import RUN, claim_of, commit, end_of, ref, write_claim, write_end, write_run

from tiphys.store import DirectoryStore

from .conftest import Command

BEGAN = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    made = DirectoryStore(tmp_path / "store")
    write_run(made)
    return made


def saves(store: DirectoryStore, seconds: float, stall: float = 1.0, ended: timedelta = timedelta(hours=4)) -> None:
    write_claim(store, claim_of(1).model_copy(update={"written_at": BEGAN}))
    for step in range(1, 6):
        at = BEGAN + timedelta(seconds=seconds * step)
        commit(store, ref(1, step), stage_seconds=stall, upload_seconds=2 * stall, written_at=at)
    write_end(store, end_of(1).model_copy(update={"written_at": BEGAN + ended}))


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [
        (10, "rarer saves would lose less time: 1.1% of the training instead of 12.0%"),
        (3000, "more frequent saves would lose less time: 1.1% of the training instead of 7.6%"),
        (223, "the interval is good"),
        (300, "the interval is good"),
    ],
)
def test_advice_compares_the_used_interval_with_the_best_one(
    tiphys: Command, store: DirectoryStore, seconds: float, verdict: str
) -> None:
    saves(store, seconds)
    answer = tiphys("checkpoint", "advice", RUN, "--store", "store")
    assert answer.code == 0
    assert verdict in answer.err
    rows = dict(line.split(maxsplit=1) for line in answer.out.splitlines())
    assert rows["failures"].split() == ["preemption", "1"]


def test_short_intervals_are_judged_by_what_they_lose(tiphys: Command, store: DirectoryStore) -> None:
    saves(store, 5, stall=0.001, ended=timedelta(seconds=30))
    answer = tiphys("checkpoint", "advice", RUN, "--store", "store")
    rows = dict(line.split("  ", maxsplit=1) for line in answer.out.splitlines())
    used, advised = (float(rows[f"lost as {name}"].strip().rstrip("%")) for name in ("used", "advised"))
    assert advised <= used
    assert "rarer" not in answer.err


def test_bounds_of_the_step_that_hold_back_the_advice_are_named(tiphys: Command, tmp_path: Path) -> None:
    bounded = DirectoryStore(tmp_path / "store")
    write_run(bounded, every_bounds=(1000, 2000))
    saves(bounded, 10)
    answer = tiphys("checkpoint", "advice", RUN, "--store", "store")
    assert "16m 40s (3m 43s without the bounds of the step)" in answer.out


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
