"""The slow network: what it lets through in a given time, by a clock that moves only when the network waits."""

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable

import pytest
from support.servers.throttle import Pace, ThrottledProxy, TokenBucket
from support.servers.throttle_process import throttled

MB = 1_000_000


class VirtualTime:
    """Clock and sleep that belong together: time passes for whoever sleeps longest, and takes none."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        wake = self.now + seconds
        await asyncio.sleep(0)
        self.now = max(self.now, wake)


def test_bytes_take_what_the_rate_says():
    bucket = TokenBucket(10 * MB, burst_seconds=0)
    now = 5.0
    for _ in range(100):
        now += bucket.take(MB // 10, now)
    assert now == pytest.approx(6.0)


def test_a_pause_is_made_up_for_by_one_burst_only():
    bucket = TokenBucket(10 * MB, burst_seconds=0.1)
    bucket.take(MB, 0.0)
    assert bucket.take(MB, 100.0) == 0.0
    assert bucket.take(MB, 100.0) == pytest.approx(0.1)


def test_requests_at_the_same_time_share_the_rate():
    bucket = TokenBucket(10 * MB, burst_seconds=0)
    assert [bucket.take(MB, 0.0) for _ in range(4)] == pytest.approx([0.1, 0.2, 0.3, 0.4])


def through(pace: Pace, talk: Callable[[int], Awaitable[None]], serve: Callable[..., Awaitable[None]]) -> float:
    """Virtual seconds of a conversation with a server behind the proxy."""

    async def run() -> float:
        clock = VirtualTime()
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        proxy = ThrottledProxy("127.0.0.1", server.sockets[0].getsockname()[1], pace, clock, clock.sleep)
        front = await proxy.start()
        async with server, front:
            await talk(front.sockets[0].getsockname()[1])
            # Whoever still has a connection open must close it before the loop ends.
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
        return clock.now

    return asyncio.run(run())


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()


async def count_and_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the number of bytes, once all have come."""
    size = 0
    while chunk := await reader.read(1 << 20):
        size += len(chunk)
    writer.write(size.to_bytes(8))
    await closed(writer)


async def send_much(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readexactly(1)
    writer.write(bytes(2 * MB))
    await closed(writer)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while word := await reader.read(100):
        writer.write(word)
    await closed(writer)


@pytest.mark.parametrize("connections", [1, 3])
def test_uploads_together_go_at_the_given_pace(connections: int):
    async def upload(port: int) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(bytes(6 * MB // connections))
        writer.write_eof()
        size = int.from_bytes(await reader.readexactly(8))
        await closed(writer)
        return size

    async def talk(port: int) -> None:
        assert sum(await asyncio.gather(*(upload(port) for _ in range(connections)))) == 6 * MB

    took = through(Pace(up_bytes_per_second=10 * MB), talk, count_and_answer)
    assert took == pytest.approx(0.6, rel=0.05)


def test_downloads_have_a_pace_of_their_own():
    async def talk(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"!")
        assert len(await reader.read(-1)) == 2 * MB
        await closed(writer)

    took = through(Pace(up_bytes_per_second=1.0 * MB, down_bytes_per_second=4 * MB), talk, send_much)
    assert took == pytest.approx(0.5, rel=0.05)


def test_a_turn_costs_one_latency():
    async def talk(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(5):
            writer.write(b"ping")
            assert await reader.readexactly(4) == b"ping"
        await closed(writer)

    assert through(Pace(latency_seconds=0.02), talk, echo) == pytest.approx(0.1)


def test_the_process_passes_every_byte_on_and_ends():
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            while word := connection.recv(4096):
                connection.sendall(word)

    thread = threading.Thread(target=serve)
    thread.start()
    sent = bytes(range(256)) * 16
    with (
        throttled(f"http://127.0.0.1:{server.getsockname()[1]}", Pace(100 * MB, 100 * MB, 0.001)) as url,
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60) as near,
    ):
        near.sendall(sent)
        near.shutdown(socket.SHUT_WR)
        assert b"".join(iter(lambda: near.recv(4096), b"")) == sent
    thread.join(60)
    server.close()
