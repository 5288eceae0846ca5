"""Pipelines that Kubeflow's own SDK compiles are imported, run here with its own executor, and resumed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

UV = os.environ.get("UV") or shutil.which("uv") or ""
PATIENCE_SECONDS = 1200
pytestmark = [pytest.mark.heavy, pytest.mark.skipif(not UV, reason="uv is not installed")]

PIPELINES = """\
import sys
from kfp import dsl, compiler
from kfp.dsl import Dataset, Input, Metrics, Model, Output

IMAGE = "python:3.11"


@dsl.component(base_image=IMAGE)
def prepare(rows: int, note: str, flags: dict, data: Output[Dataset]) -> float:
    data.metadata["rows"] = rows
    with open(data.path, "w") as file:
        file.write("\\n".join([note + str(flags["deep"])] * rows))
    return rows / 2


@dsl.component(base_image=IMAGE)
def fit(data: Input[Dataset], rate: float, tags: list, model: Output[Model]):
    with open(model.path, "w") as file:
        file.write(f"{data.metadata['rows']} {rate} {tags} " + open(data.path).read())


@dsl.container_component
def count(model: Input[Model], size: dsl.OutputPath(int)):
    return dsl.ContainerSpec(image="busybox", command=["sh", "-c", 'wc -c < "$0" > "$1"'], args=[model.path, size])


@dsl.component(base_image=IMAGE)
def report(size: int, text: str, fails: bool, result: Output[Metrics]) -> str:
    if fails:
        raise SystemExit("on purpose")
    result.log_metric("size", size)
    return f"{text}: {size}"


@dsl.pipeline(name="straight")
def straight(rows: int = 3, note: str = 'a "quoted" \\\\ note', fails: bool = True):
    made = prepare(rows=rows, note=note, flags={"deep": [1, "x"]})
    model = fit(data=made.outputs["data"], rate=made.outputs["Output"], tags=["a", 1])
    size = count(model=model.outputs["model"])
    report(size=size.outputs["size"], text=f"rows {rows}", fails=fails)


@dsl.pipeline(name="looping")
def looping():
    with dsl.ParallelFor([1, 2]) as rows:
        prepare(rows=rows, note="x", flags={})


for pipeline in (straight, looping):
    compiler.Compiler().compile(pipeline, f"{pipeline.name}.yaml")
"""


def tiphys(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TIPHYS_", "AWS_", "PYTHON"))}
    return subprocess.run(
        [sys.executable, "-m", "hera_pipelines.cli", *words],
        cwd=folder,
        env={**kept, "PATH": f"{folder / 'kfp/bin'}:{os.environ['PATH']}", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )


def output_of(folder: Path, step: str, attempt: int, path: str) -> str:
    [file] = (folder / f".tiphys/store/data/runs/r/outputs/{step}/{attempt:09d}").glob(f"**/{path}")
    return file.read_text()


def test_a_pipeline_of_kubeflow_runs_and_is_resumed(tmp_path: Path) -> None:
    (tmp_path / "pipelines.py").write_text(PIPELINES)
    python = tmp_path / "kfp/bin/python"
    for command in (
        [UV, "venv", "--quiet", "--seed", "--python", sys.executable, "kfp"],
        [UV, "pip", "install", "--quiet", "--python", str(python), "kfp>=2.13,<3"],
        [str(python), "pipelines.py"],
    ):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
        assert done.returncode == 0, done.stderr

    imported = tiphys(tmp_path, "import-kfp", "straight.yaml", "--output", "workflow.yaml")
    assert imported.returncode == 0, imported.stderr
    assert "wrote workflow.yaml with 4 steps" in imported.stderr
    failed = tiphys(tmp_path, "run", "workflow.yaml", "--run", "r")
    assert failed.returncode == 1, failed.stderr
    assert "report failed in attempt 1 by user error" in failed.stderr

    fork = tiphys(tmp_path, "fork", "r", "-p", "fails=false", "--run", "r2")
    assert fork.returncode == 0, fork.stderr
    for step in ("prepare", "fit", "count"):
        assert f"{step}: Adopted from run r, step {step}, attempt 1" in fork.stderr
    model = "3 1.5 ['a', 1.0] " + "\n".join(["a \"quoted\" \\ note[1.0, 'x']"] * 3)
    assert output_of(tmp_path, "fit", 1, "artifacts/model") == model
    [result] = (tmp_path / ".tiphys/store/data/runs/r2/outputs/report").glob("**/executor-output*")
    executed = json.loads(result.read_text())
    assert executed["parameterValues"] == {"Output": f"rows 3: {len(model)}"}
    assert executed["artifacts"]["result"]["artifacts"][0]["metadata"] == {"size": len(model)}

    looping = tiphys(tmp_path, "import-kfp", "looping.yaml")
    assert looping.returncode == 2
    assert "loop" in looping.stderr
