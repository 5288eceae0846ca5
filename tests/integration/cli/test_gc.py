"""``tiphys gc`` and ``tiphys checkpoint pin``, as a person meets them; and the command killed between its writes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.builders.lineage import LINEAGE, RUN, claim_of, commit, ref, write_claim, write_run

from tiphys.lineage.quarantine import quarantine_checkpoint
from tiphys.lineage.select import list_commits
from tiphys.lineage.validity import checkpoint_fault
from tiphys.store import DirectoryStore, LineageLayout

from .conftest import Command, snapshot

LAYOUT = LineageLayout(LINEAGE)


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    """A run with six checkpoints whose step keeps three."""
    made = DirectoryStore(tmp_path / "store")
    write_run(made)
    write_claim(made, claim_of(1))
    for step in range(1, 7):
        commit(made, ref(1, step), metrics={"loss": abs(2 - step)})
    return made


def steps(store: DirectoryStore) -> list[int]:
    return sorted(one.global_step for one in list_commits(store, LINEAGE))


def rows(out: str) -> dict[str, str]:
    """Checkpoint → state and reason."""
    return {words[1]: " ".join(words[4:]) for words in (line.split() for line in out.splitlines()[1:])}


def test_a_dry_run_says_what_would_happen_and_writes_nothing(tiphys: Command, store: DirectoryStore) -> None:
    before = snapshot(Path("store"))
    answer = tiphys("gc", RUN, "--store", "store", "--dry-run", "--delay", "0s", "--keep-best", "loss:min")
    assert answer.code == 0
    assert rows(answer.out) == {
        **dict.fromkeys(["1-6", "1-5", "1-4"], "kept newest 3"),
        "1-3": "would be deleted no rule keeps it",
        "1-2": "kept best loss",
        "1-1": "would be deleted no rule keeps it",
    }
    assert answer.err.endswith("2 of 6 checkpoints would be deleted, 22 B would be freed\n")
    assert snapshot(Path("store")) == before


def test_an_expired_checkpoint_is_marked_first_and_stays_ten_minutes(tiphys: Command, store: DirectoryStore) -> None:
    first = tiphys("gc", RUN, "--store", "store")
    assert rows(first.out)["1-1"].startswith("marked no rule keeps it; may be deleted from ")
    assert first.err.endswith("0 of 6 checkpoints deleted, 0 B freed\n")
    assert rows(tiphys("gc", RUN, "--store", "store").out)["1-1"] == rows(first.out)["1-1"]
    assert steps(store) == [1, 2, 3, 4, 5, 6]
    assert tiphys("gc", RUN, "--store", "store", "--delay", "0s").code == 0
    assert steps(store) == [4, 5, 6]


def test_every_reason_is_shown(tiphys: Command, store: DirectoryStore) -> None:
    write_claim(store, claim_of(2, ref(1, 5)))
    commit(store, ref(2, 7))
    quarantine_checkpoint(store, ref(1, 1), "poison", "ana")
    assert tiphys("checkpoint", "pin", RUN, "1-2", "--name", "release-1", "--store", "store").code == 0
    answer = tiphys("gc", RUN, "--store", "store", "--keep-last", 1, "--keep-every", "4 steps", "--delay", "0s")
    assert rows(answer.out) == {
        "2-7": "kept newest 1",
        "1-6": "deleted no rule keeps it",
        "1-5": "kept attempt 2 started from it",
        "1-4": "kept every 4 steps",
        "1-3": "deleted no rule keeps it",
        "1-2": "kept pinned release-1",
        "1-1": "kept quarantined",
    }


def test_a_pin_holds_until_it_is_taken_away(tiphys: Command, store: DirectoryStore) -> None:
    at = ("--store", "store")
    pinned = tiphys("checkpoint", "pin", f"{RUN}/fit", "1-1", "--name", "release-1", *at)
    assert (pinned.code, pinned.out) == (0, "")
    assert "checkpoint 1-1 of digits-1/fit is pinned as release-1" in pinned.err
    tiphys("gc", "--all", "--delay", "0s", *at)
    assert steps(store) == [1, 4, 5, 6]
    assert tiphys("checkpoint", "unpin", RUN, "1-1", "--name", "release-1", *at).code == 0
    tiphys("gc", "--all", "--delay", "0s", *at)
    assert steps(store) == [4, 5, 6]


def test_every_readable_run_is_cleaned_although_another_cannot_be_read(tiphys: Command, store: DirectoryStore) -> None:
    other = "digits-0"
    write_run(store, run=other)
    (Path("store") / "control" / "runs" / other / "run.json").write_bytes(b"garbage")
    answer = tiphys("gc", "--all", "--delay", "0s", "--store", "store")
    assert answer.code == 5
    assert f"{other}: " in answer.err
    assert "not a valid RunRecord" in answer.error
    assert steps(store) == [4, 5, 6]


def test_the_document_says_everything(tiphys: Command, store: DirectoryStore) -> None:
    answer = tiphys("gc", RUN, "--store", "store", "--delay", "0s", "-o", "json")
    document = json.loads(answer.out)
    assert (document["apiVersion"], document["kind"], document["dry_run"]) == (
        "tiphys.dev/v1beta1",
        "Retention",
        False,
    )
    [lineage] = document["lineages"]
    assert (lineage["lineage"], lineage["freed_bytes"], lineage["keep"]["last"]) == (LINEAGE, 33, 3)
    assert [one["action"] for one in lineage["checkpoints"]] == ["keep"] * 3 + ["delete"] * 3
    assert lineage["checkpoints"][0] == {
        "checkpoint": "1-6",
        "action": "keep",
        "reasons": ["newest 3"],
        "marked_at": None,
        "size_bytes": 11,
    }


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["gc"], 2, "name one run, or give --all"),
        (["gc", RUN, "--all"], 2, "name one run, or give --all"),
        (["gc", RUN, "--delay", "soon"], 2, "not a duration"),
        (["gc", RUN, "--keep-last", "0"], 2, "--keep-last"),
        (["gc", RUN, "--keep-every", "1h"], 2, "--keep-every '1h' is not valid: write a number of global steps"),
        (["gc", RUN, "--keep-best", "loss"], 2, "--keep-best 'loss' is not valid: write a metric"),
        (["gc", "other"], 3, "has no run 'other'"),
        (["checkpoint", "pin", RUN, "1-9", "--name", "a"], 3, "has no checkpoint 1-9"),
        (["checkpoint", "pin", RUN, "newest", "--name", "a"], 2, "write attempt and global step, such as 3-1200"),
        (["checkpoint", "pin", RUN, "1-1", "--name", "a/b"], 2, "pin 'a/b' is not valid"),
        (["checkpoint", "pin", f"{RUN}/other", "1-1", "--name", "a"], 3, "has no step 'other'; it has: "),
        (["checkpoint", "unpin", RUN, "1-1", "--name", "a"], 3, "has no pin 'a'; it has none"),
    ],
)
def test_an_invalid_option_of_gc_is_named_and_nothing_is_written(
    arguments: list[str], code: int, words: str, tiphys: Command, store: DirectoryStore
) -> None:
    before = snapshot(Path("store"))
    answer = tiphys(*arguments, "--store", "store")
    assert (answer.code, answer.out) == (code, "")
    assert words in answer.error
    assert snapshot(Path("store")) == before


@pytest.mark.parametrize("command", [["gc"], ["checkpoint", "pin"], ["checkpoint", "unpin"]])
def test_every_command_shows_examples(command: list[str], tiphys: Command) -> None:
    answer = tiphys(*command, "--help")
    assert answer.code == 0
    assert f"  tiphys {' '.join(command)}" in answer.out.partition("Examples:")[2]


POINTS = [
    ("retention.after_rescue", 1),
    ("retention.after_manifest_delete", 2),
    ("retention.after_sweep", 1),
]
"""`tests/property/test_retention_races.py` has a death at every call to storage."""


@pytest.mark.parametrize(("point", "passage"), POINTS, ids=lambda value: str(value))
def test_a_command_that_is_killed_harms_nothing_and_the_next_pass_finishes(
    point: str, passage: int, tiphys: Command, store: DirectoryStore, tmp_path: Path
) -> None:
    assert tiphys("gc", RUN, "--store", "store").code == 0  # marks 1, 2 and 3
    store.delete(LAYOUT.tombstone(1, 1))
    assert tiphys("checkpoint", "pin", RUN, "1-2", "--name", "release", "--store", "store").code == 0
    store.create(f"{LAYOUT.shards(1, 0)}left", b"by a save that died")

    killed = kill_at(f"{point}=crash@{passage}", tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (tmp_path / "log").read_text() == f"{point}=crash\n"
    assert {2, 4, 5, 6} <= set(steps(store))
    assert [fault for one in list_commits(store, LINEAGE) if (fault := checkpoint_fault(store, one))] == []

    assert tiphys("gc", RUN, "--store", "store", "--delay", "0s").code == 0
    assert steps(store) == [2, 4, 5, 6]
    assert {LAYOUT.parse_shard(info.key) for info in store.list(LAYOUT.all_shards)} == set(list_commits(store, LINEAGE))
    assert list(store.list(LAYOUT.all_tombstones)) == []


def kill_at(failpoints: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, which a failpoint kills."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TIPHYS_")}
    faults = {"TIPHYS_FAILPOINTS": failpoints, "TIPHYS_FAILPOINTS_LOG": str(folder / "log")}
    line = [sys.executable, "-m", "hera_pipelines.cli", "gc", RUN, "--store", str(folder / "store"), "--delay", "0s"]
    return subprocess.run(line, env={**kept, **faults}, capture_output=True, text=True, check=False, timeout=300)


def test_a_run_that_does_not_exist_is_all_that_is_said(tiphys: Command, store: DirectoryStore) -> None:
    answer = tiphys("gc", "digits-nope", "--store", "store")
    assert answer.code == 3
    assert "checkpoints deleted" not in answer.err
