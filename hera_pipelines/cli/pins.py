"""``tiphys checkpoint pin`` and ``unpin``: what retention must leave alone."""

import getpass
import re
from typing import Annotated, NamedTuple

import typer

from hera_pipelines.cli.location import StoreOption, existing_store
from hera_pipelines.cli.screen import Screen
from tiphys.errors import NotFoundError, UsageError
from tiphys.lineage import pins
from tiphys.protocol.pipeline import CompiledPipeline
from tiphys.records import CheckpointRef
from tiphys.store import Store, all_attempts, current_workflow, open_store

PIN_EXAMPLES = """\b
Examples:
  tiphys checkpoint pin digits-7xk2p 3-1200 --name release-1
  tiphys checkpoint pin sweep-1/fit.0a1b2c3d4e5f.0 1-500 --name baseline
"""
UNPIN_EXAMPLES = """\b
Examples:
  tiphys checkpoint unpin digits-7xk2p 3-1200 --name release-1
"""

WhereArgument = Annotated[str, typer.Argument(metavar="RUN[/STEP]", help="The run, and which of its training steps.")]
PinnedArgument = Annotated[str, typer.Argument(metavar="K-STEP", help="Attempt and global step, as in 3-1200.")]
NameOption = Annotated[str, typer.Option("--name", metavar="NAME", help="What it is kept for.")]


class Place(NamedTuple):
    """A checkpoint, and the store that holds it."""

    store: Store
    ref: CheckpointRef


class Lineage(NamedTuple):
    """The checkpoints of one training step, and the store that holds them."""

    store: Store
    step: str
    name: str


def pin(
    context: typer.Context, where: WhereArgument, which: PinnedArgument, name: NameOption, store: StoreOption = None
) -> None:
    """Keep a checkpoint until it is unpinned, whatever else is kept. It may have several pins."""
    screen: Screen = context.obj
    place = find_checkpoint(existing_store(screen, store), where, which)
    pins.pin(place.store, place.ref, name, by=_person())
    screen.note(f"checkpoint {place.ref} of {place.ref.lineage} is pinned as {name}")


def unpin(
    context: typer.Context, where: WhereArgument, which: PinnedArgument, name: NameOption, store: StoreOption = None
) -> None:
    """Take a pin away; what the step keeps anyway stays, the rest is marked by the next pass of retention."""
    screen: Screen = context.obj
    place = find_checkpoint(existing_store(screen, store), where, which)
    pins.unpin(place.store, place.ref, name)
    screen.note(f"checkpoint {place.ref} of {place.ref.lineage} is no longer pinned as {name}")


def find_checkpoint(store: Store, where: str, which: str) -> Place:
    """The checkpoint ``which`` of ``RUN`` or ``RUN/STEP``; a step may be left out where there is only one.

    Raises:
        UsageError: ``which`` is not K-STEP, or the step must be named.
        NotFoundError: there is no such run or training step.
    """
    if not (number := re.fullmatch(r"(\d{1,9})-(\d{1,15})", which)):
        raise UsageError(f"{which!r} names no checkpoint: write attempt and global step, such as 3-1200")
    found = find_lineage(store, where)
    ref = CheckpointRef(lineage=found.name, attempt=int(number[1]), global_step=int(number[2]))
    return Place(found.store, ref)


def find_lineage(store: Store, where: str) -> Lineage:
    """The lineage of ``RUN`` or ``RUN/STEP``; raises like `find_checkpoint`."""
    run, _, step = where.partition("/")
    pipeline = CompiledPipeline.from_manifest(current_workflow(store, run))
    lineages = {name: tries[-1].claim.lineage for name, tries in all_attempts(store, run).items()}
    training = {name: lineage for name, lineage in lineages.items() if lineage and step in ("", name)}
    if not training:
        what = f"training step {step}" if step else "training step"
        raise NotFoundError(f"run {run} has no {what} that keeps checkpoints; `tiphys lineage {run}` shows all")
    if len(training) > 1:
        names = ", ".join(f"{run}/{name}" for name in sorted(training))
        raise UsageError(f"run {run} has several training steps; name one: {names}")
    [(name, lineage)] = training.items()
    volume = pipeline.volume(name.partition(".")[0])
    return Lineage(open_store(volume, must_exist=True) if volume else store, name, lineage)


def _person() -> str:
    """Who runs the command, as far as the machine knows."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""
