"""The first hour of a stranger: clone, demo, the pipeline of the tutorial killed and resumed, and its page."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
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


def wait_for_attempt(store: Path, step: str) -> str:
    """Name of the run whose ``step`` has begun."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        for claim in store.glob(f"control/runs/*/attempts/{step}/000000001.json"):
            return claim.parents[2].name
        time.sleep(0.05)
    raise TimeoutError(f"{step} has not begun in {PATIENCE_SECONDS} s")


def test_a_stranger_sees_a_killed_run_resumed(tmp_path: Path) -> None:
    run("git", "clone", "--quiet", ROOT, "tiphys", cwd=tmp_path)
    clone, work = tmp_path / "tiphys", tmp_path / "work"
    assert "bit-identical" in run("make", "demo", f"UV={UV}", cwd=clone)
    tiphys = clone / ".venv/bin/tiphys"

    page = (clone / "docs/tutorial.md").read_text()
    [code] = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    work.mkdir()
    (work / "digits.py").write_text(code)
    with subprocess.Popen(
        [tiphys, "run", "digits.py"], cwd=work, env=ENVIRON, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as engine:
        name = wait_for_attempt(work / ".tiphys/store", "prepare")
        engine.send_signal(signal.SIGKILL)
    assert engine.returncode == -signal.SIGKILL

    [removed], [added] = (re.findall(rf"^{sign}(.*)$", page, re.MULTILINE) for sign in (r"-(?=    )", r"\+(?=    )"))
    (work / "digits.py").write_text(code.replace(removed, added))
    run(tiphys, "resume", name, "digits.py", cwd=work)

    with subprocess.Popen(
        [tiphys, "ui", "--port", "0"], cwd=work, env=ENVIRON, stdout=subprocess.PIPE, text=True
    ) as pages:
        try:
            assert pages.stdout is not None
            address = pages.stdout.readline().strip()
            with urllib.request.urlopen(f"{address}runs/{name}", timeout=PATIENCE_SECONDS) as answer:
                shown = answer.read().decode()
        finally:
            pages.terminate()
    ends = dict(re.findall(r'submission (\d) <i class="dot (\w+)">', shown))
    assert ends == {"1": "interrupted", "2": "succeeded"}


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
