"""Programs in processes of their own, without the import of libraries each time: one process has them and forks.

A forked program is killed, exits and flushes its streams as any other, and imports for itself what was not loaded.
"""

import gc
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Self

_LONGEST_MESSAGE = 1 << 20
_PATIENCE_SECONDS = 240.0
_NUMBER_BYTES = 10
COMMAND = "import runpy; runpy.run_module('hera_pipelines.cli', run_name='__main__', alter_sys=True)"
"""The program of ``python -m hera_pipelines.cli``."""


class ForkedProcess:
    """A program that a `ForkingProcess` has started, as `subprocess.Popen` in text mode has one, and without input."""

    def __init__(
        self, arguments: Sequence[str], status: IO[bytes], stdout: IO[str] | None = None, stderr: IO[str] | None = None
    ) -> None:
        self.args, self._status, self.stdout, self.stderr = arguments, status, stdout, stderr
        self.returncode: int | None = None
        self.pid = self._next_number(_PATIENCE_SECONDS)

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None as long as it runs."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended."""
        if self.returncode is None:
            self.returncode = self._next_number(timeout)
            self._status.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that it writes until it ends."""
        texts = ["", ""]

        def read(number: int, stream: IO[str]) -> None:
            texts[number] = stream.read()

        streams = [(number, stream) for number, stream in enumerate((self.stdout, self.stderr)) if stream]
        readers = [threading.Thread(target=read, args=one, daemon=True) for one in streams if not one[1].closed]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0)
        self.wait(timeout)
        self._close()
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended just now
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self.wait()

    def _close(self) -> None:
        for stream in (self.stdout, self.stderr):
            if stream:
                stream.close()

    def _next_number(self, timeout: float | None) -> int:
        if not select.select([self._status], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0)
        number = self._status.read(_NUMBER_BYTES)
        assert number, "the process that forks has ended"
        return int(number)


class ForkingProcess:
    """A process that has imported ``modules``; use it in a ``with`` block."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules

    def __enter__(self) -> Self:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with theirs:
            command = [sys.executable, "-m", "support.processes.forking", *self._modules]
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
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            streams = out.fileno() if stdout is None else stdout, err.fileno()
            words = [program, *arguments]
            status = self._fork(words, streams, cwd=cwd, environ=environ, buffered=buffered)
            code = ForkedProcess(words, status).wait(_PATIENCE_SECONDS)
            return subprocess.CompletedProcess(words, code, _text(out), _text(err))

    def start(
        self,
        program: str,
        arguments: Sequence[str] = (),
        *,
        cwd: Path | None = None,
        environ: Mapping[str, str] | None = None,
        stderr: int | None = None,
        new_session: bool = False,
    ) -> ForkedProcess:
        """Start ``program``, a text, as ``python -c`` does.

        Args:
            stderr: Descriptor in the place of the pipe of the result.
            new_session: Whether it leads a session, and a group of processes.
        """
        (out, their_out), (err, their_err) = os.pipe(), os.pipe()
        words = [program, *arguments]
        streams = their_out, their_err if stderr is None else stderr
        status = self._fork(words, streams, cwd=cwd, environ=environ, new_session=new_session)
        os.close(their_out)
        os.close(their_err)
        return ForkedProcess(words, status, os.fdopen(out), os.fdopen(err))

    def _fork(
        self,
        words: Sequence[str],
        streams: tuple[int, int],
        *,
        cwd: Path | None,
        environ: Mapping[str, str] | None,
        buffered: bool = True,
        new_session: bool = False,
    ) -> IO[bytes]:
        job = {
            "program": words[0],
            "arguments": words[1:],
            "cwd": str(cwd or Path.cwd()),
            "environ": {**os.environ} if environ is None else {**environ},
            "buffered": buffered,
            "new_session": new_session,
        }
        status, their_status = os.pipe()
        socket.send_fds(self._connection, [json.dumps(job).encode()], [*streams, their_status])
        os.close(their_status)
        return os.fdopen(status, "rb", buffering=0)


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _next_program(connection: socket.socket) -> str | None:
    """In a forked process its program; in the process that forks None, when there are no more."""
    running: dict[int, tuple[int, int]] = {}
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in running:
                pid, status = running.pop(descriptor)
                poll.unregister(descriptor)
                os.close(descriptor)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                _write(status, code)
                os.close(status)
                continue
            message, streams, _, _ = socket.recv_fds(connection, _LONGEST_MESSAGE, 3)
            if not message:
                return None
            *streams, status = streams
            if (pid := os.fork()) == 0:
                for pidfd, (_, other) in running.items():
                    os.close(pidfd)
                    os.close(other)
                connection.close()
                return _become(json.loads(message), streams, status)
            for stream in streams:
                os.close(stream)
            pidfd = os.pidfd_open(pid)
            poll.register(pidfd, select.POLLIN)
            running[pidfd] = pid, status


def _write(status: int, number: int) -> None:
    try:
        os.write(status, f"{number:{_NUMBER_BYTES}}".encode())
    except BrokenPipeError:  # the test has ended, and no longer asks
        return


def _become(job: dict[str, Any], streams: Sequence[int], status: int) -> str:
    os.environ.clear()
    os.environ.update(job["environ"])
    os.chdir(job["cwd"])
    sys.path[0], sys.argv = job["cwd"], ["-c", *job["arguments"]]
    if job["new_session"]:
        os.setsid()
    for number, stream in zip((0, 1, 2), (os.open(os.devnull, os.O_RDONLY), *streams), strict=True):
        os.dup2(stream, number)
        os.close(stream)
    raw = os.fdopen(1, "wb", buffering=-1 if job["buffered"] else 0, closefd=False)
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(raw, write_through=not job["buffered"])  # type: ignore[misc]
    _write(status, os.getpid())
    os.close(status)
    return str(job["program"])


def main() -> None:
    for module in sys.argv[1:]:
        import_module(module)
    gc.freeze()
    os.fsync = lambda descriptor: None  # as in the process of the tests
    with closing(socket.socket(fileno=os.dup(0))) as connection:
        program = _next_program(connection)
    if program:
        exec(program, {"__name__": "__main__"})


if __name__ == "__main__":
    main()
