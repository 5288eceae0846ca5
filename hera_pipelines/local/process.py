"""Starts the process of an attempt, and ends it: SIGTERM, grace, SIGKILL."""

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hera_pipelines.local import launch
from tiphys.errors import UsageError


@dataclass(frozen=True)
class Command:
    """What to run, and where."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    log: Path
    """Receives what the program writes to standard error, and to standard output unless ``stdout`` is set."""
    stdout: Path | None = None


class Process:
    """A running program with its process group."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, command: Command) -> "Process":
        """Start ``command`` as leader of its own session.

        Raises:
            UsageError: its arguments or variables are more than the system takes, or hold a NUL byte.
            OSError: the log cannot be written.
        """
        command.log.parent.mkdir(parents=True, exist_ok=True)
        with command.log.open("ab") as log, (command.stdout or command.log).open("ab") as stdout:
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", str(launch.__file__), str(os.getpid()), *command.arguments),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=log,
                    cwd=command.folder,
                    env=dict(command.environment),
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                raise UsageError(f"cannot start {command.arguments[0]!r}: {error}") from error
        return cls(process)

    async def wait(self) -> int:
        """The exit code as a container would have it: 128+n after signal n."""
        code = await self._process.wait()
        self._signal(signal.SIGKILL)  # what the program left behind ends with it, as in a container
        return code if code >= 0 else 128 - code

    async def end(self, grace_seconds: float, hurry: Coroutine[None, None, None]) -> int:
        """Ask the program to end; kill it once the grace period is over, or ``hurry`` returns. Its exit code."""
        self._signal(signal.SIGTERM)
        waits = {asyncio.ensure_future(self.wait()), asyncio.ensure_future(hurry)}
        try:
            await asyncio.wait(waits, timeout=grace_seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in waits:
                waiting.cancel()
            self.kill()
        return await self.wait()

    def kill(self) -> None:
        """SIGKILL to the whole group."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):  # the last member of the group is gone
            return
