"""The smallest pipeline that has everything: a step, a training with checkpoints, and a step behind it.

`write` puts a pipeline file and its programs into a folder, as an author would
have them. Each execution of a program leaves a line in ``ran.txt`` there, so
that a test can count what ran.
"""

from pathlib import Path

PIPELINE = """
from pathlib import Path
from hera.workflows import Artifact, Parameter
from hera.workflows.models import ValueFrom
from hera_pipelines import Checkpoints, Pipeline, Retries, Step, Train

def result(name):
    return Parameter(name=name, value_from=ValueFrom(path=f"/tmp/{name}"))

HERE = str(Path(__file__).parent)
prepare = Step(
    name="prepare", image="tiny", command=["python", "-m", "tiny_programs", "prepare", HERE], outputs=result("seed")
)
fit = Train(
    name="fit",
    image="tiny",
    command=["python", "-m", "tiny_programs", "fit", HERE],
    args=["{{inputs.parameters.seed}}", "{{inputs.parameters.steps}}"],
    inputs=[Parameter(name="seed"), Parameter(name="steps")],
    outputs=Artifact(name="model", path="/tmp/model"),
    checkpoints=Checkpoints(every="5 steps", keep_last=None),
    retries=Retries(backoff="1s"),
)
report = Step(
    name="report",
    image="tiny",
    command=["python", "-m", "tiny_programs", "report", HERE],
    args=["{{inputs.parameters.fail}}"],
    inputs=[Artifact(name="model", path="/tmp/model"), Parameter(name="fail")],
    outputs=result("total"),
)

parameters = {"steps": "20", "fail": "no"}
with Pipeline("tiny", arguments=[Parameter(name=name, value=value) for name, value in parameters.items()]) as pipeline:
    given = pipeline.get_parameter
    model = fit(seed=prepare(), steps=given("steps"))
    report(model=model, fail=given("fail"))
"""

PROGRAMS = """
import os
import sys
import time
from pathlib import Path

from tiphys import inputs, outputs

HELD_AT = 10
HOLD = Path(__file__).parent / "hold"

def prepare():
    outputs.path("seed").write_text("3")

def fit(seed, steps):
    import numpy as np
    from tiphys import checkpoint  # only here, as it takes most of the time of the other two

    with checkpoint.session() as session:
        state = session.restore(default={"step": 0, "weights": np.full(5000, float(seed))})
        while state["step"] < int(steps):
            state["weights"] = state["weights"] * 1.01 + state["step"]
            state["step"] += 1
            session.step(state["step"], state, metrics={"mean": float(state["weights"].mean())})
            if state["step"] == HELD_AT and HOLD.exists():
                session.flush()
            while state["step"] == HELD_AT and HOLD.exists() and not session.should_stop:
                time.sleep(0.01)
    outputs.path("model").write_bytes(state["weights"].tobytes())

def report(fail):
    if fail == "yes":
        sys.exit("told to fail")
    outputs.path("total").write_text(str(len(inputs.path("model").read_bytes())))

if __name__ == "__main__":
    program, here, *arguments = sys.argv[1:]
    with (Path(here) / "ran.txt").open("a") as log:
        log.write(f"{program} {os.getpid()}\\n")
    globals()[program](*arguments)
"""


def write(folder: Path) -> Path:
    """Write the pipeline below ``folder``; return its file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiny_programs.py").write_text(PROGRAMS)
    file = folder / "tiny.py"
    file.write_text(PIPELINE)
    return file


def hold(folder: Path) -> None:
    """Let the training go no further than step 10."""
    (folder / "hold").touch()


def let_go(folder: Path) -> None:
    """Undo `hold`."""
    (folder / "hold").unlink()


def ran(folder: Path) -> list[str]:
    """Names of the programs that were executed, in order."""
    path = folder / "ran.txt"
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


def last_process(folder: Path) -> int:
    """Process id of the program that was started last."""
    return int((folder / "ran.txt").read_text().splitlines()[-1].split()[1])
