"""Starts the process of an attempt, and ends it: SIGTERM, grace, SIGKILL.

What a process sees of this machine: little, so that a pipeline that runs here runs in its image too.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hera_pipelines.compile.gang.member_pod import MEMBER
from hera_pipelines.local.pods import init_process as launch
from tiphys.errors import UsageError
from tiphys.protocol import environment as variables


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


_INTERPRETERS = ("python", "python3")
_INHERITED = ("PATH", "HOME", "LANG", "TZ", "LD_LIBRARY_PATH", "SSL_CERT_FILE")
_INHERITED_PREFIXES = ("AWS_", "TIPHYS_FAILPOINTS", "CUDA_", "NVIDIA_", "OMP_", "COVERAGE_")


def _started(arguments: Sequence[str]) -> list[str]:
    first, *rest = arguments
    return [sys.executable if first in _INTERPRETERS else first, *rest]


@dataclass(frozen=True)
class Surroundings:
    """The same for every process of an engine."""

    code: Path
    """Folder of the pipeline file: its modules can be imported."""
    store_url: str
    longest_grace_seconds: float | None = None
    """Grace periods are cut to this, if set."""

    def command(self, arguments: Sequence[str]) -> list[str]:
        """``python`` is the interpreter that Tiphys runs in; so it is below the one that fetches and stores files."""
        if tuple(arguments[: len(MEMBER)]) == MEMBER:
            return [*_started(MEMBER), *_started(arguments[len(MEMBER) :])]
        return _started(arguments)

    def environment(self, declared: Mapping[str, str]) -> dict[str, str]:
        """The variables of the template, on top of the few that are inherited.

        A pipeline may name a store that only the cluster reaches; its programs
        get the one that this engine works with. Checkpoints on a volume of
        their own stay there.
        """
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name in _INHERITED or name.startswith(_INHERITED_PREFIXES)
        }
        found = os.pathsep.join(filter(None, (str(self.code), os.environ.get("PYTHONPATH"))))
        named = declared.get(variables.STORE)
        store = {
            name: self.store_url
            for name in (variables.STORE, variables.CHECKPOINT_STORE)
            if declared.get(name) == named
        }
        return {**inherited, "PYTHONPATH": found, "PYTHONUNBUFFERED": "1", **declared, **(store if named else {})}

    def furnish(self, folder: Path) -> None:
        """Make ``folder`` look like the working directory of an image that holds the code.

        ``python train.py`` finds the file, and what the program writes stays in
        its own folder: parallel attempts do not meet.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for entry in self.code.iterdir():
            link = folder / entry.name
            if not entry.name.startswith(".") and not link.exists():
                link.symlink_to(entry)

    def grace_seconds(self, asked: float) -> float:
        """The grace period that a process gets."""
        return asked if self.longest_grace_seconds is None else min(asked, self.longest_grace_seconds)
