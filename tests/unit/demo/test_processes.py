"""The demo's faults are real faults, and it fails when its engine does, and says where to look."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.builders.lineage import START_TIMES

from hera_pipelines.demo import processes
from hera_pipelines.demo.processes import PromiseBrokenError, TiphysProcess, damage_checkpoint, wait_until_dead
from tiphys.records import CheckpointManifest, CheckpointRef, Shard
from tiphys.store import DirectoryStore, LineageLayout


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_engine_that_ends_with_an_error_breaks_the_promise_with_its_last_line(tmp_path: Path) -> None:
    with (
        TiphysProcess(["plan", "r", "--store", str(tmp_path / "missing")], tmp_path / "log") as engine,
        pytest.raises(PromiseBrokenError, match=r"exit code 3 before its success; its last line: tiphys: .*missing"),
    ):
        engine.wait_for_success()


def test_an_engine_that_ends_too_early_breaks_the_promise(tmp_path: Path) -> None:
    with (
        TiphysProcess(["--version"], tmp_path / "log") as engine,
        pytest.raises(PromiseBrokenError, match="exit code 0 before training began; its last line: tiphys"),
    ):
        engine.wait_for(lambda: False, "training began")


def test_time_that_is_up_breaks_the_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        TiphysProcess(["--version"], tmp_path / "log") as engine,
        pytest.raises(PromiseBrokenError, match=r"timed out after 0 s while waiting for training began; see .*log"),
    ):
        monkeypatch.setattr(engine, "poll", lambda: None)  # it may have ended already
        engine.wait_for(lambda: False, "training began", 0)


def test_a_condition_that_holds_is_not_waited_for(tmp_path: Path) -> None:
    with TiphysProcess(["--version"], tmp_path / "log") as engine:
        engine.wait_for(lambda: True, "anything", 0)


def test_the_end_of_the_block_kills_the_engine(tmp_path: Path) -> None:
    with TiphysProcess(["--version"], tmp_path / "log") as engine:
        assert is_alive(engine.pid)
    assert not is_alive(engine.pid)


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


def test_a_killed_process_is_dead_before_it_is_reaped(sleeper: "subprocess.Popen[bytes]") -> None:
    sleeper.kill()
    wait_until_dead(sleeper.pid)
    sleeper.wait()
    wait_until_dead(sleeper.pid)


def test_a_living_process_is_not_called_dead(
    sleeper: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_KILL_SECONDS", 0.0)
    with pytest.raises(PromiseBrokenError, match="still runs after its kill"):
        wait_until_dead(sleeper.pid)


def test_damage_changes_bytes_of_the_largest_shard_and_no_size(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    for key, size in (("data/small", 100), ("data/large", 1000)):
        store.create(key, bytes(size))
    ref = CheckpointRef(lineage="r/train", attempt=1, global_step=5)
    manifest = CheckpointManifest(
        lineage=ref.lineage,
        run="r",
        step="train",
        attempt=1,
        global_step=5,
        shards=tuple(
            Shard(key=f"data/{key}", size=size, sha256="0" * 64) for key, size in (("small", 100), ("large", 1000))
        ),
        began=START_TIMES,
    )
    store.create(LineageLayout(ref.lineage).manifest(1, 5), manifest.with_seal().to_bytes())
    damage_checkpoint(tmp_path, ref)
    damaged = (tmp_path / "data/large").read_bytes()
    assert (len(damaged), damaged.count(0xFF)) == (1000, 64)
    assert (tmp_path / "data/small").read_bytes() == bytes(100)
