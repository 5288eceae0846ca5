"""Step 3: train. Only the three lines with ``session`` concern checkpoints and resuming."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from safetensors.numpy import save_file

from hera_pipelines.demo.facts import open_step_log
from hera_pipelines.demo.network import DatasetSplit, TrainingState, accuracy, initial_state, read_split, sgd_step
from tiphys import checkpoint, inputs, outputs

REPORT_EVERY = 100


def train_network(
    split: DatasetSplit,
    state: TrainingState,
    session: checkpoint.Session,
    log_step: Callable[[int], None],
    total: int,
    batch: int,
) -> None:
    """Train ``state`` up to ``total`` steps."""
    while state["step"] < total:
        loss = sgd_step(state, split.train_images, split.train_labels, total, batch)
        log_step(state["step"])
        if state["step"] % REPORT_EVERY == 0:
            typer.echo(f"step {state['step']} of {total}: loss {loss:.4f}")
        session.step(state["step"], state, metrics={"loss": round(loss, 4)})


def main(
    seed: Annotated[int, typer.Option()],
    steps: Annotated[int, typer.Option()],
    batch: int = 192,
    hidden: int = 384,
    step_log: Annotated[str, typer.Option(help="Folder of the log of executed steps; empty for no log.")] = "",
) -> None:
    split = read_split(inputs.path("dataset"))
    with checkpoint.session(total_steps=steps) as session:
        state = session.restore(default=initial_state(seed, hidden))
        with open_step_log(Path(step_log) if step_log else None) as log_step:
            train_network(split, state, session, log_step, steps, batch)
    save_file({f"weight{index}": weight for index, weight in enumerate(state["weights"])}, outputs.path("model"))
    typer.echo(f"training accuracy {accuracy(state['weights'], split.train_images, split.train_labels):.4f}")


if __name__ == "__main__":
    typer.run(main)
