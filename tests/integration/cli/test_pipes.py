"""A reader that closes the pipe, as ``head`` does, ends a command quietly."""

import os
import subprocess
import sys

import pytest
from support.processes.forking import COMMAND, ForkingProcess

from .conftest import Finished

LINES = (
    ["--help"],
    ["get", "--help"],
    ["runs"],
    ["get", "RUN"],
    ["get", "RUN", "-o", "json"],
    ["events", "RUN"],
    ["events", "RUN", "-o", "yaml"],
    ["plan", "RUN"],
    ["lineage", "RUN"],
    ["lineage", "RUN", "-o", "svg"],
    ["report", "RUN"],
    ["checkpoint", "list", "RUN"],
)


# Buffered, any text meets the closed pipe at its end. Unbuffered, click and Rich meet it at their first line.
@pytest.mark.parametrize(
    ("arguments", "buffered"), [*((line, True) for line in LINES), *((line, False) for line in LINES[:4])]
)
def test_a_closed_pipe_is_no_failure(
    arguments: list[str], buffered: bool, finished: Finished, engine_loaded: ForkingProcess
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = ["--quiet", *(finished.run if word == "RUN" else word for word in arguments)]
    environment = {**os.environ, "TIPHYS_STORE": str(finished.store)}
    try:
        ended = engine_loaded.run(COMMAND, words, environ=environment, stdout=writer, buffered=buffered)
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_closed_pipe_is_no_failure_of_a_new_interpreter() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        line = [sys.executable, "-m", "hera_pipelines.cli", "--help"]
        ended = subprocess.run(line, stdout=stream, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
