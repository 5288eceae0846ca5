"""Pipelines that Kubeflow's own SDK compiles are imported, run here with its own executor, and resumed."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from tiphys.lineage.run_history import RunHistory
from tiphys.store import DirectoryStore

UV = os.environ.get("UV") or shutil.which("uv") or ""
PATIENCE_SECONDS = 1200
pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(2 * PATIENCE_SECONDS),
    pytest.mark.skipif(not UV, reason="uv is not installed"),
]

SAMPLES = Path(__file__).parents[1] / "unit/authoring/adoption/kubeflow"
OUTPUTS = {
    ("hello-world", "say-hello", "Output"): 'Hello, World "of" \\ {quotes}!',
    ("addition-pipeline", "add-3", "Output"): "14.5",
    ("artifacts", "train-model", "metrics-metadata"): '{"mean": 4.5}',
    ("artifacts", "read-model", "Output"): "none: 4 rows, 2 epochs",
    ("containers", "greet", "greeting"): "hello you",
    ("containers", "count-words", "words"): "2",
    ("visualization", "evaluate", "page"): "<h1>Done</h1>",
    ("lists-and-dicts", "gather", "total"): "6",
    ("lists-and-dicts", "confirm", "Output"): "6 [('a', 'b \"c\"')] False",
    ("defaults", "optional", "Output"): "('x', None, 'default', None)",
    ("variables", "variables", "Output"): "fast",
    ("retries", "add", "Output"): "5.0",
}
"""Of some steps of the tutorials, by name of the pipeline, the step and the output."""

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


compiler.Compiler().compile(straight, "straight.yaml")
"""


@pytest.fixture(scope="module")
def kubeflow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an environment ``kfp`` that has the SDK, and pip, which Python components call."""
    folder = tmp_path_factory.mktemp("kubeflow")
    python = folder / "kfp/bin/python"
    run([UV, "venv", "--quiet", "--seed", "--python", sys.executable, "kfp"], folder)
    run([UV, "pip", "install", "--quiet", "--python", python, "kfp>=2.17,<3", "kfp-kubernetes>=2.17,<3"], folder)
    return folder


def run(command: Sequence[str | Path], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr


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


def output_of(folder: Path, run: str, step: str, name: str) -> str:
    """An output of the only attempt of a step."""
    store = DirectoryStore(folder / ".tiphys/store")
    [end] = [attempt.end for attempt in RunHistory(store, run).attempts[step]]
    assert end is not None
    [output] = [output for output in end.outputs if output.name == name]
    return output.value if output.value is not None else store.read(output.key).decode()


def without_version(text: str) -> str:
    return re.sub(r"kfp(==|-)[0-9.]+", "kfp", re.sub(r"\\\n *\\? ?", "", text))


def test_the_sdk_still_compiles_the_samples(kubeflow: Path) -> None:
    shutil.copy(SAMPLES / "pipelines.py.txt", kubeflow / "samples.py")
    run([kubeflow / "kfp/bin/python", "samples.py"], kubeflow)
    for sample in SAMPLES.glob("*.yaml"):
        now, before = (
            list(yaml.safe_load_all(without_version(path.read_text()))) for path in (kubeflow / sample.name, sample)
        )
        assert now == before, sample.name


@pytest.mark.parametrize("name", sorted({name for name, _, _ in OUTPUTS}))
def test_a_tutorial_gives_the_outputs_that_kubeflow_gives(name: str, kubeflow: Path) -> None:
    imported = tiphys(kubeflow, "import-kfp", str(SAMPLES / f"{name}.yaml"), "--output", f"{name}-workflow.yaml")
    assert imported.returncode == 0, imported.stderr
    ran = tiphys(kubeflow, "run", f"{name}-workflow.yaml", "--run", name)
    assert ran.returncode == 0, ran.stderr
    for (_, step, output), expected in ((key, value) for key, value in OUTPUTS.items() if key[0] == name):
        assert output_of(kubeflow, name, step, output) == expected


def test_a_pipeline_of_kubeflow_is_forked_after_a_failure(kubeflow: Path) -> None:
    (kubeflow / "pipelines.py").write_text(PIPELINES)
    run([kubeflow / "kfp/bin/python", "pipelines.py"], kubeflow)
    imported = tiphys(kubeflow, "import-kfp", "straight.yaml", "--output", "workflow.yaml")
    assert imported.returncode == 0, imported.stderr
    assert "wrote workflow.yaml with 4 steps" in imported.stderr
    failed = tiphys(kubeflow, "run", "workflow.yaml", "--run", "r")
    assert failed.returncode == 1, failed.stderr
    assert "report failed in attempt 1 by user error" in failed.stderr

    fork = tiphys(kubeflow, "fork", "r", "-p", "fails=false", "--run", "r2")
    assert fork.returncode == 0, fork.stderr
    taken_over = [f"{step} (run r, attempt 1)" for step in ("count", "fit", "prepare")]
    assert f"taken over: {', '.join(taken_over)}" in fork.stderr
    model = "3 1.5 ['a', 1.0] " + "\n".join(["a \"quoted\" \\ note[1.0, 'x']"] * 3)
    assert output_of(kubeflow, "r", "fit", "model") == model
    executed = json.loads(output_of(kubeflow, "r2", "report", "executor-output"))
    assert executed["parameterValues"] == {"Output": f"rows 3: {len(model)}"}
    assert executed["artifacts"]["result"]["artifacts"][0]["metadata"] == {"size": len(model)}
