"""What a command imports: the start of a process is most of what a command costs.

| asked for | imports |
|---|---|
| help, version, completion of names | the table of commands: no command, no record, no Rich |
| help of one command | its module |
| a command that reads | records, storage and what it prints with |

Times are measured by `make bench-cli`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from support.processes.forking import ForkingProcess

from hera_pipelines.cli.app import COMMANDS

from .conftest import Finished

ENGINE = {"hera_pipelines.local.engine", "tiphys_plugin.core", "hera_pipelines.authoring.pipeline"}
LIBRARIES = {"hera", "numpy", "starlette", "uvicorn", "kubernetes", "boto3", "httpx", "lark", "stamina", "jinja2"}
LIBRARIES |= {
    "opentelemetry",
    "google.cloud.storage",
    "azure.core",
    "azure.storage.blob",
    "azure.identity",
}
LOGGING = {"structlog", "asyncio", "prometheus_client"}
NOT_TO_LIST_COMMANDS = {*ENGINE, *LIBRARIES, *LOGGING, "pydantic", "rich", "yaml", "botocore", "tiphys.records"}

READS = (
    ["runs"],
    ["get", "RUN"],
    ["get", "RUN", "-o", "json"],
    ["events", "RUN"],
    ["plan", "RUN"],
    ["resume", "RUN", "--dry-run"],
    ["fork", "RUN", "--dry-run"],
    ["lineage", "RUN"],
    ["report", "RUN"],
    ["verify", "RUN"],
    ["gc", "RUN", "--dry-run"],
    ["sweep", "RUN"],
    ["checkpoint", "list", "RUN"],
    ["checkpoint", "show", "RUN", "latest"],
)


PROGRAM = """
import json, sys
from hera_pipelines.cli import main
imported = []
for arguments in json.loads(sys.argv[1]):
    known = set(sys.modules) if imported else set()
    try:
        main(arguments)
    except SystemExit:
        pass
    imported.append(sorted(set(sys.modules) - known))
print('\\n' + json.dumps(imported), file=sys.__stdout__)
"""


@pytest.fixture(scope="session")
def records_loaded() -> Iterator[ForkingProcess]:
    """Forks processes that have imported what every command reads and prints with."""
    with ForkingProcess(
        "rich.console", "rich.table", "hera_pipelines.cli.app", "yaml", "tiphys.records", "tiphys.store"
    ) as process:
        yield process


def imported(*commands: list[str], process: ForkingProcess | None = None, **variables: str) -> list[set[str]]:
    """Modules that each command imported, one after the other in a new process, or in one forked from ``process``."""
    environment = {**{name: value for name, value in os.environ.items() if name != "TIPHYS_STORE"}, **variables}
    if process:
        done = process.run(PROGRAM, [json.dumps(commands)], environ=environment)
    else:
        line = [sys.executable, "-c", PROGRAM, json.dumps(commands)]
        done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert "bug in Tiphys" not in done.stderr
    return [set(modules) for modules in json.loads(done.stdout.splitlines()[-1])]


def logging_last(names: Iterable[str]) -> list[str]:
    """So that a module which logs is not blamed on a command that does not."""
    return sorted(names, key=lambda name: COMMANDS[name].logs)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]], ids=" ".join)
def test_help_imports_no_command(arguments: list[str]) -> None:
    [modules] = imported(arguments)
    assert not modules & NOT_TO_LIST_COMMANDS


@pytest.mark.parametrize("words", ["tiphys ", "tiphys ge", "tiphys --qu"])
def test_completion_of_names_imports_no_command(words: str) -> None:
    position = str(len(words.split(" ")) - 1)
    variables = {"_TIPHYS_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": position}
    [modules] = imported([], **variables)
    assert not modules & (NOT_TO_LIST_COMMANDS - {"pydantic"})  # Typer checks the values of options with it


def test_help_of_a_command_imports_neither_engine_nor_clients(records_loaded: ForkingProcess) -> None:
    names = logging_last(COMMANDS)
    found = imported(*([name, "--help"] for name in names), process=records_loaded)
    for name, modules in zip(names, found, strict=True):
        assert not modules & {*ENGINE, *LIBRARIES}, name
        assert COMMANDS[name].logs or "structlog" not in modules, name


def test_help_of_a_command_imports_its_module(records_loaded: ForkingProcess) -> None:
    [modules] = imported(["gc", "--help"], process=records_loaded)
    assert f"hera_pipelines.{COMMANDS['gc'].module}" in modules
    others = {f"hera_pipelines.{command.module}" for name, command in COMMANDS.items() if name != "gc"}
    assert not modules & others


def test_a_command_that_reads_imports_what_it_reads_with(finished: Finished, records_loaded: ForkingProcess) -> None:
    lines = sorted(READS, key=lambda words: COMMANDS[words[0]].logs)
    commands = [
        [*(finished.run if word == "RUN" else word for word in line), "--store", str(finished.store)] for line in lines
    ]
    for line, modules in zip(lines, imported(*commands, process=records_loaded), strict=True):
        assert not modules & {*ENGINE, *LIBRARIES, *(() if COMMANDS[line[0]].logs else LOGGING)}, line


def test_a_picture_alone_imports_the_templates_of_pictures(
    finished: Finished, tmp_path: Path, records_loaded: ForkingProcess
) -> None:
    line = ["lineage", finished.run, "-o", "svg", "--output", str(tmp_path / "a.svg"), "--store", str(finished.store)]
    [modules] = imported(line, process=records_loaded)
    assert modules & LIBRARIES == {"jinja2"}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_their_own_help_says(name: str) -> None:
    assert COMMANDS[name].load(name).get_short_help_str(200) == COMMANDS[name].summary
