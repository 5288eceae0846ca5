"""Programs in processes of their own, without the import of libraries each time: one process has them and forks.

A forked program is killed, exits and flushes its streams as any other, and imports for itself what was not loaded.
"""

import io
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Self

_LONGEST_MESSAGE = 1 << 20
_PATIENCE_SECONDS = 240.0
COMMAND = "import runpy; runpy.run_module('hera_pipelines.cli', run_name='__main__', alter_sys=True)"
"""The program of ``python -m hera_pipelines.cli``."""


class ForkingProcess:
    """A process that has imported ``modules``; use it in a ``with`` block."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules

    def __enter__(self) -> Self:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(_PATIENCE_SECONDS)
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with theirs:
            command = [sys.executable, "-m", "support.forking", *self._modules]
            self._process = subprocess.Popen(command, env=environ, stdin=theirs)
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.wait(60)

    def run(
        self,
        program: str,
        arguments: Sequence[str] = (),
        *,
        cwd: Path | None = None,
        environ: Mapping[str, str] | None = None,
        stdout: int | None = None,
        buffered: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``program``, a text, as ``python -c`` does, to its end.

        Args:
            stdout: Descriptor in the place of the output of the result.
            buffered: False: as with ``PYTHONUNBUFFERED``.
        """
        job = {
            "program": program,
            "arguments": [*arguments],
            "cwd": str(cwd or Path.cwd()),
            "environ": {**os.environ} if environ is None else {**environ},
            "buffered": buffered,
        }
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            streams = [out.fileno() if stdout is None else stdout, err.fileno()]
            socket.send_fds(self._connection, [json.dumps(job).encode()], streams)
            code = int(self._connection.recv(_LONGEST_MESSAGE))
            return subprocess.CompletedProcess([program, *arguments], code, _text(out), _text(err))


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _next_program(connection: socket.socket) -> str | None:
    """In a forked process its program; in the process that forks None, when there are no more."""
    while True:
        message, streams, _, _ = socket.recv_fds(connection, _LONGEST_MESSAGE, 2)
        if not message:
            return None
        if (pid := os.fork()) == 0:
            return _become(json.loads(message), streams)
        for stream in streams:
            os.close(stream)
        _, status = os.waitpid(pid, 0)
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def _become(job: dict[str, Any], streams: Sequence[int]) -> str:
    os.environ.clear()
    os.environ.update(job["environ"])
    os.chdir(job["cwd"])
    sys.path[0], sys.argv = job["cwd"], ["-c", *job["arguments"]]
    for number, stream in zip((0, 1, 2), (os.open(os.devnull, os.O_RDONLY), *streams), strict=True):
        os.dup2(stream, number)
        os.close(stream)
    raw = os.fdopen(1, "wb", buffering=-1 if job["buffered"] else 0, closefd=False)
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(raw, write_through=not job["buffered"])  # type: ignore[misc]
    return str(job["program"])


def main() -> None:
    for module in sys.argv[1:]:
        import_module(module)
    with closing(socket.socket(fileno=os.dup(0))) as connection:
        program = _next_program(connection)
    if program:
        exec(program, {"__name__": "__main__"})


if __name__ == "__main__":
    main()
