"""The first minutes of a stranger: clone and demo, and a notebook. `cli/test_readme.py` has the tutorial."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = os.environ.get("UV") or shutil.which("uv") or ""
PATIENCE_SECONDS = 1200
ENVIRON = {
    name: value for name, value in os.environ.items() if not name.startswith(("TIPHYS_", "AWS_", "PYTHON", "VIRTUAL_"))
}

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(2 * PATIENCE_SECONDS),
    pytest.mark.skipif(not UV, reason="uv is not installed"),
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a clone needs a git repository"),
]


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output and errors of a command that succeeds."""
    ended = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=ENVIRON,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def test_a_stranger_clones_and_sees_the_demo(tmp_path: Path) -> None:
    run("git", "clone", "--quiet", ROOT, "tiphys", cwd=tmp_path)
    assert "bit-identical" in run("make", "demo", f"UV={UV}", cwd=tmp_path / "tiphys")


def test_the_notebook_runs_from_the_first_cell_to_the_last(tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples/19-notebook.ipynb", tmp_path / "notebook.ipynb")
    environ = {**ENVIRON, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "NO_COLOR": "1"}
    words = ("run", "--quiet", "--isolated", "--no-project", "--python", sys.executable)
    packages = ("--with", "nbclient<1", "--with", "ipykernel<8")
    ended = subprocess.run(
        [UV, *words, *packages, "jupyter", "execute", "--inplace", "notebook.ipynb"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert ended.returncode == 0, ended.stderr
    cells = json.loads((tmp_path / "notebook.ipynb").read_text())["cells"]
    shown = json.dumps([cell.get("outputs") for cell in cells])
    assert "run from-a-notebook succeeded" in shown
    assert "image/svg+xml" in shown
    assert "0 of 1 steps would run" in shown
