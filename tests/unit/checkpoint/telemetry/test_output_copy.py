"""What is kept of the output of a training program once its pod is gone.

| output                                 | what is stored                                  |
|----------------------------------------|-------------------------------------------------|
| a few lines at a time                  | one chunk, which grows by versions               |
| more than a chunk                      | full chunks, cut at the ends of lines            |
| more than all chunks                   | the head and the newest, with a note of the gap  |
| more than storage takes in time        | the newest, with a note of what was left out     |
| values of variables named like secrets | blanks                                           |
| of a process that was forked           | nothing, because the parent stores its own       |
| of a second process of the attempt     | chunks after those of the first                  |
"""

import io
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.builders.lineage import LINEAGE, RUN, STEP, claim_of, write_claim

from tiphys.checkpoint.telemetry import output_copy
from tiphys.checkpoint.telemetry.output_copy import CHUNK_BYTES, HEAD_CHUNKS, OutputCopy, tee_stream
from tiphys.checkpoint.telemetry.secret_mask import find_secrets
from tiphys.errors import StoreError
from tiphys.store import DirectoryStore, RunLayout
from tiphys.store.program_output import GAP_LINE, list_output_chunks, read_program_output

LAYOUT = RunLayout(RUN)
PATIENCE_SECONDS = 120.0


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store")


def copy_to(store: DirectoryStore, *secrets: str, interval_seconds: float = 0.0) -> OutputCopy:
    return OutputCopy(store, RUN, STEP, 1, secrets, interval_seconds=interval_seconds)


def stored(store: DirectoryStore, **bounds: int) -> str:
    return "".join(read_program_output(store, LAYOUT, STEP, 1, **bounds))


def write_and_wait(copy: OutputCopy, text: str) -> None:
    """Write, and wait until the background thread has stored it."""
    copy.write(text)
    assert copy._writer is not None
    assert copy._writer.join(PATIENCE_SECONDS)


def test_a_chunk_grows_and_has_one_version(store: DirectoryStore) -> None:
    copy = copy_to(store)
    write_and_wait(copy, "one\n")
    write_and_wait(copy, "two\nthr")
    write_and_wait(copy, "ee\n")
    assert stored(store) == "one\ntwo\nthree\n"
    assert len(list(store.list(LAYOUT.program_output(STEP, 1)))) == 1


def test_output_waits_for_its_interval_and_the_end_does_not(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_copy, "_FIRST_SECONDS", 3600.0)
    copy = copy_to(store, interval_seconds=3600.0)
    copy.write("early\n")
    assert stored(store) == ""
    copy.close(PATIENCE_SECONDS)
    assert stored(store) == "early\n"
    copy.write("after the end\n")
    assert stored(store) == "early\n"


def test_chunks_end_with_lines_and_are_read_from_the_end(store: DirectoryStore) -> None:
    line = "x" * 99 + "\n"
    copy = copy_to(store)
    write_and_wait(copy, line * (3 * CHUNK_BYTES // 100))
    chunks = list_output_chunks(store, LAYOUT, STEP, 1)
    assert [chunk.number for chunk in chunks] == [0, 1, 2, 3]
    assert all(chunk.size_bytes % 100 == 0 for chunk in chunks)
    assert stored(store) == line * (3 * CHUNK_BYTES // 100)
    assert stored(store, last_lines=2) == line * 2
    assert stored(store, last_lines=0) == ""
    assert len(stored(store, last_bytes=1)) == chunks[-1].size_bytes


@pytest.mark.parametrize("before", ["", "x", "xx"], ids=len)
def test_a_line_longer_than_chunks_keeps_its_characters(store: DirectoryStore, before: str) -> None:
    """A bar of progress is one line for hours, of characters of three bytes."""
    line = before + "█" * CHUNK_BYTES + "\r"
    copy = copy_to(store)
    write_and_wait(copy, f"{line}{line}\n")
    assert len(list_output_chunks(store, LAYOUT, STEP, 1)) > 4
    assert stored(store) == f"{line}{line}\n"
    assert stored(store, last_lines=1).endswith(f"{line}\n")


def test_of_too_much_output_the_begin_and_the_end_are_kept(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_copy, "MAX_CHUNKS", HEAD_CHUNKS + 3)
    copy = copy_to(store)
    for number in range(HEAD_CHUNKS + 8):
        write_and_wait(copy, f"{number:063}\n" * (CHUNK_BYTES // 64))
    numbers = [chunk.number for chunk in list_output_chunks(store, LAYOUT, STEP, 1)]
    assert numbers == [*range(HEAD_CHUNKS), *range(HEAD_CHUNKS + 5, HEAD_CHUNKS + 8)]
    assert stored(store).count(GAP_LINE) == 1


def test_storage_that_does_not_keep_up_costs_the_oldest_output_and_no_time(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_copy, "MAX_PENDING_BYTES", 1000)
    monkeypatch.setattr(output_copy, "_FIRST_SECONDS", 3600.0)
    copy = copy_to(store, interval_seconds=3600.0)
    for number in range(100):
        copy.write(f"{number:099}\n")
    copy.close(PATIENCE_SECONDS)
    found = stored(store)
    assert found.startswith("… 9000 bytes were not stored in time …\n")
    assert found.endswith(f"{99:099}\n")


def test_a_failure_of_storage_loses_nothing_that_has_room(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, fails = store.create, [True, True]

    def flaky(key: str, data: bytes, **more: str) -> None:
        if fails:
            fails.pop()
            raise StoreError("no answer")
        create(key, data, **more)

    monkeypatch.setattr(store, "create", flaky)
    copy = copy_to(store)
    for line in ("one\n", "two\n", "three\n"):
        write_and_wait(copy, line)
    assert not fails
    assert stored(store) == "one\ntwo\nthree\n"


def test_a_reply_that_was_lost_stores_nothing_twice(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    create, lost = store.create, [True]

    def lossy(key: str, data: bytes, **more: str) -> None:
        create(key, data, **more)
        if lost:
            lost.pop()
            raise StoreError("no answer")

    monkeypatch.setattr(store, "create", lossy)
    copy = copy_to(store)
    write_and_wait(copy, "one\n")
    write_and_wait(copy, "two\n")
    assert not lost
    assert stored(store) == "one\ntwo\n"


def test_threads_that_print_at_once_have_one_writer(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_copy, "_FIRST_SECONDS", 3600.0)
    started: list[object] = []
    start = output_copy.start_background_thread

    def count(work: Callable[[], object]) -> object:
        started.append(work)
        return start(work)

    monkeypatch.setattr(output_copy, "start_background_thread", count)
    copy = copy_to(store, interval_seconds=3600.0)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: copy.write(f"{number}\n"), range(400)))
    assert len(started) == 1
    copy.close(PATIENCE_SECONDS)
    assert sorted(map(int, stored(store).split())) == list(range(400))


def test_after_sigterm_the_end_does_not_wait_for_storage(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(store, "create", lambda *_, **__: answers.wait(PATIENCE_SECONDS))
    copy = copy_to(store)
    copy.write("last\n")
    copy.close_for_exit(hurried=True)  # returns although storage does not answer
    assert not answers.is_set()
    answers.set()


def test_secrets_are_blanked_also_if_they_come_in_parts(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_copy, "_FIRST_SECONDS", 3600.0)
    environ = {
        "AWS_SECRET_ACCESS_KEY": "abcdefgh-long",
        "HF_TOKEN": "abcdefgh",
        "MY_PASSWORD": "short",
        "HOME": "/root/long",
    }
    assert set(find_secrets(environ)) == {"abcdefgh-long", "abcdefgh"}
    copy = copy_to(store, *find_secrets(environ), interval_seconds=3600.0)
    for part in ("key abcd", "efgh-long, token abcdefgh", ", short\n"):
        copy.write(part)
    copy.close(PATIENCE_SECONDS)
    assert stored(store) == "key ***, token ***, short\n"


def test_secrets_are_blanked_in_two_writes_to_storage(store: DirectoryStore) -> None:
    copy = copy_to(store, "geheim-über-alles", "geheim-über-alles-2")
    for part in ("one geheim", "-über", "-alles", " two geheim-über-alles", "-2\n", "three geh"):
        write_and_wait(copy, part)
    assert stored(store) == "one *** two ***\nthree "
    copy.close(PATIENCE_SECONDS)
    assert stored(store) == "one *** two ***\nthree geh"


def test_a_second_process_of_the_attempt_continues_after_the_first(store: DirectoryStore) -> None:
    for line in ("first\n", "second\n"):
        copy = copy_to(store)
        copy.write(line)
        copy.close(PATIENCE_SECONDS)
    assert stored(store) == "first\nsecond\n"


def test_handlers_of_logging_that_hold_the_stream_are_copied(store: DirectoryStore) -> None:
    class Stream(io.StringIO):
        pass

    stream = Stream()
    handler = logging.StreamHandler(stream)
    copy = copy_to(store)
    tee_stream(copy, stream)
    print("printed", file=stream)
    handler.emit(logging.makeLogRecord({"msg": "logged"}))
    copy.close(PATIENCE_SECONDS)
    assert stream.getvalue() == stored(store) == "printed\nlogged\n"
    tee_stream(copy, None)  # a process without output


PROGRAM = """
import os, sys
from tiphys import checkpoint
with checkpoint.session() as session:
    print("trains", os.environ["HF_TOKEN"])
    if os.fork() == 0:
        print("a worker")
        sys.stdout.flush()
        os._exit(0)
    os.wait()
    with checkpoint.session():
        print("once")
    raise ValueError("of no use")
"""


@pytest.mark.parametrize("setting", ["", "off"])
def test_a_program_leaves_its_output_and_its_traceback(tmp_path: Path, setting: str) -> None:
    store = DirectoryStore(tmp_path / "store", create=True)
    write_claim(store, claim_of(1))
    environ = {
        **os.environ,
        "TIPHYS_STORE": store.url,
        "TIPHYS_RUN": RUN,
        "TIPHYS_STEP": STEP,
        "TIPHYS_ATTEMPT": "1",
        "TIPHYS_LINEAGE": LINEAGE,
        "TIPHYS_OUTPUT_COPY": setting,
        "HF_TOKEN": "hf_0123456789",
    }
    ended = subprocess.run([sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, timeout=300)
    assert "ValueError: of no use" in ended.stderr
    found = stored(store)
    if setting == "off":
        assert found == ""
        return
    assert "trains ***\n" in found
    assert found.count("once\n") == 1
    assert "a worker" not in found
    assert found.endswith("ValueError: of no use\n")
