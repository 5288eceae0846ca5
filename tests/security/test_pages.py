"""What a stranger without a login can cost the web pages, and by which names another site can read them.

| the caller | what happens |
|---|---|
| asks for many pages and hangs up | a few are read at once, the others are not begun, and the next caller is answered |
| hangs up while its page is read | the page ends at its next storage request |
| asks for more pages than are read at once | it waits for a moment, and gets 503 with `Retry-After` |
| asks for a run of thousands of attempts, checkpoints or events | the records of a bounded number are read |
| asks by the name of another site, on any address | 400, which names the option |
| sends many forms at once | their bytes are bounded |
"""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.builders.lineage import RUN, claim_of, commit, end_of, ref, write_claim, write_end, write_run
from support.fakes.submitter import FakeSubmitter
from support.processes.polling import until
from support.servers import http
from support.servers.raw_http import dial
from support.stories.pages import ControllerActions, Pages

from hera_pipelines.ui import page_reads
from hera_pipelines.ui.action_routes import ActionRoutes
from hera_pipelines.ui.app import build_app
from hera_pipelines.ui.page_access import PageAccess
from hera_pipelines.ui.record_cache import ReadOnlyStore
from tiphys.errors import StoreError
from tiphys.records import Event, SubmissionClaim, SubmissionKind
from tiphys.service import http_server
from tiphys.service.http_server import AppServer
from tiphys.store import DirectoryStore, ObjectInfo, RunLayout, Store, append_events


class HeldStore(ReadOnlyStore):
    """Holds each listing of attempts until it is let go, and counts those that began and what was read."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.let_go = threading.Event()
        self.begun = 0
        self.reads: Counter[str] = Counter()
        self._lock = threading.Lock()

    def read(self, key: str) -> bytes:
        with self._lock:
            self.reads[key] += 1
        return super().read(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        if prefix.endswith("/attempts/"):
            with self._lock:
                self.begun += 1
            assert self.let_go.wait(120)
        yield from super().list(prefix)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[HeldStore]:
    write_run(store := DirectoryStore(tmp_path))
    for attempt in range(1, 4):
        write_claim(store, claim_of(attempt))
        write_end(store, end_of(attempt))
    held = HeldStore(store)
    yield held
    held.let_go.set()


def _ask_and_hang_up(url: str, path: str, count: int) -> None:
    for _ in range(count):
        with closing(dial(url)) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())


def test_pages_of_clients_that_hang_up_are_not_begun(store: HeldStore) -> None:
    before = threading.active_count()
    with AppServer(build_app(store)) as server:
        _ask_and_hang_up(server.url, f"/runs/{RUN}", 60)
        until(lambda: store.begun >= page_reads.MAX_READS)
        assert threading.active_count() - before < 20 * page_reads.MAX_READS
        assert http.get(f"{server.url}/", headers={"Host": "localhost"}, timeout=120).status_code == 200
        store.let_go.set()
        answer = http.get(f"{server.url}/runs/{RUN}", headers={"Host": "localhost"}, timeout=120)
    assert answer.status_code == 200
    assert store.begun <= page_reads.MAX_READS + 1
    # The pages that had begun ended at their next storage request; the last one read the ends of its attempts.
    assert {count for key, count in store.reads.items() if key.endswith(".end.json")} == {1}


def test_more_pages_than_are_read_at_once_get_503_and_when_to_ask_again(
    store: HeldStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = page_reads.PageReads(store, wait_seconds=120.0)
    monkeypatch.setattr("hera_pipelines.ui.app.PageReads", lambda _: reads)
    with AppServer(build_app(store)) as server:
        begun = [dial(server.url) for _ in range(page_reads.MAX_READS)]
        for connection in begun:
            connection.sendall(f"GET /runs/{RUN} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        until(lambda: store.begun == page_reads.MAX_READS)
        reads._wait_seconds = 0.05  # those that have begun wait as long as a busy machine needs, before it and after it
        refused = http.get(f"{server.url}/runs/{RUN}", headers={"Host": "localhost"}, timeout=120)
        reads._wait_seconds = 120.0
        store.let_go.set()
        for connection in begun:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
            connection.close()
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "5")
    assert "too many pages are being read" in refused.text


def test_the_rest_of_a_page_is_not_read_once_it_is_given_up(store: HeldStore) -> None:
    store.let_go.set()
    page = page_reads.PageStore(store)
    listing = page.list("control/runs/")
    next(listing)
    page.abandon()
    for go_on in (lambda: page.read(f"control/runs/{RUN}/run.json"), lambda: [*page.list("data/")]):
        with pytest.raises(StoreError, match="its client has gone"):
            go_on()
    assert not store.reads


@pytest.fixture(scope="module")
def large_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A run with more attempts, checkpoints and events than any page may read."""
    write_run(store := DirectoryStore(tmp_path_factory.mktemp("large")))
    claim = SubmissionClaim(run=RUN, submission=1, kind=SubmissionKind.ORIGINAL, workflow_name="wf", namespace="ml")
    store.create(RunLayout(RUN).submission(1), claim.to_bytes())
    for attempt in range(1, 601):
        write_claim(store, claim_of(attempt))
        write_end(store, end_of(attempt))
        commit(store, ref(attempt, attempt), data=(b"x",))
        append_events(store, RUN, "service", [Event(name="step.retried", message=f"attempt {attempt}")])
    return store


@pytest.mark.parametrize(
    "path",
    [
        "",
        "?page=2",
        "?submission=1",
        "/times.svg",
        "/recoveries.svg",
        "/lineage.svg",
        "/metrics.svg",
        "/checkpoints",
        "/logs/fit?attempt=7",
    ],
)
def test_a_page_reads_a_bounded_number_of_records(path: str, large_store: Store) -> None:
    store = HeldStore(large_store)
    store.let_go.set()

    assert Pages(build_app(store)).get(f"/runs/{RUN}{path}").status_code == 200

    read = Counter(part for key in store.reads for part in ("attempts", "manifests", "events") if f"/{part}/" in key)
    assert read["attempts"] <= 2 * 400
    assert max(read["manifests"], read["events"]) <= 400


def test_a_view_that_took_much_cpu_is_shared_for_ten_times_as_long() -> None:
    now, cpu, read = [0.0], [0.0], Counter[str]()
    views = page_reads.SharedViews[int](lambda: now[0], lambda: cpu[0])

    def look(run: str, cost: float) -> int:
        def work() -> int:
            read[run] += 1
            cpu[0] += cost
            return read[run]

        return views.read((run, 1), work)

    assert [look("large", 2.0), look("large", 2.0), look("other", 2.0)] == [1, 1, 1]
    now[0] = 19.9
    assert (look("large", 2.0), look("cheap", 0.05), look("cheap", 0.05)) == (1, 1, 2)
    now[0] = 20.1
    assert look("large", 2.0) == 2


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8321", "localhost.evil.example", "[::2]:8321", ""])
def test_pages_answer_to_no_name_of_another_site(host: str, tmp_path: Path) -> None:
    app = build_app(DirectoryStore(tmp_path), allowed_hosts=("localhost", "[::1]", "Runs.Example.org"))
    refused = Pages(app).get("/", host=host)
    assert (refused.status_code, "--allow-host NAME" in refused.text) == (400, True)
    for name in ("localhost:1", "LOCALHOST", "[::1]:8321", "[::1]", "runs.example.org:443"):
        assert Pages(app).get("/", host=name).status_code == 200


def test_forms_of_strangers_do_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_BUDGET_WAIT_SECONDS", 0.05)
    store = DirectoryStore(tmp_path / "store")
    backend = ControllerActions(store, FakeSubmitter(tmp_path / "cluster"))
    app = build_app(store, actions=ActionRoutes(store, backend, PageAccess("a-token-of-24-characters")))
    head = "POST /sign-in HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-www-form-urlencoded\r\n"
    with AppServer(app) as server:
        held = [dial(server.url) for _ in range(16)]
        for connection in held:  # as many as one address may have in flight, and none is finished
            connection.sendall(f"{head}Content-Length: 65536\r\n\r\n".encode() + b"x" * 60000)
        next_one = dial(server.url)
        next_one.sendall(f"{head}Content-Length: 65536\r\n\r\n".encode() + b"token=" + b"x" * 65530)
        assert next_one.recv(4096).startswith(b"HTTP/1.1 503 ")
        for connection in (*held, next_one):
            connection.close()
