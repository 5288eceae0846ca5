"""Starts and ends the process of an attempt, in a restricted environment.

The process inherits few variables of this machine, so that a pipeline that runs
here also runs in its image. It is ended with SIGTERM, a grace period and SIGKILL.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hera_pipelines.compile.container import TRACKING_COMMAND
from hera_pipelines.compile.gang.member_pod import MEMBER_COMMAND
from hera_pipelines.local.pods import init_process
from tiphys.errors import UsageError
from tiphys.protocol import environment


@dataclass(frozen=True)
class ProcessCommand:
    """A program to start: its arguments, environment, working folder and log."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    log: Path
    """Receives the standard error of the program, and its standard output unless ``stdout`` is set."""
    stdout: Path | None = None
    mounts: Path | None = None
    """Plan of the mounts that give the program its paths; None leaves it in the namespace of the engine."""


class PodProcess:
    """A running program with its process group."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, command: ProcessCommand) -> "PodProcess":
        """Start ``command`` as leader of its own session.

        Raises:
            UsageError: the arguments or variables are too long for the system, or contain a NUL byte.
            OSError: the log cannot be written.
        """
        command.log.parent.mkdir(parents=True, exist_ok=True)
        init = (str(init_process.__file__), str(os.getpid()), str(command.mounts or ""))
        with command.log.open("ab") as log, (command.stdout or command.log).open("ab") as stdout:
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", *init, *command.arguments),
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
        """Wait for the end; return the exit code as a container reports it: 128+n after signal n."""
        code = await self._process.wait()
        self._signal(signal.SIGKILL)  # remaining processes of the program end with it, as in a container
        return code if code >= 0 else 128 - code

    async def terminate(self, grace_seconds: float, kill_early: Coroutine[None, None, None]) -> int:
        """Send SIGTERM, and SIGKILL when the grace period is over or ``kill_early`` returns; return the exit code."""
        self._signal(signal.SIGTERM)
        waits = {asyncio.ensure_future(self.wait()), asyncio.ensure_future(kill_early)}
        try:
            await asyncio.wait(waits, timeout=grace_seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiter in waits:
                waiter.cancel()
            self.kill()
        return await self.wait()

    def kill(self) -> None:
        """Send SIGKILL to the whole process group."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):  # the last member of the group is gone
            return


_INTERPRETERS = ("python", "python3")
_INHERITED_VARIABLES = (
    *("PATH", "HOME", "LANG", "TZ", "LD_LIBRARY_PATH", "SSL_CERT_FILE"),
    *("TRACEPARENT", "TRACESTATE"),  # Argo sets them in a pod
)
_INHERITED_PREFIXES = (
    *("AWS_", "GOOGLE_", "CLOUDSDK_", "AZURE_", "STORAGE_EMULATOR_HOST"),
    *("TIPHYS_FAILPOINTS", "CUDA_", "NVIDIA_", "OMP_", "COVERAGE_"),
    *("MLFLOW_TRACKING_", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE"),  # in a cluster, from a Secret
)
_WRAPPERS = (MEMBER_COMMAND, TRACKING_COMMAND)


def _replace_interpreter(arguments: Sequence[str]) -> list[str]:
    first, *rest = arguments
    return [sys.executable if first in _INTERPRETERS else first, *rest]


@dataclass(frozen=True)
class ProcessEnvironment:
    """The environment that all processes of an engine share."""

    code: Path
    """Folder whose modules the programs can import, normally that of the pipeline file."""
    store_url: str
    longest_grace_seconds: float | None = None
    """Upper limit of grace periods; None sets no limit."""

    def build_command(self, arguments: Sequence[str]) -> list[str]:
        """Replace ``python`` by the interpreter that runs Tiphys, also behind the wrappers that compile adds."""
        for wrapper in _WRAPPERS:
            if tuple(arguments[: len(wrapper)]) == wrapper:
                return [*_replace_interpreter(wrapper), *self.build_command(arguments[len(wrapper) :])]
        return _replace_interpreter(arguments)

    def build_environment(self, declared: Mapping[str, str]) -> dict[str, str]:
        """Merge the variables of the template over the few inherited ones.

        A pipeline may name a store that only the cluster can reach; its programs
        use the engine's store instead. Checkpoints on a volume stay there.
        """
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name in _INHERITED_VARIABLES or name.startswith(_INHERITED_PREFIXES)
        }
        python_path = os.pathsep.join(filter(None, (str(self.code), os.environ.get("PYTHONPATH"))))
        pipeline_store = declared.get(environment.STORE)
        store = {
            name: self.store_url
            for name in (environment.STORE, environment.CHECKPOINT_STORE)
            if declared.get(name) == pipeline_store
        }
        return {
            **inherited,
            "PYTHONPATH": python_path,
            "PYTHONUNBUFFERED": "1",
            **declared,
            **(store if pipeline_store else {}),
        }

    def prepare_working_folder(self, folder: Path) -> None:
        """Fill ``folder`` with links to the code, like the working directory of an image.

        ``python train.py`` finds the file, and the program writes into its own
        folder, so that parallel attempts do not interfere.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for entry in self.code.iterdir():
            link = folder / entry.name
            if not entry.name.startswith(".") and not link.exists():
                link.symlink_to(entry)

    def grace_seconds(self, requested_seconds: float) -> float:
        """Grace period of a process in seconds: the requested one, up to the limit."""
        return (
            requested_seconds
            if self.longest_grace_seconds is None
            else min(requested_seconds, self.longest_grace_seconds)
        )
