"""Streams of events: an open page is told at once that its run has changed.

| situation | the stream |
|---|---|
| it begins | says ``changed``, because the page is older |
| a record is created | says ``changed`` |
| nothing changes for a while | sends a comment, so that proxies keep it |
| the store fails | goes on when the store does |
| a listing hangs | says ``slow`` in place of the comment, and begins no other listing of the run |
| the slow listing ends | says ``changed``, also without a change, so that the page says it no more |
| the server ends, or the stream is old | ends |
| the reader leaves | is counted no more |
| too many are open, or there is no such run | is refused, so the page polls |
"""

from collections.abc import AsyncIterator, Callable, Iterator
from itertools import pairwise
from pathlib import Path
from threading import Event as Gate

import anyio
import httpx
import pytest
from support.compiled import History, gated, pipeline_of
from support.lineage import RUN, STEP, ref, write_run
from support.lineage import commit as commit_checkpoint
from support.pages import Pages, Texts
from support.polling import until
from support.submitter import FakeSubmitter
from tiphys_controller import start_run

from hera_pipelines.ui import run_changes
from hera_pipelines.ui.app import build_app
from hera_pipelines.ui.run_changes import MAX_STREAMS, RunChanges, compute_run_signature
from tiphys.errors import StoreError
from tiphys.records import Event, EventBatch
from tiphys.service.http_server import AppServer
from tiphys.store import DirectoryStore, LineageLayout, ObjectInfo, RunLayout, Store
from tiphys.store.layout import RUNS, event_batch_key

CHANGED, SLOW, QUIET = b"event: changed\ndata:\n\n", b"event: slow\ndata:\n\n", b":\n\n"
PATIENCE_SECONDS = 120
PIPELINE = pipeline_of(gated("prep"), gated("fit", depends="prep"))


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_changes, "_TICK_SECONDS", 0.01)
    monkeypatch.setattr(run_changes, "_CHECK_SECONDS", 0.0)
    monkeypatch.setattr(run_changes, "_CHECK_SHARE", 1.0)
    monkeypatch.setattr(run_changes, "_QUIET_SECONDS", 3600.0)
    monkeypatch.setattr(run_changes, "_SLOW_SECONDS", 3600.0)


def test_every_record_of_a_run_changes_its_signature(store: DirectoryStore) -> None:
    write_run(store)
    write_run(store, run="other")
    layout, lineage = RunLayout(RUN), LineageLayout(f"{RUN}/{STEP}")
    seen = [compute_run_signature(store, RUN)]

    def changes(key: str, data: bytes) -> bool:
        store.create(key, data)
        seen.append(compute_run_signature(store, RUN))
        return seen[-1] not in seen[:-1]

    batch = EventBatch(run=RUN, source="trainer", events=(Event(name="a", message="b"),))
    assert changes(layout.attempt(STEP, 1), b"claim")
    assert changes(layout.attempt_end(STEP, 1), b"end")
    assert changes(event_batch_key(layout.program_events, 1), batch.to_bytes())
    assert changes(lineage.training_progress_report(1, 1000), b"progress")
    assert not changes(RunLayout("other").attempt(STEP, 1), b"claim")
    commit_checkpoint(store, ref(1, 10))
    assert compute_run_signature(store, RUN) not in seen


def collect(changes: RunChanges, run: str, act: Callable[[list[bytes]], bool]) -> list[bytes]:
    """What a stream sends until ``act``, which is called after each part and between them, says that it is enough."""
    got: list[bytes] = []

    async def read() -> None:
        with anyio.fail_after(PATIENCE_SECONDS):
            async with anyio.create_task_group() as group:

                async def receive(stream: AsyncIterator[bytes]) -> None:
                    async for part in stream:
                        got.append(part)  # noqa: PERF401  it is looked at in between

                group.start_soon(receive, changes.stream(run))
                while not act(got):
                    await anyio.sleep(0.01)
                group.cancel_scope.cancel()

    anyio.run(read)
    return got


def test_a_page_is_told_at_the_begin_and_at_each_change(store: DirectoryStore) -> None:
    write_run(store)
    keys = [RunLayout(RUN).attempt(STEP, 1), RunLayout(RUN).attempt_end(STEP, 1)]
    created: list[str] = []

    def act(got: list[bytes]) -> bool:
        if len(created) < len(got) <= len(keys):
            created.append(keys[len(created)])
            store.create(created[-1], b"x")
        return len(got) == 3

    assert collect(RunChanges(store), RUN, act) == [CHANGED] * 3


def test_a_silent_stream_is_kept_and_says_nothing_else(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_changes, "_QUIET_SECONDS", 0.02)
    write_run(store)
    assert collect(RunChanges(store), RUN, lambda got: len(got) >= 3)[:3] == [CHANGED, QUIET, QUIET]


class Counting(DirectoryStore):
    """Counts the listings of the records of runs, and fails while it is told to."""

    listings = 0
    fails = False

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        if self.fails:
            raise StoreError("the bucket is away")
        self.listings += prefix == RunLayout(RUN).control
        return super().list(prefix)


def test_a_store_that_fails_ends_no_stream(tmp_path: Path) -> None:
    store = Counting(tmp_path / "store")
    write_run(store)

    def act(got: list[bytes]) -> bool:
        if len(got) == 1 and store.fails:
            store.create(RunLayout(RUN).attempt(STEP, 1), b"x")
            store.fails = False
        return len(got) == 2

    store.fails = True
    assert collect(RunChanges(store), RUN, act) == [CHANGED, CHANGED]


class Hanging(DirectoryStore):
    """Listings of the records of runs hang until the gate is opened."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.gate = Gate()
        self.listed: list[str] = []

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        if prefix.startswith(RUNS):
            self.listed.append(prefix)
            assert self.gate.wait(PATIENCE_SECONDS)
        return super().list(prefix)


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Hanging]:
    store = Hanging(tmp_path / "store")
    yield store
    store.gate.set()


def test_a_listing_that_hangs_silences_no_stream(hanging: Hanging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_changes, "_QUIET_SECONDS", 0.02)
    monkeypatch.setattr(run_changes, "_SLOW_SECONDS", 0.02)
    write_run(hanging)
    listed_while_slow = 0

    def act(got: list[bytes]) -> bool:
        nonlocal listed_while_slow
        if len(got) >= 3 and hanging.listed and not hanging.gate.is_set():
            listed_while_slow = len(hanging.listed)
            hanging.gate.set()
        return CHANGED in got

    got = collect(RunChanges(hanging), RUN, act)
    assert got[:3] == [SLOW] * 3
    assert listed_while_slow == 1


def test_a_page_that_was_told_that_the_store_is_slow_is_told_when_it_is_not(
    hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_changes, "_QUIET_SECONDS", 0.02)
    monkeypatch.setattr(run_changes, "_SLOW_SECONDS", 0.02)
    write_run(hanging)
    hanging.gate.set()
    since = 0

    def act(got: list[bytes]) -> bool:
        nonlocal since
        if CHANGED in got and hanging.gate.is_set() and not since:
            hanging.gate.clear()
        if SLOW in got and not since:
            since = len(got)
            hanging.gate.set()
        return bool(since) and CHANGED in got[since:]

    assert CHANGED in collect(RunChanges(hanging), RUN, act)[since:], "although no record changed"


def test_readers_that_come_and_go_pile_up_no_listings(hanging: Hanging) -> None:
    write_run(hanging)
    changes, runs = RunChanges(hanging), [f"run-{number}" for number in range(10)]

    async def read(run: str) -> None:
        async for _ in changes.stream(run):
            raise AssertionError("nothing was listed")

    async def come_and_go() -> None:
        for _ in range(3):
            async with anyio.create_task_group() as group:
                for run in runs:
                    group.start_soon(read, run)
                with anyio.fail_after(PATIENCE_SECONDS):
                    while changes.streams < len(runs) or len(hanging.listed) < 4:
                        await anyio.sleep(0.01)
                group.cancel_scope.cancel()

    anyio.run(come_and_go)
    assert changes.streams == 0
    begun = set(hanging.listed)
    hanging.gate.set()
    assert collect(changes, RUN, bool) == [CHANGED]
    others = [prefix for prefix in hanging.listed if prefix != RunLayout(RUN).control]
    assert len(others) == 4, "a run has one listing, and what no reader waits for is not begun"
    assert set(others) == begun


def test_many_pages_of_a_run_list_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_changes, "_CHECK_SECONDS", 3600.0)
    store = Counting(tmp_path / "store")
    write_run(store)
    changes = RunChanges(store)

    async def open_many() -> int:
        streams = [changes.stream(RUN) for _ in range(20)]
        assert [await anext(stream) for stream in streams] == [CHANGED] * 20
        opened = changes.streams
        for stream in streams:
            await stream.aclose()  # type: ignore[attr-defined]
        return opened

    assert anyio.run(open_many) == 20
    assert store.listings == 1
    assert changes.streams == 0


def test_a_large_run_is_listed_for_a_tenth_of_the_time(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_changes, "_CHECK_SECONDS", 2.0)
    monkeypatch.setattr(run_changes, "_CHECK_SHARE", 0.1)
    now, listed_at = [0.0], list[float]()

    def list_for_five_seconds(_store: Store, _run: str) -> str:
        listed_at.append(now[0])
        now[0] += 5.0
        return "same"

    monkeypatch.setattr(run_changes, "compute_run_signature", list_for_five_seconds)

    def act(_: list[bytes]) -> bool:
        now[0] += 1.0
        return len(listed_at) == 4

    collect(RunChanges(store, lambda: now[0]), RUN, act)
    assert all(after - before >= 55.0 for before, after in pairwise(listed_at))


def test_a_stream_ends_with_its_server_and_after_its_time(store: DirectoryStore) -> None:
    write_run(store)
    now = [0.0]
    changes = RunChanges(store, lambda: now[0])

    async def read(then: Callable[[], None]) -> list[bytes]:
        got = []
        with anyio.fail_after(PATIENCE_SECONDS):
            async for part in changes.stream(RUN):
                got.append(part)
                then()
        return got

    def grow_old() -> None:
        now[0] += 600.0

    assert anyio.run(read, grow_old) == [CHANGED]
    assert anyio.run(read, changes.close) == [CHANGED]
    assert not changes.has_room


@pytest.fixture
def submitter(tmp_path: Path) -> FakeSubmitter:
    return FakeSubmitter(tmp_path / "cluster")


def test_only_the_page_of_a_run_that_goes_on_asks_for_a_stream(store: DirectoryStore, submitter: FakeSubmitter) -> None:
    started = start_run(store, submitter, PIPELINE, "digits-1")
    streaming = Pages(build_app(store, submitter, changes=RunChanges(store)))
    polling = Pages(build_app(store, submitter))
    assert 'data-changes="/runs/digits-1/changes"' in streaming.get("/runs/digits-1").text
    assert "data-changes" not in polling.get("/runs/digits-1").text
    assert polling.get("/runs/digits-1/changes").status_code == 404
    submitter.end(started.workflow_name)
    assert "data-changes" not in streaming.get("/runs/digits-1").text


@pytest.mark.parametrize(("run", "status"), [("absent", 404), ("..", 404), ("%0aX", 400)])
def test_there_is_no_stream_of_what_is_no_run(store: DirectoryStore, run: str, status: int) -> None:
    answer = Pages(build_app(store, changes=RunChanges(store))).get(f"/runs/{run}/changes")
    assert answer.status_code == status


def test_a_stream_over_http_is_not_buffered_and_not_packed_and_is_counted_while_it_is_read(
    store: DirectoryStore, submitter: FakeSubmitter
) -> None:
    start_run(store, submitter, PIPELINE, "digits-1")
    changes = RunChanges(store)
    with AppServer(build_app(store, submitter, changes=changes)) as server:
        url = f"{server.url}/runs/digits-1/changes"
        with httpx.stream("GET", url, timeout=120, trust_env=False) as answer:
            parts = answer.iter_raw()
            assert next(parts) == CHANGED
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert (answer.headers["X-Accel-Buffering"], answer.headers["Cache-Control"]) == ("no", "no-store")
            assert "content-encoding" not in answer.headers
            History(store, "digits-1").opened("prep")
            assert next(parts) == CHANGED
            assert changes.streams == 1
        until(lambda: changes.streams == 0, 120)
        changes.close()
        refused = httpx.get(url, timeout=120, trust_env=False)
    assert refused.status_code == 503
    assert "this one asks again every few seconds" in Texts(refused.text).text


def test_streams_beyond_the_limit_are_refused(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_changes, "MAX_STREAMS", 2)
    write_run(store)
    changes = RunChanges(store)

    async def open_two() -> bool:
        streams = [changes.stream(RUN) for _ in range(2)]
        for stream in streams:
            await anext(stream)
        has_room = changes.has_room
        for stream in streams:
            await stream.aclose()  # type: ignore[attr-defined]
        return has_room

    assert MAX_STREAMS >= 100
    assert changes.has_room
    assert not anyio.run(open_two)
    assert changes.has_room
