"""The first hour of a person who has read README and tutorial, with the code that they have already.

| code | what is special |
|---|---|
| flat | a script with imports, constants, a data class and argparse at the top, and a module of helpers beside it |
| package | ``src/lab`` with relative imports, a pyproject.toml, and the pipeline in the package |
| notebook | cells exported to a file: globals that change, prints, a plot that is not used |

Each is compiled, examined, run, killed in the middle of its training, resumed, changed and forked. The numbers are
those of a run that nothing disturbed, and no step of the training is done twice beyond the newest checkpoint.
"""

import json
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.processes.forking import ForkedProcess

from .conftest import Answer, begin, invoke

PATIENCE_SECONDS = 120
STEPS, SAVED_EVERY = 400, 20
HELPERS = '''\
"""What every project has."""
import math
from dataclasses import asdict, dataclass

import numpy as np

SCALE = 3.0


@dataclass
class Config:
    lr: float = 0.05
    steps: int = 400

    def as_dict(self):
        return asdict(self)


def make_points(rows, seed=0):
    x = np.random.default_rng(seed).random(rows)
    return np.stack([x, SCALE * x], axis=1)


def update(slope, x, y, lr):
    return slope - lr * (slope * x - y) * x


def score(slope):
    return round(math.fabs(slope - SCALE), 6)
'''
STEPS_OF_PIPELINE = """

@step(image=IMAGE)
def prepare(rows: int) -> Data:
    points = make_points(rows)
    print("made", points.shape)
    np.save("points.npy", points)
    return Path("points.npy")


@train(image=IMAGE, checkpoints=Checkpoints(every="20 steps", keep_last=3))
def fit(data: Data, lr: float) -> Model:
    points = np.load(data)
    config = Config(lr=lr)
    with checkpoint.session() as session:
        state = session.restore(default={"step": 0, "slope": 0.0})
        while state["step"] < config.steps:
            x, y = points[state["step"] % len(points)]
            state["slope"] = float(update(state["slope"], x, y, config.lr))
            state["step"] += 1
            with open(TRAINED, "a") as log:
                print(state["step"], file=log)
            time.sleep(0.005)
            session.step(state["step"], state)
    return {**state, **config.as_dict()}


@step(image=IMAGE)
def evaluate(model: Model) -> Score:
    found = json.loads(model.read_text())
    print("slope", round(found["slope"], 4))
    return score(found["slope"])


parameters = [Parameter(name="rows", value="50"), Parameter(name="lr", value="0.02")]
with Pipeline("stranger", arguments=parameters) as pipeline:
    data = prepare(rows=pipeline.get_parameter("rows"))
    evaluate(fit(data, lr=pipeline.get_parameter("lr")))
"""
TOP = """\
import argparse
import json
import os
import time
from pathlib import Path
from typing import Annotated

import numpy as np
from hera.workflows import Artifact, Parameter
from hera_pipelines import Checkpoints, Pipeline, step, train
from tiphys import checkpoint

IMPORTS

IMAGE = "registry.example.com/stranger:1"
TRAINED = "FOLDER/trained.txt"
Data = Annotated[Path, Artifact(name="data")]
Model = Annotated[dict, Artifact(name="model")]
Score = Annotated[float, Parameter(name="score")]
"""
MAIN = """

def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=50)
    print(make_points(parser.parse_args().rows))


if __name__ == "__main__":
    main()
"""
CELLS = """\
# %% [markdown]
# # My experiment
# %%
%s
# %%
history = []
history.append("loaded")
print("notebook loaded", len(history))
# %%
figure = None  # plt.figure() in the notebook
# %%
"""
STYLES: Mapping[str, tuple[str, str]] = {
    "flat": ("pipeline.py", "helpers.py"),
    "package": ("src/lab/pipeline.py", "src/lab/helpers.py"),
    "notebook": ("pipeline.py", "pipeline.py"),
}


def write(folder: Path, style: str) -> tuple[Path, Path]:
    """The files of a style; returns that of the pipeline and that of the helpers."""
    pipeline, helpers = (folder / name for name in STYLES[style])
    pipeline.parent.mkdir(parents=True, exist_ok=True)
    imports = {
        "flat": "from helpers import Config, make_points, score, update",
        "package": "from . import helpers\nfrom .helpers import Config, score, update\n\n"
        "make_points = helpers.make_points",
        "notebook": HELPERS.split("\n", 1)[1],
    }[style]
    top = TOP.replace("IMPORTS", imports).replace("FOLDER", str(folder))
    if style == "notebook":
        pipeline.write_text(CELLS % top + STEPS_OF_PIPELINE)
        return pipeline, pipeline
    helpers.write_text(HELPERS)
    pipeline.write_text(f'"""Trains a slope."""\n{top}{STEPS_OF_PIPELINE}{MAIN}')
    if style == "package":
        (folder / "src/lab/__init__.py").touch()
        (folder / "pyproject.toml").write_text('[project]\nname = "lab"\nversion = "0"\n')
    return pipeline, helpers


def expected_slope(lr: float, scale: float = 3.0) -> float:
    """What a loop without Tiphys computes."""
    import numpy as np

    x = np.random.default_rng(0).random(50)
    slope = 0.0
    for number in range(STEPS):
        slope -= lr * (slope * x[number % 50] - scale * x[number % 50]) * x[number % 50]
    return slope


def call(folder: Path, *words: str | Path, code: int = 0) -> Answer:
    """A command that ends with ``code`` and shows nothing of the inside of Tiphys."""
    answer = invoke(words, folder)
    shown = answer.out + answer.err
    assert answer.code == code, shown
    for inside in ("Traceback", "hera_pipelines/", "tiphys/checkpoint", "this is a bug"):
        assert inside not in shown, shown
    return answer


def trained(folder: Path) -> list[int]:
    log = folder / "trained.txt"
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def kill_in_the_middle(process: ForkedProcess, folder: Path) -> int:
    """Kill the engine and its programs once the training is under way; returns the last step that was done."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(trained(folder)) < STEPS // 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    done = trained(folder)
    while True:  # its programs notice, or end by themselves
        time.sleep(0.3)
        if (now := trained(folder)) == done:
            return now[-1]
        done = now


def output(folder: Path, run: str, step: str, path: str) -> str:
    [file] = (folder / f".tiphys/store/data/runs/{run}/outputs/{step}").glob(f"**/{path}")
    return file.read_text()


@pytest.mark.heavy
@pytest.mark.parametrize("style", ["flat", "package", "notebook"])
def test_the_first_hour(style: str, tmp_path: Path) -> None:
    pipeline, helpers = write(tmp_path, style)
    file = pipeline.relative_to(tmp_path)
    compiled = call(tmp_path, "compile", file, "--store", "s3://ml-runs/tiphys")
    assert "kind: Workflow" in compiled.out
    assert "notebook loaded" not in compiled.out  # a Workflow on standard output stays one
    examined = invoke(["preflight", file], tmp_path)
    assert "Traceback" not in examined.out + examined.err

    killed = begin(["run", file, "--run", "first"], tmp_path)
    last = kill_in_the_middle(killed, tmp_path)
    if last < STEPS:
        assert re.search(r"fit", call(tmp_path, "plan", "first", file).out)
    resumed = call(tmp_path, "resume", "first", file)
    assert "run first succeeded" in resumed.err
    model = json.loads(output(tmp_path, "first", "fit", "artifacts/model"))
    assert model["slope"] == pytest.approx(expected_slope(0.02), abs=1e-9)
    assert (model["step"], model["lr"]) == (STEPS, 0.02)
    done = trained(tmp_path)
    assert set(done) == set(range(1, STEPS + 1))
    assert len(done) - STEPS <= 2 * SAVED_EVERY
    assert done.count(1) == 1

    shown = {word: call(tmp_path, word, "first").out for word in ("get", "report", "lineage")}
    assert "succeeded" in shown["get"].lower()
    assert "goodput" in shown["report"].lower()
    assert "made (50, 2)" in call(tmp_path, "logs", "first/prepare").out
    assert f"slope {round(expected_slope(0.02), 4)}" in call(tmp_path, "logs", "first/evaluate").out
    assert "run first succeeded: it waits for nothing" in call(tmp_path, "why", "first").out

    again = call(tmp_path, "resume", "first", file)
    assert "0 of 3 steps would run" in again.out + again.err
    assert trained(tmp_path) == done

    helpers.write_text(helpers.read_text().replace("return round(math.fabs(slope - SCALE), 6)", "return -1.5"))
    changed = call(tmp_path, "resume", "first", file)
    assert "1 of 3 steps would run" in changed.out + changed.err
    assert trained(tmp_path) == done
    [step] = json.loads(call(tmp_path, "get", "first/evaluate", "-o", "json").out)["steps"]
    assert step["attempts"][-1]["outputs"] == {"score": "-1.5"}

    forked = call(tmp_path, "fork", "first", file, "-p", "lr=0.03", "--from", "fit", "--run", "second")
    assert "run second succeeded" in forked.err
    model = json.loads(output(tmp_path, "second", "fit", "artifacts/model"))
    assert (model["slope"], model["lr"]) == (pytest.approx(expected_slope(0.03), abs=1e-9), 0.03)
    assert trained(tmp_path) == [*done, *range(1, STEPS + 1)]
