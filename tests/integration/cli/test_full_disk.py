"""A file system that is really full: what a person reads, and that one Ctrl-C is enough."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.builders.lineage import ref
from support.processes.polling import until
from support.stories import small_pipeline
from support.stories.sessions import open_session

from tiphys.store import DirectoryStore

from .conftest import begin

GRACE_SECONDS = 3
"""The engine waits for storage as long as its programs may save after a signal, and at least for one answer."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system needs root with CAP_SYS_ADMIN; the engine's own tests fill none")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> None:
    with pytest.raises(OSError, match="No space left"), (disk / "filling").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@pytest.mark.heavy
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_single_signal_ends_the_engine_although_its_store_is_full(
    small_disk: Path, tmp_path: Path, number: signal.Signals
) -> None:
    file = small_pipeline.write(tmp_path / "code")
    file.write_text(file.read_text().replace("retries=Retries", f'grace="{GRACE_SECONDS} s", retries=Retries'))
    errors = tmp_path / "errors"
    with errors.open("w") as stream:
        arguments = ["run", file, "--run", "r", "--store", small_disk / "store", "-p", "steps=1000000"]
        with begin(arguments, tmp_path, stderr=stream) as engine:
            until(lambda: "is saved" in errors.read_text())
            fill(small_disk)
            until(lambda: "is not saved yet: cannot write" in errors.read_text())
            running = engine.poll()
            engine.send_signal(number)
            engine.communicate(timeout=120)
    assert running is None
    assert engine.returncode == 75
    last = errors.read_text().splitlines()[-1]
    assert last.startswith("tiphys: the end of the run is not recorded: cannot write ")
    assert "the disk or its quota is full" in last
    assert "(tried " in last
    assert f"continue with `tiphys resume r --store {(small_disk / 'store').as_uri()}`" in last


@pytest.mark.parametrize("is_filled", [False, True], ids=["too small", "filled by others"])
def test_training_goes_on_saving_on_a_disk_that_is_full_of_expired_checkpoints(
    small_disk: Path, is_filled: bool
) -> None:
    store = DirectoryStore(small_disk / "store")
    with open_session(store, keep_last=1, delay_seconds=600) as session:
        for step in range(1, 13):
            if step == 3 and is_filled:
                fill(small_disk)
            session.save(step, {"schritt": step, "w": np.full(15_000, float(step))})
            assert session.last_committed == ref(1, step)
        assert session.failed_saves == 0
