"""One process that has PyTorch loaded, from which the ranks of all tests of a module are forked."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.builders.lineage import claim_of, write_claim
from support.processes.torch_ranks import World


@pytest.fixture(scope="module")
def launcher(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """Imports the modules that the test module names in ``PRELOADED``, once for all ranks."""
    command = [sys.executable, "-m", "support.processes.torch_launcher", *getattr(request.module, "PRELOADED", ())]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    folder = Path(__file__).parents[1]
    with subprocess.Popen(
        command, cwd=folder, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.stdin.close()
        process.wait(600)


@pytest.fixture
def world(launcher: subprocess.Popen[str], tmp_path: Path) -> World:
    world = World(launcher, tmp_path)
    write_claim(world.store, claim_of(1))
    return world
