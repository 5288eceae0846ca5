"""Processes that have files open, as ``/proc`` describes them."""

import os
from pathlib import Path

import pytest

from tiphys.checkpoint.exec.evidence import find_writers

RUNNING, EXITING = 0x400000, 0x400004


def add_process(proc: Path, pid: int, state: str, flags: int, opened: Path | None = None) -> None:
    place = proc / str(pid)
    (place / "fd").mkdir(parents=True)
    (place / "fdinfo").mkdir()
    (place / "maps").touch()
    (place / "stat").write_text(f"{pid} (päth (on) 3) {state} {os.getpid()} 1 1 0 -1 {flags} 0 0\n")
    if opened is not None:
        (place / "fd" / "3").symlink_to(opened)
        (place / "fdinfo" / "3").write_text("pos:\t0\nflags:\t0100001\n")


def test_a_file_that_is_open_for_writing_has_its_process(tmp_path):
    add_process(tmp_path / "proc", 7, "S", RUNNING, tmp_path / "ckpt" / "é.pt")
    writers = find_writers(tmp_path / "ckpt", tmp_path / "proc")
    assert writers is not None
    assert (writers.names, writers.processes) == ({"é.pt": "process 7 (päth (on) 3)"}, {7})


@pytest.mark.parametrize(("state", "flags"), [("R", EXITING), ("Z", RUNNING), ("X", RUNNING)])
def test_a_process_that_ends_counts_as_ended_because_its_files_are_closed(tmp_path, state, flags):
    add_process(tmp_path / "proc", 7, "S", RUNNING)
    add_process(tmp_path / "proc", 8, state, flags, tmp_path / "ckpt" / "é.pt")
    writers = find_writers(tmp_path / "ckpt", tmp_path / "proc")
    assert writers is not None
    assert (writers.names, writers.processes) == ({}, {7})
