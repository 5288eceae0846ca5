"""``tiphys checkpoint``: commands for single checkpoints of a run.

``list`` and ``show`` print their facts; ``pin`` and ``unpin`` protect them from
retention.
"""

import getpass
import re
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import typer
from rich.text import Text

from hera_pipelines.cli.screen import Format, Screen, format_local_time
from hera_pipelines.cli.shared_options import FormatOption, RunStepArgument, StoreOption, existing_store, parse_run_step
from tiphys.errors import NotFoundError, ObjectMissingError, UsageError
from tiphys.lineage.quarantine import list_quarantined
from tiphys.lineage.retention.policy import pin_checkpoint, unpin_checkpoint
from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.step_names import selects_step
from tiphys.lineage.tree import CheckpointNode, CheckpointStatus, read_lineage_tree
from tiphys.lineage.validity import read_manifest
from tiphys.protocol.quantities import format_bytes
from tiphys.records import CheckpointManifest, CheckpointRef, task_name
from tiphys.store import Store, open_store

PIN_EXAMPLES = """\b
Examples:
  tiphys checkpoint pin digits-7xk2p 3-1200 --name release-1
  tiphys checkpoint pin 'sweep-1/fit[lr=0.1]' 1-500 --name baseline
"""
UNPIN_EXAMPLES = """\b
Examples:
  tiphys checkpoint unpin digits-7xk2p 3-1200 --name release-1
"""

CheckpointArgument = Annotated[str, typer.Argument(metavar="K-STEP", help="Attempt and global step, such as 3-1200.")]
PinNameOption = Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the pin, such as its purpose.")]


class LocatedCheckpoint(NamedTuple):
    """A checkpoint, and the store that holds it."""

    store: Store
    ref: CheckpointRef


class LocatedLineage(NamedTuple):
    """The lineage of one training step of a run, and the store that holds its checkpoints."""

    history: RunHistory
    store: Store
    step: str
    name: str


def pin(
    context: typer.Context,
    where: RunStepArgument,
    which: CheckpointArgument,
    name: PinNameOption,
    store: StoreOption = None,
) -> None:
    """Pin a checkpoint: retention keeps it until it is unpinned.

    A checkpoint may have several pins, each with its own name.
    """
    screen: Screen = context.obj
    checkpoint = find_checkpoint(existing_store(screen, store), where, which)
    pin_checkpoint(checkpoint.store, checkpoint.ref, name, by=_current_user())
    screen.note(f"checkpoint {checkpoint.ref} of {checkpoint.ref.lineage} is pinned as {name}")


def unpin(
    context: typer.Context,
    where: RunStepArgument,
    which: CheckpointArgument,
    name: PinNameOption,
    store: StoreOption = None,
) -> None:
    """Remove a pin from a checkpoint.

    The retention policy of the step then applies again: the next pass marks the
    checkpoint for deletion unless another rule keeps it.
    """
    screen: Screen = context.obj
    checkpoint = find_checkpoint(existing_store(screen, store), where, which)
    unpin_checkpoint(checkpoint.store, checkpoint.ref, name)
    screen.note(f"checkpoint {checkpoint.ref} of {checkpoint.ref.lineage} is no longer pinned as {name}")


def find_checkpoint(store: Store, where: str, which: str) -> LocatedCheckpoint:
    """Locate the checkpoint ``which`` of ``RUN`` or ``RUN/STEP``. The step is optional if the run has only one.

    The checkpoint itself need not exist.

    Raises:
        UsageError: ``which`` is not K-STEP, or the run has several training steps and none is named.
        NotFoundError: the run or the training step does not exist.
    """
    if not (numbers := re.fullmatch(r"(\d{1,9})-(\d{1,15})", which)):
        raise UsageError(f"{which!r} names no checkpoint: write attempt and global step, such as 3-1200")
    lineage = find_lineage(store, where)
    ref = CheckpointRef(lineage=lineage.name, attempt=int(numbers[1]), global_step=int(numbers[2]))
    return LocatedCheckpoint(lineage.store, ref)


def find_lineage(store: Store, where: str) -> LocatedLineage:
    """Locate the lineage of ``RUN`` or ``RUN/STEP``; raises as `find_checkpoint`."""
    history, selected = parse_run_step(store, where)
    run, names = history.run, history.names
    lineages = ((name, attempts[-1].claim.lineage) for name, attempts in history.read_attempts(step=selected).items())
    training = {name: lineage for name, lineage in lineages if lineage}
    if not training:
        missing = f"checkpoints of {names.name(selected)}" if selected else "training step that keeps checkpoints"
        raise NotFoundError(f"run {run} has no {missing}; `tiphys lineage {run}` shows all")
    if len(training) > 1:
        listed = ", ".join(f"'{run}/{names.name(name)}'" for name in names.sort(training))
        raise UsageError(f"run {run} has several training steps; name one: {listed}")
    [(name, lineage)] = training.items()
    volume = history.pipeline.checkpoint_volume_url(task_name(name))
    return LocatedLineage(history, open_store(volume, must_exist=True) if volume else store, name, lineage)


def _current_user() -> str:
    """Login name of the user; empty if the machine does not know it."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""


LIST_EXAMPLES = """\b
Examples:
  tiphys checkpoint list digits-7xk2p
  tiphys checkpoint list digits-7xk2p/fit -o json | jq '.checkpoints[] | select(.status == "committed")'
"""
SHOW_EXAMPLES = """\b
Examples:
  tiphys checkpoint show digits-7xk2p latest
  tiphys checkpoint show digits-7xk2p/fit 3-1200 -o json | jq .facts
"""

CheckpointOrLatestArgument = Annotated[
    str,
    typer.Argument(metavar="K-STEP", help="Attempt and global step, such as 3-1200; or latest, the newest usable one."),
]


def list_checkpoints(
    context: typer.Context, where: RunStepArgument, store: StoreOption = None, output: FormatOption = Format.TABLE
) -> None:
    """List the checkpoints of a run, oldest first, with status and size."""
    screen: Screen = context.obj
    history, selected = parse_run_step(existing_store(screen, store), where)
    run, names, tree = history.run, history.names, read_lineage_tree(history)
    steps = [step for step in tree.steps if selects_step(selected, step.step)]
    if selected and not steps:
        raise NotFoundError(f"run {run} has no checkpoints of {names.name(selected)}; `tiphys lineage {run}` shows all")
    nodes = [(step, node) for step in steps for attempt in step.attempts for node in attempt.checkpoints]
    for step in steps:
        if step.note:
            screen.note(step.note)
    if output == Format.TABLE:
        columns = ("STEP", "CHECKPOINT", "STATUS", "SIZE", "COMMITTED", "METRICS")
        rows = (_checkpoint_row(names.label(step.step), node) for step, node in nodes)
        screen.table(columns, rows, hide=("COMMITTED", "SIZE"))
    else:
        listed = [{"step": step.step, "id": str(node.ref), **node.model_dump(mode="json")} for step, node in nodes]
        screen.typed_document("CheckpointList", output, checkpoints=listed)


def show(
    context: typer.Context,
    where: RunStepArgument,
    which: CheckpointOrLatestArgument,
    store: StoreOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show one checkpoint: its code, machine, parent and save times."""
    screen: Screen = context.obj
    checkpoint, manifest = _read_checkpoint(existing_store(screen, store), where, which)
    is_quarantined = manifest.ref in list_quarantined(checkpoint.store, manifest.lineage)
    if output == Format.TABLE:
        rows = [
            (name, "-" if value is None else str(value))
            for name, value in _fact_rows(manifest, is_quarantined=is_quarantined)
        ]
        screen.table(("FACT", "VALUE"), rows, wraps=True)
    else:
        about = {"id": str(manifest.ref), "quarantined": is_quarantined}
        screen.typed_document("Checkpoint", output, **about, **manifest.model_dump(mode="json"))


def _read_checkpoint(store: Store, where: str, which: str) -> tuple[LocatedCheckpoint, CheckpointManifest]:
    checkpoint = _find_latest(store, where) if which == "latest" else find_checkpoint(store, where, which)
    try:
        return checkpoint, read_manifest(checkpoint.store, checkpoint.ref)
    except ObjectMissingError:
        raise NotFoundError(
            f"{checkpoint.ref.lineage} has no checkpoint {checkpoint.ref}; `tiphys checkpoint list {where}` shows all"
        ) from None


def _find_latest(store: Store, where: str) -> LocatedCheckpoint:
    """The newest checkpoint that an attempt may start from."""
    lineage = find_lineage(store, where)
    tree = read_lineage_tree(lineage.history)
    steps = (step for step in tree.steps if step.step == lineage.step)
    nodes = [node for step in steps for attempt in step.attempts for node in attempt.checkpoints]
    usable = [node.ref for node in nodes if node.status is CheckpointStatus.COMMITTED]
    if not usable:
        raise NotFoundError(f"{lineage.name} has no usable checkpoint; `tiphys checkpoint list {where}` shows all")
    return LocatedCheckpoint(lineage.store, max(usable, key=lambda ref: (ref.attempt, ref.global_step)))


def _checkpoint_row(step: str, node: CheckpointNode) -> tuple[str | Text, ...]:
    style = "green" if node.status is CheckpointStatus.COMMITTED else "yellow"
    committed = format_local_time(node.committed_at) if node.committed_at else "-"
    size = format_bytes(node.size_bytes) if node.size_bytes else "-"
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in node.metrics.items())
    return step, str(node.ref), Text(node.status, style=style), size, committed, metrics or node.reason or "-"


def _fact_rows(manifest: CheckpointManifest, *, is_quarantined: bool) -> Iterator[tuple[str, Any]]:
    yield "lineage", manifest.lineage
    yield "quarantined", "yes" if is_quarantined else "no"
    yield from _flatten_provenance(manifest)
    yield from ((f"metrics.{name}", value) for name, value in manifest.metrics.items())
    yield "parent", manifest.parent or "none"
    yield "restored", manifest.restored or "none"
    yield "committed", format_local_time(manifest.written_at)
    yield "size", f"{format_bytes(manifest.size_bytes)} in {len(manifest.shards)} shards"
    yield "stage_seconds", manifest.stage_seconds
    yield "upload_seconds", manifest.upload_seconds


def _flatten_provenance(manifest: CheckpointManifest) -> Iterator[tuple[str, Any]]:
    """The known facts about how a checkpoint came to be."""
    facts = manifest.facts.model_dump(mode="json")
    nested = {f"versions.{name}": version for name, version in facts.pop("versions").items()}
    nested |= {f"data_position.{name}": value for name, value in facts.pop("data_position").items()}
    own = {"global_step": manifest.global_step, "attempt": manifest.attempt, "framework": manifest.framework}
    flat = {**own, "saved_because": manifest.reason, **facts, **nested}
    return ((name, value) for name, value in flat.items() if value not in (None, ""))


app = typer.Typer(help="List, inspect and pin checkpoints of a run.", epilog=LIST_EXAMPLES, no_args_is_help=True)
app.command("list", epilog=LIST_EXAMPLES)(list_checkpoints)
app.command("show", epilog=SHOW_EXAMPLES)(show)
app.command("pin", epilog=PIN_EXAMPLES)(pin)
app.command("unpin", epilog=UNPIN_EXAMPLES)(unpin)
