"""The command as a person meets it: a process with arguments, two streams and an exit code."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import tiny
from support.forking import COMMAND, ForkingProcess

from hera_pipelines.cli import main


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


def begin(arguments: Sequence[str | Path], cwd: Path, **options: Any) -> subprocess.Popen[str]:
    """Start the command in a process of its own; options are those of `subprocess.Popen`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TIPHYS_")}
    line = [sys.executable, "-m", "hera_pipelines.cli", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(line, cwd=cwd, env=kept, **{**pipes, **options})


_forking: list[ForkingProcess] = []


@pytest.fixture(scope="session", autouse=True)
def libraries_loaded() -> Iterator[None]:
    """Lets `invoke` fork processes that have imported the libraries of an engine."""
    libraries = ("hera.workflows", "httpx", "uvicorn", "starlette.applications", "structlog", "rich.live", "yaml")
    with ForkingProcess(*libraries) as process:
        _forking.append(process)
        yield
        _forking.clear()


def invoke(arguments: Sequence[str | Path], cwd: Path, **options: Any) -> Answer:
    """Run the command in a process of its own, to its end; options are those of `begin`."""
    if not options:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("TIPHYS_")}
        done = _forking[0].run(COMMAND, [*map(str, arguments)], cwd=cwd, environ=environ)
        return Answer(done.returncode, done.stdout, done.stderr)
    with begin(arguments, cwd, **options) as process:
        out, err = process.communicate(timeout=120)
    return Answer(process.returncode, out, err)


@pytest.fixture
def tiphys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command within this process, which is much faster, in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    argo = ("ARGO_SERVER", "ARGO_TOKEN", "ARGO_SECURE", "ARGO_BASE_HREF", "ARGO_NAMESPACE")
    for name in ("TIPHYS_STORE", "TIPHYS_PROFILE", *argo):
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
def records_loaded() -> Iterator[ForkingProcess]:
    """Forks processes that have imported what every command reads and prints with."""
    with ForkingProcess(
        "rich.console", "rich.table", "typer.core", "yaml", "tiphys.records", "tiphys.store"
    ) as process:
        yield process


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("finished")
    file = tiny.write(folder / "code")
    return Finished(folder, invoke(["run", file, "--run", "tiny-done", "--store", folder / "store"], folder))


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below ``folder`` and its bytes: what "storage is as it was" means."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
