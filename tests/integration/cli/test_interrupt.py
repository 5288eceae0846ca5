"""Ctrl-C while the command imports its modules, before it can do anything about it."""

import subprocess
import sys

import pytest

INTERRUPTED_IMPORT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from hera_pipelines.cli import main
sys.exit(main(["run", "absent.py"]))
"""


@pytest.mark.parametrize("module", ["typer", "hera_pipelines.cli.screen", "hera_pipelines.cli.start.run"])
def test_an_interrupt_during_an_import_prints_no_traceback(module: str) -> None:
    program = [sys.executable, "-c", INTERRUPTED_IMPORT.format(module=module)]
    ended = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr, ended.stdout) == (130, "tiphys: interrupted\n", "")
