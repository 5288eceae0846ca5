"""The output of a wrapped program reaches the log of the pod and the stored copy, however the program ends.

| program                                    | log and copy             |
|--------------------------------------------|--------------------------|
| ends, is killed                            | all that it wrote        |
| leaves a process behind that holds its log | all that it wrote itself |
| writes bytes that are no text              | the bytes; a replacement |
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.builders.lineage import LINEAGE, RUN, STEP, claim_of, write_claim
from support.processes.process import lives

from tiphys.store import DirectoryStore, RunLayout
from tiphys.store.program_output import read_program_output


def run_wrapped(folder: Path, program: str, setting: str = "") -> tuple[subprocess.CompletedProcess[bytes], str]:
    """``program`` under ``tiphys-exec``; how it ended, and the stored copy of its output."""
    store = DirectoryStore(folder / "store", create=True)
    write_claim(store, claim_of(1))
    environ = {
        **os.environ,
        "TIPHYS_STORE": store.url,
        "TIPHYS_RUN": RUN,
        "TIPHYS_STEP": STEP,
        "TIPHYS_ATTEMPT": "1",
        "TIPHYS_LINEAGE": LINEAGE,
        "TIPHYS_OUTPUT_COPY": setting,
    }
    command = [sys.executable, "-m", "tiphys.checkpoint.exec", "--dir", str(folder / "ckpt"), "--", "sh", "-c", program]
    ended = subprocess.run(command, env=environ, capture_output=True, timeout=300)
    return ended, "".join(read_program_output(store, RunLayout(RUN), STEP, 1))


@pytest.mark.parametrize(("end", "code"), [("exit 3", 3), ("kill -9 $$", 137)])
def test_the_whole_output_of_a_program_is_in_the_log_and_stored(tmp_path: Path, end: str, code: int) -> None:
    lines = "".join(f"line {number}\n" for number in range(2000))
    ended, copied = run_wrapped(
        tmp_path, f"i=0; while [ $i -lt 2000 ]; do echo line $i; i=$((i+1)); done; echo oh no >&2; {end}"
    )
    assert ended.returncode == code
    assert ended.stdout.decode() == lines
    assert "oh no\n" in ended.stderr.decode()
    assert copied.replace("oh no\n", "") == lines


def test_process_that_is_left_behind_ends_with_the_wrapper(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    ended, copied = run_wrapped(tmp_path, f"echo before; sleep 3600 & echo $! > {marker}; exit 0")
    assert not lives(int(marker.read_text()))
    assert (ended.returncode, copied) == (0, "before\n")


def test_bytes_that_are_no_text_stay_as_they_are_in_the_log(tmp_path: Path) -> None:
    ended, copied = run_wrapped(tmp_path, r"printf 'a\377\303\244\n'")
    assert ended.stdout == b"a\xff\xc3\xa4\n"
    assert copied == "a\ufffdä\n"


def test_without_a_copy_the_program_has_the_streams_of_the_wrapper(tmp_path: Path) -> None:
    ended, copied = run_wrapped(tmp_path, "echo out", "off")
    assert (ended.stdout, copied) == (b"out\n", "")
