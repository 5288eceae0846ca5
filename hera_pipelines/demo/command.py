"""``tiphys demo``: shows in less than a minute how a training run survives faults."""

import importlib.util
import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from hera_pipelines.cli.screen import Screen
from tiphys.errors import ConflictError, UsageError, install_command

EXAMPLES = """\b
Examples:
  tiphys demo
  tiphys demo --dir ./demo --seed 11
"""


def demo(
    context: typer.Context,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="Empty folder for all files of the demo. Default: a temporary one."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of data split, weights and batches.", min=0)] = 7,
) -> None:
    """Train a digit classifier, break it, and resume it bit by bit.

    The demo kills the trainer, damages a checkpoint and kills the engine; the
    resumed run must end with the same bits as an undisturbed one. Data, training
    and processes are real; neither a cluster nor a network is needed. Exit code 1
    if a guarantee does not hold.
    """
    from hera_pipelines.demo.story import DemoScenario  # imports Hera, which takes half a second

    screen: Screen = context.obj
    folder = _demo_folder(directory)
    screen.note(f"all files of the demo are in {folder}")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # its engines end with it
    DemoScenario(folder, seed, screen.out).run()


def _demo_folder(directory: Path | None) -> Path:
    if importlib.util.find_spec("sklearn") is None:
        raise UsageError(f"the demo needs scikit-learn for its data; install it with `{install_command('demo')}`")
    if directory is None:
        return Path(tempfile.mkdtemp(prefix="tiphys-demo-"))
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConflictError(f"{directory} is not an empty folder; name another one, or remove it")
    return directory.absolute()
