"""Every benchmark of the Makefile starts: a command that is run twice a year breaks unseen."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MODULES = sorted(set(re.findall(r"python -m (bench[\w.]*)", (ROOT / "Makefile").read_text())))


@pytest.mark.parametrize("module", MODULES)
def test_benchmark_shows_its_help(module):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)])}
    command = [sys.executable, "-m", module, "--help"]
    shown = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=300)
    assert (shown.returncode, "usage:" in shown.stdout) == (0, True), shown.stderr
