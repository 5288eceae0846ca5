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
try:
    main(sys.argv[1:])
finally:
    print('\\n' + json.dumps(sorted(sys.modules)), file=sys.__stdout__)
"""


def imported(arguments: list[str], process: ForkingProcess | None = None, **variables: str) -> set[str]:
    """Modules that the command imported, in a process of its own: a new one, or one forked from ``process``."""
    environment = {**{name: value for name, value in os.environ.items() if name != "TIPHYS_STORE"}, **variables}
    if process:
        done = process.run(PROGRAM, arguments, environ=environment)
    else:
        line = [sys.executable, "-c", PROGRAM, *arguments]
        done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert "bug in Tiphys" not in done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]], ids=" ".join)
def test_help_imports_no_command(arguments: list[str]) -> None:
    assert not imported(arguments) & NOT_TO_LIST_COMMANDS


@pytest.mark.parametrize("words", ["tiphys ", "tiphys ge", "tiphys --qu"])
def test_completion_of_names_imports_no_command(words: str) -> None:
    position = str(len(words.split(" ")) - 1)
    variables = {"_TIPHYS_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": position}
    # Typer checks the values of options with pydantic.
    assert not imported([], **variables) & (NOT_TO_LIST_COMMANDS - {"pydantic"})


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_imports_neither_engine_nor_clients(name: str, records_loaded: ForkingProcess) -> None:
    modules = imported([name, "--help"], records_loaded)
    assert f"hera_pipelines.{COMMANDS[name].module}" in modules
    assert not modules & {*ENGINE, *LIBRARIES}
    assert COMMANDS[name].logs or "structlog" not in modules


@pytest.mark.parametrize("arguments", READS, ids=" ".join)
def test_a_command_that_reads_imports_what_it_reads_with(
    arguments: list[str], finished: Finished, records_loaded: ForkingProcess
) -> None:
    line = [finished.run if word == "RUN" else word for word in arguments]
    unneeded = {*ENGINE, *LIBRARIES, *(() if COMMANDS[line[0]].logs else LOGGING)}
    assert not imported([*line, "--store", str(finished.store)], records_loaded) & unneeded


def test_a_picture_alone_imports_the_templates_of_pictures(
    finished: Finished, tmp_path: Path, records_loaded: ForkingProcess
) -> None:
    line = ["lineage", finished.run, "-o", "svg", "--output", str(tmp_path / "a.svg"), "--store", str(finished.store)]
    assert imported(line, records_loaded) & LIBRARIES == {"jinja2"}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_their_own_help_says(name: str) -> None:
    assert COMMANDS[name].load(name).get_short_help_str(200) == COMMANDS[name].summary
