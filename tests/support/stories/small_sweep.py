"""A sweep of four small trainings, and the step behind it that takes the best.

Each trial saves after every step and leaves a line in ``ran`` beside its code.
While a file ``broken`` is there, the trial with ``lr`` 0.2 is killed after its second step.
"""

from pathlib import Path

PIPELINE = """
from pathlib import Path
from hera.workflows import Artifact, Parameter
from hera.workflows.models import ValueFrom
from hera_pipelines import Checkpoints, Pipeline, Retries, Step, Train, best, grid

HERE = str(Path(__file__).parent)
fit = Train(
    name="fit",
    image="tiny",
    command=["python", "-m", "sweep_trial", HERE],
    args=["{{inputs.parameters.lr}}", "{{inputs.parameters.width}}"],
    inputs=[Parameter(name="lr"), Parameter(name="width")],
    outputs=[Artifact(name="model", path="/tmp/model"), Parameter(name="loss", value_from=ValueFrom(path="/tmp/loss"))],
    checkpoints=Checkpoints(every="1 steps", keep_best="error:min"),
    retries=Retries(preemption=0, infrastructure=0, unknown=0),
)
with Pipeline("swept") as pipeline:
    trials = fit(sweep=grid(lr=[0.1, 0.2], width=[64, 128]), parallel=2)
    best(trials, metric="loss", mode="min")
"""

PROGRAM = """
import os
import signal
import sys
from pathlib import Path

from tiphys import checkpoint, outputs

here, lr, width = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
with checkpoint.session() as session:
    state = session.restore(default={"step": 0})
    with (here / "ran").open("a") as log:
        log.write(f"lr={lr} width={width} from {state['step']}\\n")
    while state["step"] < 3:
        state["step"] += 1
        session.step(state["step"], state, metrics={"error": lr * width / state["step"]})
        if state["step"] == 2 and (lr, width) == (0.2, 64) and (here / "broken").exists():
            session.flush()
            os.kill(os.getpid(), signal.SIGKILL)
outputs.path("model").write_text(f"model of lr {lr}, width {width}")
# The trial that is killed at first is the best, so that a choice without it differs.
outputs.path("loss").write_text(str(abs(lr - 0.2) + width / 1000))
"""


def write(folder: Path) -> Path:
    """Write the pipeline and its program below ``folder``; return the pipeline's file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sweep_trial.py").write_text(PROGRAM)
    (folder / "broken").touch()
    file = folder / "swept.py"
    file.write_text(PIPELINE)
    return file


def mend(folder: Path) -> None:
    """Let every trial come to its end from now on."""
    (folder / "broken").unlink()


def ran(folder: Path) -> list[str]:
    """What has run since the last time this was asked, in any order."""
    path = folder / "ran"
    lines = sorted(path.read_text().splitlines()) if path.exists() else []
    path.unlink(missing_ok=True)
    return lines
