"""A release: twice the same bytes, and its wheel runs the demo in an environment that has nothing else."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = os.environ.get("UV") or shutil.which("uv") or ""

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(not UV, reason="uv is not installed"),
]


def run(*command: str | Path, cwd: Path) -> str:
    ended = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=1800,
        env={**os.environ, "UV": UV, "PYTHONPATH": str(cwd / "tests"), "UV_PYTHON_DOWNLOADS": "never"},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_a_release_from_two_clones_is_the_same_and_its_wheel_works(tmp_path: Path) -> None:
    for name in ("one", "two"):
        run("git", "clone", "--quiet", ROOT, name, cwd=tmp_path)
        run(sys.executable, "-m", "runner.dist", cwd=tmp_path / name)
    first, second = (
        {file.name: file.read_bytes() for file in (tmp_path / name / "dist").iterdir()} for name in ("one", "two")
    )
    assert {Path(name).suffix for name in first} == {".whl", ".gz", ".tgz", ".json", ""}
    assert first == second
    run("sha256sum", "--check", "SHA256SUMS", cwd=tmp_path / "one" / "dist")

    [wheel] = (tmp_path / "one" / "dist").glob("*.whl")
    run(UV, "venv", "--quiet", "--python", sys.executable, "empty", cwd=tmp_path)
    run(UV, "pip", "install", "--quiet", "--python", "empty/bin/python", f"{wheel}[demo]", cwd=tmp_path)
    finished = subprocess.run(
        [tmp_path / "empty/bin/tiphys", "demo"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1800,
        env={name: value for name, value in os.environ.items() if not name.startswith(("TIPHYS_", "PYTHON"))},
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "bit-identical" in finished.stdout + finished.stderr
