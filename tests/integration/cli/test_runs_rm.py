"""``tiphys runs rm``, as a person meets it; and the command killed while it deletes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.builders.lineage import LINEAGE, RUN, claim_of, commit, ref, write_claim, write_run

from tiphys.lineage.retention.policy import pin_checkpoint
from tiphys.store import DirectoryStore

from .conftest import Command, snapshot


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    """A run with two checkpoints."""
    made = DirectoryStore(tmp_path / "store")
    write_run(made)
    write_claim(made, claim_of(1))
    for step in (1, 2):
        commit(made, ref(1, step))
    return made


def left(store: DirectoryStore) -> list[str]:
    return [info.key for info in store.list("") if f"/{RUN}/" in info.key]


def test_without_yes_nothing_is_deleted(tiphys: Command, store: DirectoryStore) -> None:
    before, objects = snapshot(Path("store")), len(left(store))
    answer = tiphys("runs", "rm", RUN, "--store", "store")
    assert (answer.code, answer.out.splitlines()[1].split()[:5]) == (0, [RUN, "would", "be", "deleted", str(objects)])
    assert answer.err.endswith("nothing was deleted; add --yes to delete\n")
    assert snapshot(Path("store")) == before


def test_with_yes_the_run_is_gone(tiphys: Command, store: DirectoryStore) -> None:
    answer = tiphys("runs", "rm", RUN, "--store", "store", "--yes", "-o", "json")
    document = json.loads(answer.out)
    assert (answer.code, document["dry_run"], document["runs"][0]["kept_because"]) == (0, False, [])
    assert left(store) == []
    again = tiphys("runs", "rm", RUN, "--store", "store", "--yes")
    assert again.code != 0
    assert f"has no run '{RUN}'" in again.err


def test_a_run_that_must_stay_is_kept_with_the_reason(tiphys: Command, store: DirectoryStore) -> None:
    pin_checkpoint(store, ref(1, 2), "release")
    before = snapshot(Path("store"))
    shown = tiphys("runs", "rm", RUN, "--store", "store", "-o", "yaml")
    assert (shown.code, "is pinned as release" in shown.out) == (0, True)
    refused = tiphys("runs", "rm", RUN, "--store", "store", "--yes")
    assert refused.code != 0
    assert f"run {RUN} was kept: checkpoint 1-2 of {LINEAGE} is pinned as release" in refused.err
    assert snapshot(Path("store")) == before


@pytest.mark.parametrize("point", ["delete_run.after_claim", "delete_run.after_record", "delete_run.after_submission"])
def test_a_killed_deletion_is_completed_by_the_next(tiphys: Command, store: DirectoryStore, point: str) -> None:
    command = [sys.executable, "-m", "hera_pipelines.cli", "runs", "rm", RUN, "--store", "store", "--yes"]
    killed = subprocess.run(
        command, env={**os.environ, "TIPHYS_FAILPOINTS": f"{point}=crash"}, capture_output=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    refused = tiphys("resume", RUN, "--store", "store")
    assert refused.code != 0
    if point != "delete_run.after_submission":  # the claim of the deletion was the last object of the run
        assert "was partly deleted; `tiphys runs rm" in refused.err
        assert tiphys("runs", "rm", RUN, "--store", "store", "--yes").code == 0
    assert left(store) == []
