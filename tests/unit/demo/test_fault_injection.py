"""The demo's faults are real faults."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.lineage import START_TIMES

from hera_pipelines.demo import fault_injection
from tiphys.errors import TiphysError
from tiphys.records import CheckpointManifest, Shard


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


def manifest(*shards: Shard) -> CheckpointManifest:
    return CheckpointManifest(
        lineage="r/train", run="r", step="train", attempt=1, global_step=5, shards=shards, began=START_TIMES
    )


def test_a_killed_process_is_gone(sleeper: subprocess.Popen[bytes]) -> None:
    assert fault_injection.is_process_alive(sleeper.pid)
    os.kill(sleeper.pid, signal.SIGSTOP)
    assert fault_injection.is_process_alive(sleeper.pid)
    os.kill(sleeper.pid, signal.SIGKILL)
    assert fault_injection.wait_until_dead(sleeper.pid, 10)
    assert sleeper.wait() == -9


def test_a_living_process_is_not_called_gone() -> None:
    assert not fault_injection.wait_until_dead(os.getpid(), 0)


def test_flipping_changes_bytes_of_the_largest_shard_and_no_size(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(bytes(100))
    (tmp_path / "large").write_bytes(bytes(1000))
    touched = fault_injection.flip_bytes(
        tmp_path,
        manifest(Shard(key="small", size=100, sha256="0" * 64), Shard(key="large", size=1000, sha256="0" * 64)),
    )
    assert touched == tmp_path / "large"
    assert touched.stat().st_size == 1000
    assert touched.read_bytes().count(0xFF) == 64
    assert (tmp_path / "small").read_bytes() == bytes(100)


def test_a_checkpoint_too_small_to_corrupt_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tiny").write_bytes(b"x")
    with pytest.raises(TiphysError, match="only 1 bytes"):
        fault_injection.flip_bytes(tmp_path, manifest(Shard(key="tiny", size=1, sha256="0" * 64)))
