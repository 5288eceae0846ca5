"""A reader that closes the pipe, as ``head`` does, ends a command quietly."""

import os
import subprocess
import sys

import pytest

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


@pytest.mark.parametrize("buffered", [True, False], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("arguments", LINES, ids=" ".join)
def test_a_closed_pipe_is_no_failure(arguments: list[str], buffered: bool, finished: Finished) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = [finished.run if word == "RUN" else word for word in arguments]
    environment = {**os.environ, "TIPHYS_STORE": str(finished.store), "PYTHONUNBUFFERED": "" if buffered else "1"}
    line = [sys.executable, "-m", "hera_pipelines.cli", "--quiet", *words]
    try:
        ended = subprocess.run(line, stdout=writer, stderr=subprocess.PIPE, env=environment, text=True, check=False)
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "")
