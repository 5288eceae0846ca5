"""What the calls of one tenant may cost a service: bytes of bodies, values in them, Workflows that are kept.

| calls | answer |
|---|---|
| bodies of one tenant beyond its share | they wait for room, then 503; other tenants are answered |
| a body in chunks | 411, unread: a chunk of one byte costs as much as a large one |
| a body that drips | its pieces are collected, so they are few |
| JSON of very many values | 400, before it is parsed |
| one Workflow that names one run after the other | refused: a Workflow has one run |
| large Workflows | the latest of them are kept, up to a number of bytes |
"""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cachetools import LRUCache
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from support.builders.ledger import queues
from support.processes.polling import until
from support.servers import http
from support.servers.raw_http import dial, read_to_end, request_head
from support.stories.plugin import World, phase, prep, said, world
from tiphys_plugin import PluginServer, core
from tiphys_plugin.sidecar.forwarding import EXECUTE_PATH, MAX_BODY_BYTES

from tiphys.errors import StoreError, UsageError
from tiphys.service import http_server
from tiphys.service.connections import LimitedConnection
from tiphys.service.http_server import AppServer, BodyBudget

PATIENCE_SECONDS = 120
KNOWN = {"Authorization": "Bearer a-secret-token"}


@pytest.fixture
def here(tmp_path: Path) -> World:
    return world(tmp_path, queues(research={"A100": 8}))


@pytest.fixture
def plugin(here: World) -> Iterator[PluginServer]:
    with PluginServer(here.core, "a-secret-token") as running:
        yield running


class Bench:
    """A server whose calls hold 60 of 100 bytes of their tenant, and of 200 in all, until ``go_on``."""

    def __init__(self) -> None:
        self.budget = BodyBudget(100, 100, 200)
        self.go_on = threading.Event()
        self.entered: list[str] = []
        self.server = AppServer(Starlette(routes=[Route("/", self._answer, methods=["POST"])]))

    async def _answer(self, request: Request) -> Response:
        tenant = request.headers["tenant"]
        try:
            async with self.budget.read_body(request, tenant) as body:
                self.entered.append(tenant)
                while not self.go_on.is_set():
                    await asyncio.sleep(0.01)
                return PlainTextResponse(str(len(body)))
        except StoreError as error:
            return PlainTextResponse(str(error), 503)
        except UsageError as error:
            return PlainTextResponse(str(error), 400)

    def call(self, tenant: str, length: int = 60) -> tuple[int, str]:
        response = http.post(self.server.url, content=b"x" * length, headers={"tenant": tenant})
        return response.status_code, response.text

    def waiting(self, tenant: str) -> int:
        return len(self.budget._waiting.get(tenant, ()))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(http_server, "_BUDGET_WAIT_SECONDS", PATIENCE_SECONDS)
    bench = Bench()
    with bench.server:
        yield bench
        bench.go_on.set()


def test_bodies_beyond_the_share_of_a_tenant_wait_and_others_are_taken(bench: Bench) -> None:
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(bench.call, "ml") for _ in range(3)]
        until(lambda: bench.entered == ["ml"] and bench.waiting("ml") == 2, seconds=120)
        calls += [pool.submit(bench.call, "vision"), pool.submit(bench.call, "f.eins")]
        until(lambda: sorted(bench.entered) == ["f.eins", "ml", "vision"], seconds=120)
        calls.append(pool.submit(bench.call, "fourth"))  # 180 of all 200 bytes are taken
        until(lambda: bench.waiting("fourth") == 1, seconds=120)
        bench.go_on.set()
        assert [call.result() for call in calls] == [(200, "60")] * 6
    assert (bench.budget._in_flight.total(), bench.budget._waiting) == (0, {})


def test_body_without_room_is_answered_with_a_later_call(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_BUDGET_WAIT_SECONDS", 0.05)
    with ThreadPoolExecutor(1) as pool:
        holds = pool.submit(bench.call, "ml")
        until(lambda: bench.entered, seconds=120)
        assert bench.call("ml") == (503, "too many bytes of calls are being answered; call again")
        assert bench.call("ml", 101)[0] == 400  # it never has room, and does not wait
        bench.go_on.set()
        assert holds.result() == (200, "60")
    assert bench.call("ml") == (200, "60")


def test_small_call_does_not_overtake_a_large_one_of_its_tenant(bench: Bench) -> None:
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(bench.call, "ml")]
        until(lambda: bench.entered == ["ml"], seconds=120)
        for place, length in enumerate([90, 30, 1], start=1):
            calls.append(pool.submit(bench.call, "ml", length))
            until(lambda place=place: bench.waiting("ml") == place, seconds=120)
        assert bench.call("ml", 101)[0] == 400  # it is refused unread, without waiting
        calls.append(pool.submit(bench.call, "m", 30))
        until(lambda: bench.entered == ["ml", "m"], seconds=120)
        bench.go_on.set()
        assert [call.result() for call in calls] == [(200, str(length)) for length in (60, 90, 30, 1, 30)]
    assert (bench.budget._in_flight.total(), bench.budget._waiting) == (0, {})


def test_room_is_granted_once_and_goes_on_from_a_call_that_left() -> None:
    asyncio.run(_calls_that_come_and_go())


async def _calls_that_come_and_go() -> None:
    budget, doors = BodyBudget(100, 100, 200), [asyncio.Event() for _ in range(5)]
    entered: list[int] = []

    async def call(number: int, length: int) -> None:
        async def receive() -> Any:
            return {"type": "http.request", "body": b"x" * length, "more_body": False}

        scope = {"type": "http", "headers": [(b"content-length", str(length).encode())]}
        async with budget.read_body(Request(scope, receive), "ml"):
            entered.append(number)
            await doors[number].wait()

    async def others_go_on() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(call(number, length)) for number, length in enumerate([60, 60, 60, 90, 30])]
    await others_go_on()
    assert entered == [0]
    doors[0].set()
    await others_go_on()
    assert entered == [0, 1]
    tasks[2].cancel()
    doors[1].set()
    await others_go_on()
    assert entered == [0, 1, 3]
    doors[3].set()
    await asyncio.sleep(0)  # the room of the last call is granted; it leaves before it takes it, or while it has it
    tasks[4].cancel()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await asyncio.gather(*tasks, return_exceptions=True)
    assert (budget._in_flight.total(), budget._waiting) == (0, {})


def test_few_wait_for_room(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_MAX_BUDGET_WAITERS", 1)
    with ThreadPoolExecutor(2) as pool:
        holds = [pool.submit(bench.call, "ml") for _ in range(2)]
        until(lambda: bench.waiting("ml") == 1, seconds=120)
        assert bench.call("ml")[0] == 503
        bench.go_on.set()
        assert [call.result() for call in holds] == [(200, "60")] * 2


def test_body_in_chunks_is_refused_unread(plugin: PluginServer) -> None:
    with closing(dial(plugin.url)) as caller:
        head = request_head(EXECUTE_PATH, "Transfer-Encoding: chunked", "Authorization: Bearer a-secret-token")
        caller.sendall(head + b"1\r\n \r\n" * 1000)
        answer = read_to_end(caller)
    assert answer.startswith(b"HTTP/1.1 411 ")
    assert b"send it with a Content-Length" in answer


def test_pieces_of_a_body_that_drips_are_collected(plugin: PluginServer, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[int] = []
    original = LimitedConnection.data_received

    def data_received(self: LimitedConnection, data: bytes) -> None:
        pieces.append(len(data))
        original(self, data)

    monkeypatch.setattr(LimitedConnection, "data_received", data_received)
    with closing(dial(plugin.url)) as caller:
        caller.setsockopt(6, 1, 1)  # TCP_NODELAY: each byte is a packet
        begin = time.monotonic()
        caller.sendall(request_head(EXECUTE_PATH, "Content-Length: 3000", "Authorization: Bearer a-secret-token"))
        for _ in range(3000):
            caller.sendall(b" ")
        assert caller.recv(4096).startswith(b"HTTP/1.1 400 ")
    assert sum(pieces) >= 3000
    assert len(pieces) <= 10 + (time.monotonic() - begin) / 0.01


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[" + b"[]," * 60_000 + b"[]]", "more than 50000 values"),
        (b'{"a": [' + b"1," * 60_000 + b"1]}", "more than 50000 values"),
        (b"[" * 1500 + b"]" * 1500, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "out of range"),
        (b'{"a": "\\ud800"}', "not JSON"),
    ],
    ids=["lists", "numbers", "deep", "digits", "surrogate"],
)
def test_body_that_costs_much_is_a_bad_request(plugin: PluginServer, body: bytes, message: str) -> None:
    response = http.post(f"{plugin.url}{EXECUTE_PATH}", content=body, headers=KNOWN)
    assert response.status_code == 400
    assert message in response.json()["error"]


def test_body_that_is_too_large_is_refused_unread(plugin: PluginServer) -> None:
    response = http.post(f"{plugin.url}{EXECUTE_PATH}", content=b" " * (MAX_BODY_BYTES + 1), headers=KNOWN)
    assert response.status_code == 413


def test_workflow_that_names_one_run_after_the_other_is_refused(here: World) -> None:
    flow = here.submit(prep())
    flow.run = "first.run"
    assert phase(flow.admit("prep")) == "Succeeded"
    for number in range(5):
        flow.run = f"other-{number}"
        answer = flow.admit("prep")
        assert (phase(answer), "acts for run first.run" in said(answer)) == ("Failed", True)
    runs = {info.key.split("/")[2] for info in here.store.list("control/runs/")}
    assert runs == {"first.run"}
    assert len(here.core._bindings) == 1


def test_kept_workflows_are_bounded_in_bytes(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "_MAX_BINDING_BYTES", 300_000)
    monkeypatch.setattr(here.core, "_bindings", LRUCache(300_000, core._measure_binding))
    flows = [here.submit(prep(), name=f"digits-{number}.x", uid=f"uid-{number}") for number in range(8)]
    for flow in flows:
        manifest: dict[str, Any] = here.cluster.workflow("ml", flow.name) or {}
        manifest["spec"]["note"] = "x" * 100_000
        here.cluster.write_workflow(manifest)
        assert phase(flow.admit("prep")) == "Succeeded"
    kept = [binding.uid for binding in here.core._bindings.values()]
    assert kept == ["uid-6", "uid-7"]
    assert phase(flows[0].conclude("prep", status="Failed")) == "Failed"  # it is read again
    assert len(here.core._bindings) <= 2
