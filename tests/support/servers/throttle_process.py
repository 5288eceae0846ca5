"""The slow network as a process, so that its work is not that of the program whose speed is measured.

``python -m support.servers.throttle_process HOST PORT UP DOWN LATENCY`` prints its port; it ends with its input.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from support.servers.throttle import Pace, ThrottledProxy


@contextmanager
def throttled(endpoint: str, pace: Pace, nice: int = 0) -> Iterator[str]:
    """Run the proxy before the server at ``endpoint``, ``nice`` to other processes; gives its URL."""
    server = urlsplit(endpoint)
    numbers = (pace.up_bytes_per_second or 0, pace.down_bytes_per_second or 0, pace.latency_seconds)
    where = (server.hostname or "127.0.0.1", str(server.port))
    command = ["nice", f"-n{nice}", sys.executable, "-m", __name__, *where, *map(str, numbers)]
    tests = Path(__file__).parents[2]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tests) as process:
        assert process.stdout
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"


async def _serve(proxy: ThrottledProxy) -> None:
    server = await proxy.start()
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)  # connections that are still open need no farewell


def main(host: str, port: str, up: str, down: str, latency: str) -> None:
    pace = Pace(float(up) or None, float(down) or None, float(latency))
    asyncio.run(_serve(ThrottledProxy(host, int(port), pace)))


if __name__ == "__main__":
    main(*sys.argv[1:])
