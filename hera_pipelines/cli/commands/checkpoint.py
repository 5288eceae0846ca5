"""``tiphys checkpoint list``, ``show`` and ``diff``: what a run has saved, and what two of them differ in.

``tiphys checkpoint pin`` and ``unpin``: what retention must leave alone.

``tiphys checkpoint advice``: what saving has cost a run, and how often it had better saved.

``tiphys checkpoint``: what can be done with one checkpoint of a run.
"""

import getpass
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, NamedTuple

import typer
from rich.text import Text
from tiphys_controller import API_VERSION

from hera_pipelines.cli.screen import Format, Screen, local_time
from hera_pipelines.cli.shared_options import StoreOption, existing_store
from hera_pipelines.draw.lineage_graph import size_text
from tiphys.checkpoint.restore.inspect import Change, Difference, Pair, Statistics, difference, facts_of
from tiphys.checkpoint.save.interval import Advice, advise
from tiphys.checkpoint.settings import Bounds
from tiphys.errors import IntegrityError, NotFoundError, ObjectMissingError, UsageError
from tiphys.lineage import CheckpointNode, Status, tree
from tiphys.lineage.quarantine import quarantined
from tiphys.lineage.retention import policy as pins
from tiphys.lineage.select import commits_of
from tiphys.lineage.validity import read_manifest
from tiphys.protocol.compiled_workflow import CompiledPipeline
from tiphys.records import CheckpointManifest, CheckpointRef
from tiphys.store import Store, all_attempts, current_workflow, open_store, step_attempts
from tiphys.store.runs import concurrently

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


EXAMPLES = """\b
Examples:
  tiphys checkpoint advice digits-7xk2p
  tiphys checkpoint advice digits-7xk2p/fit -o json | jq .advised_seconds
"""


def advice(
    context: typer.Context,
    where: WhereArgument,
    store: StoreOption = None,
    output: Annotated[Format, typer.Option("-o", "--format", help="Form of the output.")] = Format.TABLE,
) -> None:
    """Compare how often a training step saved with what would have lost the least time.

    From measured stalls and uploads and the recorded ends of attempts, by Daly's
    estimate. `Checkpoints(every="auto")` follows the same numbers while it trains.
    """
    screen: Screen = context.obj
    given = existing_store(screen, store)
    found = find_lineage(given, where)
    run = where.partition("/")[0]
    manifests = _manifests(found.store, found.name)
    if not manifests:
        raise NotFoundError(f"{found.name} has no checkpoint yet, so nothing was measured; ask again after a save")
    judged = advise(manifests, step_attempts(given, run, found.step), _bounds(given, run, found.step))
    if output == Format.TABLE:
        screen.table(("FACT", "VALUE"), _rows(judged))
        screen.note(_verdict(judged))
    else:
        document = {"apiVersion": API_VERSION, "kind": "CheckpointAdvice", "run": run, "step": found.step}
        screen.document({**document, **judged.model_dump(mode="json")}, output)


def _manifests(store: Store, lineage: str) -> list[CheckpointManifest]:
    def read(ref: CheckpointRef) -> CheckpointManifest | None:
        try:
            return read_manifest(store, ref)
        except (IntegrityError, ObjectMissingError):
            return None  # `tiphys verify` tells of these

    return [manifest for manifest in concurrently(read, commits_of(store, lineage)) if manifest]


def _bounds(store: Store, run: str, step: str) -> Bounds | None:
    """Those that the author set for ``auto``."""
    spec = CompiledPipeline.from_manifest(current_workflow(store, run)).steps.get(step.partition(".")[0])
    asked = spec.checkpoints.every_bounds if spec and spec.checkpoints else None
    return Bounds(*asked) if asked else None


def _rows(judged: Advice) -> Iterator[tuple[str, str]]:
    yield "saves", str(judged.saves)
    yield "stall", f"{judged.stall_seconds:.3f} s"
    yield "upload", f"{judged.upload_seconds:.1f} s"
    yield "size", size_text(judged.size_bytes)
    yield "bandwidth", f"{size_text(round(judged.bytes_per_second))}/s" if judged.bytes_per_second else "unknown"
    yield "failures", ", ".join(f"{cause} {count}" for cause, count in sorted(judged.failures.items())) or "none"
    yield "training", _time(judged.training_seconds)
    yield "between failures", f"{_time(judged.mtbf_seconds)} (expected)"
    yield "restart", _time(judged.restart_seconds)
    yield "used interval", _time(judged.used_seconds) if judged.used_seconds else "unknown"
    yield "advised interval", _time(judged.advised_seconds)
    for name, share in (("lost as used", judged.lost_share), ("lost as advised", judged.advised_lost_share)):
        yield name, "unknown" if share is None else f"{share:.1%}"


def _verdict(judged: Advice) -> str:
    best = _time(judged.advised_seconds)
    if judged.used_seconds is None:
        return f"a save every {best} would lose the least time"
    if abs(judged.used_seconds - judged.advised_seconds) <= 0.2 * judged.advised_seconds:
        return "the interval is as good as it gets"
    word = "rarer" if judged.used_seconds < judged.advised_seconds else "more frequent"
    return f"{word} saves would lose less time: Checkpoints(every='{round(judged.advised_seconds)}s'), or every='auto'"


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


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


app = typer.Typer(help="Single checkpoints of a run: look at them, compare them, keep one.", no_args_is_help=True)
app.command("list", epilog=LIST_EXAMPLES)(list_checkpoints)
app.command("show", epilog=SHOW_EXAMPLES)(show)
app.command("diff", epilog=DIFF_EXAMPLES)(diff)
app.command("pin", epilog=PIN_EXAMPLES)(pin)
app.command("unpin", epilog=UNPIN_EXAMPLES)(unpin)
app.command("advice", epilog=EXAMPLES)(advice)
