"""The examples for PyTorch, Lightning and Hugging Face run on this machine and leave a model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed here: make test-torch")

from tiphys.store import DirectoryStore, read_step_attempts

EXAMPLES = Path(__file__).parents[2] / "examples"
PATIENCE_SECONDS = 600.0
NAMES = ("13-pytorch", "14-lightning", "15-hugging-face")


@pytest.mark.parametrize("name", NAMES)
def test_an_example_trains_and_leaves_its_model(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hera_pipelines.cli", "run", str(EXAMPLES / f"{name}.py"), "--store", "store"]
    ended = subprocess.run(
        [*command, "-p", "steps=40", "--run", "digits-1", "--state", "state"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        env={**os.environ, "NO_COLOR": "1"},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    store = DirectoryStore(tmp_path / "store")
    [attempt] = read_step_attempts(store, "digits-1", "fit")
    assert attempt.end is not None
    assert "model" in [output.name for output in attempt.end.outputs]
