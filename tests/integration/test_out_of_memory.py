"""Real processes that run out of memory: each ends, soon and of that, and loses nothing that was on its way.

| memory is taken | while | store |
|---|---|---|
| to the last byte, and let go of by the error | nothing is under way | folder |
| to the last byte, and held | nothing is under way | bucket |
| in a piece that is never there | a save of several shards is under way | folder, bucket |

One that stands still even so is ended by the kernel.
"""

import os
import signal
import subprocess
import sys

import pytest
from support.builders.lineage import LINEAGE, RUN, STEP, claim_of, ref, write_claim

from tiphys.failures.classify import AttemptObservation, classify_failure
from tiphys.lineage.select import list_commits
from tiphys.records import Cause
from tiphys.store import open_store
from tiphys.store.incarnations import find_crash_record

pytestmark = pytest.mark.heavy

GUARD_SECONDS = 240


def run(url, *arguments, **others):
    """The program in the first attempt of a run; its exit code, what it said, and what it left."""
    store = open_store(url)
    write_claim(store, claim_of(1))
    own = {
        "TIPHYS_STORE": url,
        "TIPHYS_RUN": RUN,
        "TIPHYS_STEP": STEP,
        "TIPHYS_ATTEMPT": "1",
        "TIPHYS_LINEAGE": LINEAGE,
        "TIPHYS_RESUME_FROM": "",
        "TIPHYS_SAVE_EVERY": "1 steps",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TIPHYS_")}
    command = [sys.executable, "-m", "support.programs.memory_hog", *arguments]
    ended = subprocess.run(command, env={**kept, **own, **others}, timeout=GUARD_SECONDS, stderr=subprocess.PIPE)
    return ended.returncode, ended.stderr.decode(errors="replace"), store


@pytest.fixture
def folder(tmp_path):
    return (tmp_path / "store").as_uri()


def assert_it_ended_of_its_memory(code, err, store):
    assert code == 1, err
    assert "MemoryError" in err
    crash = find_crash_record(store, RUN, STEP, 1)
    assert crash, err
    assert (crash.error, crash.fingerprint, crash.global_step) == ("MemoryError", "", 1)
    assert classify_failure(AttemptObservation("Failed", code, crash_error=crash.error)).cause is Cause.OUT_OF_MEMORY
    assert list_commits(store, LINEAGE) == [ref(1, 1)]


def test_a_program_that_takes_the_last_byte_ends(folder):
    assert_it_ended_of_its_memory(*run(folder, "small", "1", "saved"))


def test_a_program_that_holds_the_last_byte_ends_too(bucket):
    assert_it_ended_of_its_memory(*run(f"s3://{bucket}", "held", "1", "saved"))


def test_a_save_to_a_folder_that_is_under_way_when_memory_ends_is_committed(folder):
    assert_it_ended_of_its_memory(*run(folder, "large", "24", "under-way"))


def test_a_save_to_a_bucket_that_is_under_way_when_memory_ends_is_committed(bucket):
    assert_it_ended_of_its_memory(*run(f"s3://{bucket}", "large", "24", "under-way"))


def test_a_program_that_survives_it_is_left_alone(folder):
    code, err, _ = run(folder, "small", "1", "saved", HOARDER_SURVIVES="1")
    assert code == 0, err


STANDS_STILL = """
import pathlib, sys, time
from tiphys.checkpoint.lifecycle import out_of_memory as exhaustion
from tiphys.checkpoint.lifecycle.hang_watchdog import KernelAlarm
from tiphys.checkpoint.lifecycle.hang_watchdog import CrashLog
exhaustion.DRAIN_TIMEOUT_SECONDS = 0.05
log = pathlib.Path(sys.argv[1])
words = CrashLog(log)
words.open()
with exhaustion.OutOfMemoryGuard(MemoryError(), words, KernelAlarm(log)):
    while True:
        time.sleep(1)
"""


def test_a_session_that_stands_still_at_its_end_is_ended_by_the_kernel(tmp_path):
    log = tmp_path / "termination-log"
    log.touch()
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", STANDS_STILL, str(log)], env=environ, timeout=GUARD_SECONDS)
    assert ended.returncode == -signal.SIGALRM
    message = log.read_text()
    assert "most recent call first" in message
    assert classify_failure(AttemptObservation("Failed", 137, termination_message=message)).cause is Cause.OUT_OF_MEMORY
