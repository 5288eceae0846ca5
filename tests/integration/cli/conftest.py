"""The command as a person meets it: a process with arguments, two streams and an exit code."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest
from support.processes.forking import COMMAND, ForkedProcess, ForkingProcess
from support.servers.kube_server import KubeServer, serving, write_kubeconfig
from support.stories import small_pipeline

from hera_pipelines.cli import main
from hera_pipelines.cli.app import COMMANDS
from tiphys.kube import KubeApi


@dataclass(frozen=True)
class Answer:
    """What one invocation left behind."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that says what went wrong; fails if there is not exactly one."""
        [line] = [line for line in self.err.splitlines() if line.startswith("tiphys: ")]
        return line


Command = Callable[..., Answer]


_forking: list[ForkingProcess] = []


@pytest.fixture(scope="session", autouse=True)
def engine_loaded() -> Iterator[ForkingProcess]:
    """Lets `begin` and `invoke` fork processes that have imported an engine and all commands; forks others, too."""
    libraries = ("hera.workflows", "uvicorn", "starlette.applications", "rich.live", "yaml")
    commands = {f"hera_pipelines.{command.module}" for command in COMMANDS.values()}
    with ForkingProcess(
        *libraries,
        *sorted(commands),
        "hera_pipelines.authoring.pipeline",
        "hera_pipelines.local.run_session",
        "tiphys_controller",
        "tiphys_plugin.server.app",
    ) as process:
        _forking.append(process)
        yield process
        _forking.clear()


def begin(arguments: Sequence[str | Path], cwd: Path, stderr: IO[str] | None = None) -> ForkedProcess:
    """Start the command in a process of its own, with pipes for what it writes."""
    descriptor = None if stderr is None else stderr.fileno()
    return _forking[0].start(COMMAND, [*map(str, arguments)], cwd=cwd, environ=_environment(), stderr=descriptor)


def invoke(arguments: Sequence[str | Path], cwd: Path, preexec_fn: Callable[[], None] | None = None) -> Answer:
    """Run the command in a process of its own, to its end; ``preexec_fn`` is that of `subprocess.Popen`."""
    if preexec_fn is None:
        done = _forking[0].run(COMMAND, [*map(str, arguments)], cwd=cwd, environ=_environment())
    else:
        line = [sys.executable, "-m", "hera_pipelines.cli", *map(str, arguments)]
        done = subprocess.run(
            line,
            cwd=cwd,
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            preexec_fn=preexec_fn,
        )
    return Answer(done.returncode, done.stdout, done.stderr)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("TIPHYS_")}


@pytest.fixture
def server() -> Iterator[KubeServer]:
    with serving() as found:
        yield found


@pytest.fixture
def api(server: KubeServer) -> KubeApi:
    return server.api("ml")


@pytest.fixture
def kubeconfig(server: KubeServer, tmp_path: Path) -> Path:
    return write_kubeconfig(tmp_path, server.url)


@pytest.fixture
def tiphys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command within this process, which is much faster, in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    argo = ("ARGO_SERVER", "ARGO_TOKEN", "ARGO_SECURE", "ARGO_BASE_HREF", "ARGO_NAMESPACE")
    for name in ("TIPHYS_STORE", *argo):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: str | Path) -> Answer:
        code = main([str(argument) for argument in arguments])
        return Answer(code, *capsys.readouterr())

    return call


@dataclass(frozen=True)
class Finished:
    """A store with one run that succeeded. Nobody may change it."""

    folder: Path
    answer: Answer
    run: str = "tiny-done"

    @property
    def store(self) -> Path:
        return self.folder / "store"


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("finished")
    file = small_pipeline.write(folder / "code")
    return Finished(folder, invoke(["run", file, "--run", "tiny-done", "--store", folder / "store"], folder))


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below ``folder`` and its bytes: what "storage is as it was" means."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
