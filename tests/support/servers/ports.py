"""Ports for servers that have to be told theirs before they start."""

import os
import socket
from contextlib import suppress


def free_ports(count: int) -> list[int]:
    """Ports of the loopback device below those that the kernel hands out, so that nobody is given one meanwhile.

    Each process begins its search in ten of its own.
    """
    found: list[int] = []
    for port in range(10_000 + 10 * (os.getpid() % 2_000), 32_000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError(f"there are no {count} free ports")
