"""``tiphys checkpoint list``, ``show`` and ``diff``: what a run has saved, and what two of them differ in."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer
from rich.text import Text
from tiphys_controller import API_VERSION

from hera_pipelines.cli.location import StoreOption, existing_store
from hera_pipelines.cli.pins import Place, WhereArgument, find_checkpoint, find_lineage
from hera_pipelines.cli.screen import Format, Screen, local_time
from hera_pipelines.draw.reading import size_text
from tiphys.checkpoint.difference import Change, Difference, Pair, Statistics, difference, facts_of
from tiphys.errors import NotFoundError, ObjectMissingError, UsageError
from tiphys.lineage import CheckpointNode, Status, tree
from tiphys.lineage.quarantine import quarantined
from tiphys.lineage.verify import read_manifest
from tiphys.records import CheckpointManifest
from tiphys.store import Store

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
DIFF_EXAMPLES = """\b
Examples:
  tiphys checkpoint diff digits-7xk2p 2-1190 latest
  tiphys checkpoint diff digits-7xk2p/fit 2-1190 3-1200 --values
"""

WhichArgument = Annotated[
    str, typer.Argument(metavar="K-STEP", help="Attempt and global step, as in 3-1200; or latest, the newest to use.")
]
FormatOption = Annotated[Format, typer.Option("-o", "--format", help="Form of the output.")]


def list_checkpoints(
    context: typer.Context, where: WhereArgument, store: StoreOption = None, output: FormatOption = Format.TABLE
) -> None:
    """List the checkpoints of a run or of one step, oldest first, and what became of each."""
    screen: Screen = context.obj
    run, _, step = where.partition("/")
    found = tree(existing_store(screen, store), run)
    steps = [one for one in found.steps if step in ("", one.step, one.step.partition(".")[0])]
    if step and not steps:
        raise NotFoundError(f"run {run} has no training step {step!r} that keeps checkpoints")
    nodes = [(one.step, node) for one in steps for attempt in one.attempts for node in attempt.checkpoints]
    for one in steps:
        if one.note:
            screen.note(one.note)
    if output == Format.TABLE:
        columns = ("STEP", "CHECKPOINT", "STATUS", "SIZE", "COMMITTED", "METRICS")
        screen.table(columns, (_row(name, node) for name, node in nodes))
    else:
        listed = [{"step": name, "id": str(node.ref), **node.model_dump(mode="json")} for name, node in nodes]
        screen.document({"apiVersion": API_VERSION, "kind": "CheckpointList", "checkpoints": listed}, output)


def show(
    context: typer.Context,
    where: WhereArgument,
    which: WhichArgument,
    store: StoreOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show what a checkpoint was made with, by whom, from what, and how long it took."""
    screen: Screen = context.obj
    place, manifest = _read(existing_store(screen, store), where, which)
    barred = manifest.ref in quarantined(place.store, manifest.lineage)
    if output == Format.TABLE:
        rows = [(name, _text(value)) for name, value in _described(manifest, barred=barred)]
        screen.table(("FACT", "VALUE"), rows)
    else:
        document = {"apiVersion": API_VERSION, "kind": "Checkpoint", "id": str(manifest.ref), "quarantined": barred}
        screen.document({**document, **manifest.model_dump(mode="json")}, output)


def diff(
    context: typer.Context,
    where: WhereArgument,
    before: WhichArgument,
    after: WhichArgument,
    values: Annotated[bool, typer.Option("--values", help="Say how far the numbers of arrays lie apart.")] = False,
    store: StoreOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show what two checkpoints differ in: facts, metrics, and the arrays and values of their states.

    Arrays are compared by the hash of their bytes. Every byte is read and verified.
    """
    screen: Screen = context.obj
    given = existing_store(screen, store)
    (one, first), (other, second) = _read(given, where, before), _read(given, where, after)
    found = _difference((one.store, first), (other.store, second), values=values)
    if output != Format.TABLE:
        document = {"apiVersion": API_VERSION, "kind": "CheckpointDifference", **found.model_dump(mode="json")}
        screen.document(document, output)
        return
    rows = list(_differences(found))
    if rows:
        screen.table(("WHAT", str(found.before), str(found.after), "DIFFERENCE"), rows)
    if found.note:
        screen.note(f"arrays were not compared: {found.note}")
    else:
        screen.note(f"{found.same} arrays and values are equal, {len(found.changes)} differ")


def _difference(
    before: tuple[Store, CheckpointManifest], after: tuple[Store, CheckpointManifest], *, values: bool
) -> Difference:
    try:
        return difference(before, after, values=values)
    except ModuleNotFoundError as error:
        raise UsageError(f"--values needs {error.name}: install tiphys[numpy], or leave the option out") from error


def _read(store: Store, where: str, which: str) -> tuple[Place, CheckpointManifest]:
    place = _latest(store, where) if which == "latest" else find_checkpoint(store, where, which)
    try:
        return place, read_manifest(place.store, place.ref)
    except ObjectMissingError:
        raise NotFoundError(
            f"{place.ref.lineage} has no checkpoint {place.ref}; `tiphys checkpoint list {where}` shows all"
        ) from None


def _latest(store: Store, where: str) -> Place:
    """The newest checkpoint that an attempt may start from."""
    found = find_lineage(store, where)
    steps = (one for one in tree(store, where.partition("/")[0]).steps if one.step == found.step)
    nodes = [node for one in steps for attempt in one.attempts for node in attempt.checkpoints]
    usable = [node.ref for node in nodes if node.status is Status.COMMITTED]
    if not usable:
        raise NotFoundError(f"{found.name} has no checkpoint to use; `tiphys checkpoint list {where}` shows all")
    return Place(found.store, max(usable, key=lambda ref: (ref.attempt, ref.global_step)))


def _row(step: str, node: CheckpointNode) -> tuple[str | Text, ...]:
    style = "green" if node.status is Status.COMMITTED else "yellow"
    committed = local_time(node.committed_at) if node.committed_at else "-"
    size = size_text(node.size_bytes) if node.size_bytes else "-"
    told = ", ".join(f"{name} {value:.4g}" for name, value in node.metrics.items())
    return step, str(node.ref), Text(node.status, style=style), size, committed, told or node.reason or "-"


def _described(manifest: CheckpointManifest, *, barred: bool) -> Iterator[tuple[str, Any]]:
    yield "lineage", manifest.lineage
    yield "quarantined", "yes" if barred else "no"
    yield from facts_of(manifest).items()
    yield from ((f"metrics.{name}", value) for name, value in manifest.metrics.items())
    yield "parent", manifest.parent or "none"
    yield "restored", manifest.restored or "none"
    yield "committed", local_time(manifest.written_at)
    yield "size", f"{size_text(manifest.size_bytes)} in {len(manifest.shards)} shards"
    yield "stage_seconds", manifest.stage_seconds
    yield "upload_seconds", manifest.upload_seconds


def _differences(found: Difference) -> Iterator[tuple[str, ...]]:
    yield from _pairs("fact", found.facts)
    yield from _pairs("metric", found.metrics)
    size = found.size_bytes
    if size.before != size.after:
        yield "size", size_text(size.before), size_text(size.after), ""
    for change in found.changes:
        yield change.path, change.before or "-", change.after or "-", _far(change)


def _pairs(what: str, pairs: Iterable[Pair]) -> Iterator[tuple[str, ...]]:
    for pair in pairs:
        yield f"{what} {pair.name}", _text(pair.before), _text(pair.after), ""


def _far(change: Change) -> str:
    apart: Statistics | None = change.statistics
    if apart is None:
        return change.kind.value
    nans = f", {apart.not_finite} not finite" if apart.not_finite else ""
    return (
        f"{apart.changed} of {apart.total} differ, by at most {apart.largest:.4g}, {apart.mean:.4g} on average, "
        f"{apart.relative:.4g} of the norm{nans}"
    )


def _text(value: Any) -> str:
    return "-" if value is None else str(value)
