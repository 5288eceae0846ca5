"""The Python that README and the pages show does what the text beside it says."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from hera_pipelines import load_pipeline
from tiphys.protocol.compiled_workflow import CompiledPipeline

ROOT = Path(__file__).parents[2]
STEPS = """
from pathlib import Path
from typing import Annotated
from hera.workflows import Artifact
from hera_pipelines import Pipeline, step, train

IMAGE = "ghcr.io/acme/digits:1.4"

"""
FIT = """

@train(image=IMAGE)
def fit(data: Annotated[Path, Artifact(name="data")], lr: float) -> None: ...

"""


def samples(page: str) -> list[str]:
    """Python blocks of a page, in order."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def steps_of(source: str, folder: Path) -> dict[str, Any]:
    """Steps of the pipeline that a sample defines, after compile."""
    (folder / "sample.py").write_text(source)
    return dict(CompiledPipeline.from_manifest(load_pipeline(folder / "sample.py").compile()).steps)


def test_the_readmes_pipeline_compiles_as_it_stands(tmp_path: Path) -> None:
    pipeline, _ = samples("README.md")

    [fit] = steps_of(pipeline, tmp_path).values()

    assert (fit.name, fit.gpu.gpus, fit.gpu.queue) == ("fit", 1, "research")
    assert (fit.checkpoints.every, fit.checkpoints.keep_last, fit.grace_seconds) == (600, 3, 120)


def test_the_readmes_trainer_trains_outside_of_tiphys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TIPHYS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TIPHYS_OUTPUT_MODEL", str(tmp_path / "out" / "model"))
    saved: dict[str, Any] = {}
    given = {
        "initial_state": lambda: {"step": 0, "weight": 1.0},
        "train_one_step": lambda state: state["weight"],
        "total": 3,
        "save_model": lambda state, path: saved.update(state, path=path),
    }

    exec(compile(samples("README.md")[1], "README.md", "exec"), given)

    assert (saved["step"], saved["weight"]) == (3, 1.0)
    assert saved["path"] == tmp_path / "out" / "model"
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "no checkpoint is kept"


def test_the_calls_of_the_page_for_hera_users_compile(tmp_path: Path) -> None:
    calls, function = samples("docs/from-hera.md")

    steps = steps_of(STEPS + function + FIT + calls, tmp_path)

    assert list(steps) == ["preprocess", "fit"]
    assert steps["preprocess"].artifacts == ("data",)
