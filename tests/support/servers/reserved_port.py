"""Ports for servers that cannot choose one by themselves and say it."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """A free port of 127.0.0.1 that no other program is given during the block.

    A server that is told the number can listen on it, if it sets SO_REUSEADDR as Go, Node and asyncio do: a socket that
    is bound, and does not listen, is in its way no more than one that has just been closed.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield int(reserved.getsockname()[1])
