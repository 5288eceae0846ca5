"""``tiphys demo``: see a training run survive, in less than a minute."""

import importlib.util
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from hera_pipelines.cli.commands.lineage import write_picture
from hera_pipelines.cli.screen import Screen
from hera_pipelines.demo.narration import Narrator, timeline_table
from tiphys.errors import ConflictError, UsageError
from tiphys.lineage import timeline, tree

EXAMPLES = """\b
Examples:
  tiphys demo
  tiphys demo --dir ./demo --seed 11
"""


def demo(
    context: typer.Context,
    directory: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="Empty folder for all it makes; else a temporary one.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Decides data split, weights and batches.", min=0)] = 7,
) -> None:
    """Train a digit classifier, kill it, corrupt it, lose its engine, and resume it to the very same bits.

    Real data, real learning, real processes; no cluster and no network. Exit
    code 1 if any promise is broken.
    """
    from hera_pipelines.demo.story import RUN, STEPS, Story  # imports Hera, for which no other command should wait

    screen: Screen = context.obj
    folder = _folder(directory)
    screen.note(f"everything the demo makes lies in {folder}")
    narrator = Narrator(screen.out)
    narrator.begin(
        "Two runs train a classifier of handwritten digits from the same seed. "
        "One is broken in every way; both must end with the same bits."
    )
    story = Story(folder, seed, narrator)
    result = story.perform()
    narrator.act(f"What happened to {RUN}, from its records:")
    screen.show(timeline_table(timeline(story.store, RUN)))
    picture = folder / "lineage.svg"
    write_picture(tree(story.store, RUN), picture)
    narrator.act("What it cost, and where to look:")
    narrator.seen(
        f"test accuracy {result.accuracy:.2%}; {result.seconds_lost:.1f} s passed until training was back where it was"
    )
    narrator.seen(f"picture of the lineage: {picture}")
    narrator.seen(f"more: tiphys get {RUN} --store {folder / 'store'}")
    narrator.verdict(
        f"{result.steps_again} of {STEPS} steps were executed again, and the two models are "
        f"bit-identical (sha256 {result.digest[:16]}…)."
    )


def _folder(given: Path | None) -> Path:
    if importlib.util.find_spec("sklearn") is None:
        raise UsageError("the demo needs scikit-learn for its data; install it with `pip install 'tiphys[demo]'`")
    if given is None:
        return Path(tempfile.mkdtemp(prefix="tiphys-demo-"))
    if given.exists() and (not given.is_dir() or any(given.iterdir())):
        raise ConflictError(f"{given} is not an empty folder; name another one, or remove it")
    return given.absolute()
