"""Callers that do to an HTTP server what no library does: half a request, many connections, an answer never read."""

import select
import socket
from urllib.parse import urlsplit

from support.processes.polling import until

PATIENCE_SECONDS = 120.0


def dial(url: str, receive_buffer: int = 0) -> socket.socket:
    """A connection to a server; ``receive_buffer`` bytes wait here at most (0: as the system likes)."""
    connection = socket.socket()
    connection.settimeout(PATIENCE_SECONDS)
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    parts = urlsplit(url)
    connection.connect((parts.hostname, parts.port))
    return connection


def request_head(path: str, *headers: str, method: str = "POST") -> bytes:
    """The lines before a body."""
    return "\r\n".join((f"{method} {path} HTTP/1.1", "Host: test", *headers, "", "")).encode()


def read_to_end(connection: socket.socket) -> bytes:
    """What the server sends until it ends the connection; fails if it does not end it."""
    received = b""
    try:
        while piece := connection.recv(65536):
            received += piece
    except ConnectionResetError:
        pass
    return received


def wait_for_hangup(connection: socket.socket) -> bool:
    """Whether the server ends the connection although nothing is read from it."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(PATIENCE_SECONDS * 1000))


def is_open(connection: socket.socket) -> bool:
    """Whether the server has neither sent anything nor ended the connection so far."""
    poll = select.poll()
    poll.register(connection, select.POLLIN | select.POLLRDHUP)
    return not poll.poll(0)


def drip_until_ended(connection: socket.socket) -> None:
    """Send a byte now and then until the server ends the connection."""

    def is_ended() -> bool:
        try:
            connection.sendall(b"X")
        except OSError:
            return True
        return not is_open(connection)

    until(is_ended, seconds=PATIENCE_SECONDS)


def send_until_reset(connection: socket.socket, data: bytes) -> None:
    """Send ``data`` again and again until the server takes no more."""

    def is_reset() -> bool:
        try:
            connection.sendall(data)
        except OSError:
            return True
        return False

    until(is_reset, seconds=PATIENCE_SECONDS)
