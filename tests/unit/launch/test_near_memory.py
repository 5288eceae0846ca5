"""The file in memory that a launcher holds for its program."""

import os

import pytest

from tiphys.launch.near_memory import REGION_BYTES, hold_near_memory, open_near_memory

KEEPS = {"TIPHYS_LINEAGE": "r/fit"}


@pytest.fixture
def held():
    variables = hold_near_memory(KEEPS)
    yield variables
    os.close(int(variables["TIPHYS_NEAR_MEMORY"].rpartition("/")[2]))


def test_the_file_is_a_hole_that_takes_no_memory_and_no_program_inherits(held):
    descriptor = open_near_memory(held, 0)
    status = os.fstat(descriptor)
    os.close(descriptor)
    assert (status.st_blocks, status.st_size) == (0, 1024 * REGION_BYTES)
    assert not os.get_inheritable(int(held["TIPHYS_NEAR_MEMORY"].rpartition("/")[2]))


def test_a_process_finds_what_another_has_written(held):
    descriptor = open_near_memory(held, 0)
    os.pwrite(descriptor, b"state", REGION_BYTES)
    os.close(descriptor)
    descriptor = open_near_memory(held, 0)
    assert os.pread(descriptor, 5, REGION_BYTES) == b"state"
    os.close(descriptor)


@pytest.mark.parametrize("environ", [{}, {"TIPHYS_LINEAGE": ""}, {**KEEPS, "TIPHYS_NEAR_COPY": "false"}], ids=str)
def test_a_program_that_keeps_no_copy_gets_no_file(environ):
    assert hold_near_memory(environ) == {}


def test_a_sandbox_without_the_call_has_no_file(monkeypatch):
    monkeypatch.setattr(os, "memfd_create", lambda *_: (_ for _ in ()).throw(OSError(38, "not implemented")))
    assert hold_near_memory(KEEPS) == {}


def test_a_path_that_is_another_file_there_is_not_opened(held, tmp_path):
    """In another namespace of processes the number is that of another one."""
    other = tmp_path / "tiphys"
    other.write_bytes(b"precious")
    (tmp_path / "link").symlink_to(other)
    for path in ("", str(other), str(tmp_path / "link"), "/proc/1/fd/9999"):
        assert open_near_memory({"TIPHYS_NEAR_MEMORY": path}, 0) is None
    assert open_near_memory(held, 1024) is None
