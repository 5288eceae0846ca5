"""``tiphys checkpoint``: commands for single checkpoints of a run.

``list``, ``show`` and ``diff`` inspect and compare checkpoints; ``pin`` and
``unpin`` protect them from retention; ``advice`` compares the measured save
interval with the best one.
"""

import getpass
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, NamedTuple

import typer
from rich.text import Text
from tiphys_controller import API_VERSION

from hera_pipelines.cli.screen import Format, Screen, format_local_time
from hera_pipelines.cli.shared_options import FormatOption, RunStepArgument, StoreOption, existing_store, parse_run_step
from tiphys.checkpoint.restore.inspect import (
    ArrayStatistics,
    CheckpointDifference,
    LeafDifference,
    ValueDifference,
    compare_checkpoints,
    flatten_provenance,
)
from tiphys.checkpoint.save.interval import IntervalAdvice, IntervalLimit, advise_interval
from tiphys.checkpoint.settings import AUTO_BOUNDS, IntervalBounds
from tiphys.errors import IntegrityError, NotFoundError, ObjectMissingError, UsageError
from tiphys.lineage import CheckpointNode, CheckpointStatus, RunHistory, read_lineage_tree
from tiphys.lineage.quarantine import list_quarantined
from tiphys.lineage.retention.policy import pin_checkpoint, unpin_checkpoint
from tiphys.lineage.select import list_commits
from tiphys.lineage.step_names import selects_step
from tiphys.lineage.validity import read_manifest
from tiphys.protocol.compiled_workflow import CompiledPipeline
from tiphys.protocol.quantities import format_bytes, format_duration
from tiphys.records import CheckpointManifest, CheckpointRef, task_name
from tiphys.store import Store, open_store
from tiphys.store.runs import read_concurrently

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


EXAMPLES = """\b
Examples:
  tiphys checkpoint advice digits-7xk2p
  tiphys checkpoint advice digits-7xk2p/fit -o json | jq .advised_seconds
"""


def advice(
    context: typer.Context,
    where: RunStepArgument,
    store: StoreOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Compare the save interval of a step with the best one.

    The best interval loses the least time by Daly's estimate, from the measured
    stalls and uploads and the recorded failures. `Checkpoints(every="auto")` uses
    the same estimate during training.
    """
    screen: Screen = context.obj
    run_store = existing_store(screen, store)
    lineage = find_lineage(run_store, where)
    manifests = _read_manifests(lineage.store, lineage.name)
    if not manifests:
        raise NotFoundError(
            f"{lineage.name} has no checkpoint yet, so nothing was measured; repeat the command after a save"
        )
    attempts = lineage.history.read_attempts(step=lineage.step)[lineage.step]
    result = advise_interval(manifests, attempts, _author_bounds(lineage.history.pipeline, lineage.step))
    if output == Format.TABLE:
        screen.table(("FACT", "VALUE"), _advice_rows(result), wraps=True)
        screen.note(_advice_sentence(result))
    else:
        document = {
            "apiVersion": API_VERSION,
            "kind": "CheckpointAdvice",
            "run": lineage.history.run,
            "step": lineage.step,
        }
        screen.document({**document, **result.model_dump(mode="json")}, output)


def _read_manifests(store: Store, lineage: str) -> list[CheckpointManifest]:
    def read(ref: CheckpointRef) -> CheckpointManifest | None:
        try:
            return read_manifest(store, ref)
        except (IntegrityError, ObjectMissingError):
            return None  # `tiphys verify` reports damaged manifests

    return [manifest for manifest in read_concurrently(read, list_commits(store, lineage)) if manifest]


def _author_bounds(pipeline: CompiledPipeline, step: str) -> IntervalBounds | None:
    """Bounds that the author set for ``every="auto"``; None without bounds."""
    spec = pipeline.steps.get(task_name(step))
    bounds = spec.checkpoints.every_bounds if spec and spec.checkpoints else None
    return IntervalBounds(*bounds) if bounds else None


def _advice_rows(result: IntervalAdvice) -> Iterator[tuple[str, str]]:
    yield "saves", str(result.saves)
    yield "stall", format_duration(result.stall_seconds)
    yield "upload", format_duration(result.upload_seconds)
    yield "size", format_bytes(result.size_bytes)
    yield "bandwidth", f"{format_bytes(round(result.bytes_per_second))}/s" if result.bytes_per_second else "unknown"
    yield "failures", ", ".join(f"{cause} {count}" for cause, count in sorted(result.failures.items())) or "none"
    yield "training", format_duration(result.training_seconds)
    yield "between failures", f"{format_duration(result.mtbf_seconds)} (expected)"
    yield "restart", format_duration(result.restart_seconds)
    yield "used interval", format_duration(result.used_seconds) if result.used_seconds else "unknown"
    limit = f" ({format_duration(result.daly_seconds)} without {_LIMITS[result.limit]})" if result.limit else ""
    yield "advised interval", f"{format_duration(result.advised_seconds)}{limit}"
    for name, share in (("lost as used", result.lost_share), ("lost as advised", result.advised_lost_share)):
        yield name, "unknown" if share is None else f"{share:.1%}"


_LIMITS = {IntervalLimit.BOUNDS: "the bounds of the step", IntervalLimit.UPLOAD: "the time of an upload"}


def _advice_sentence(result: IntervalAdvice) -> str:
    """Judge the used interval by the share of the training that it loses, not by its length."""
    used, best = result.lost_share, result.advised_lost_share
    if result.used_seconds is None:
        return f"a save every {format_duration(result.advised_seconds)} would lose the least time"
    if best is None:
        return "failures come so often that no interval lets the training advance; see FAILURES for their causes"
    if used is not None and used <= best + max(_SMALL_SHARE, _SMALL_GAIN * best):
        return f"the interval is good: it loses {used:.1%} of the training, the advised one {best:.1%}"
    lowest, highest = AUTO_BOUNDS
    automatic = ", or every='auto'" if lowest <= result.advised_seconds <= highest else ""
    comparison = "rarer" if result.used_seconds < result.advised_seconds else "more frequent"
    return (
        f"{comparison} saves would lose less time: {best:.1%} of the training instead of "
        f"{'all of it' if used is None else format(used, '.1%')}; "
        f"set Checkpoints(every='{max(1, round(result.advised_seconds))}s'){automatic}"
    )


_SMALL_GAIN, _SMALL_SHARE = 0.1, 0.001
"""An interval is good if a better one saves no more than this share of the lost time, or of the training."""


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
        screen.document({"apiVersion": API_VERSION, "kind": "CheckpointList", "checkpoints": listed}, output)


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
        rows = [(name, _format_value(value)) for name, value in _fact_rows(manifest, is_quarantined=is_quarantined)]
        screen.table(("FACT", "VALUE"), rows, wraps=True)
    else:
        document = {
            "apiVersion": API_VERSION,
            "kind": "Checkpoint",
            "id": str(manifest.ref),
            "quarantined": is_quarantined,
        }
        screen.document({**document, **manifest.model_dump(mode="json")}, output)


def diff(
    context: typer.Context,
    where: RunStepArgument,
    before: CheckpointOrLatestArgument,
    after: CheckpointOrLatestArgument,
    values: Annotated[bool, typer.Option("--values", help="Measure how far array values differ.")] = False,
    store: StoreOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Compare two checkpoints: facts, metrics, arrays and values.

    Arrays are compared by the hash of their bytes. Every byte is read and verified.
    """
    screen: Screen = context.obj
    run_store = existing_store(screen, store)
    first, first_manifest = _read_checkpoint(run_store, where, before)
    second, second_manifest = _read_checkpoint(run_store, where, after)
    difference = _compute_difference((first.store, first_manifest), (second.store, second_manifest), values=values)
    if output != Format.TABLE:
        document = {"apiVersion": API_VERSION, "kind": "CheckpointDifference", **difference.model_dump(mode="json")}
        screen.document(document, output)
        return
    rows = list(_difference_rows(difference))
    if rows:
        screen.table(("WHAT", str(difference.before), str(difference.after), "DIFFERENCE"), rows)
    if difference.note:
        screen.note(f"arrays were not compared: {difference.note}")
    else:
        screen.note(f"{difference.same} arrays and values are equal, {len(difference.changes)} differ")


def _compute_difference(
    before: tuple[Store, CheckpointManifest], after: tuple[Store, CheckpointManifest], *, values: bool
) -> CheckpointDifference:
    try:
        return compare_checkpoints(before, after, values=values)
    except ModuleNotFoundError as error:
        raise UsageError(f"--values needs {error.name}: install tiphys[numpy], or leave the option out") from error


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
    yield from flatten_provenance(manifest).items()
    yield from ((f"metrics.{name}", value) for name, value in manifest.metrics.items())
    yield "parent", manifest.parent or "none"
    yield "restored", manifest.restored or "none"
    yield "committed", format_local_time(manifest.written_at)
    yield "size", f"{format_bytes(manifest.size_bytes)} in {len(manifest.shards)} shards"
    yield "stage_seconds", manifest.stage_seconds
    yield "upload_seconds", manifest.upload_seconds


def _difference_rows(difference: CheckpointDifference) -> Iterator[tuple[str, ...]]:
    yield from _pair_rows("fact", difference.facts)
    yield from _pair_rows("metric", difference.metrics)
    size = difference.size_bytes
    if size.before != size.after:
        yield "size", format_bytes(size.before), format_bytes(size.after), ""
    for change in difference.changes:
        yield change.path, change.before or "-", change.after or "-", _format_change(change)


def _pair_rows(what: str, pairs: Iterable[ValueDifference]) -> Iterator[tuple[str, ...]]:
    for pair in pairs:
        yield f"{what} {pair.name}", _format_value(pair.before), _format_value(pair.after), ""


def _format_change(change: LeafDifference) -> str:
    statistics: ArrayStatistics | None = change.statistics
    if statistics is None:
        return change.kind.value
    nans = f", {statistics.not_finite} not finite" if statistics.not_finite else ""
    return (
        f"{statistics.changed} of {statistics.total} differ, by at most {statistics.largest:.4g}, "
        f"{statistics.mean:.4g} on average, {statistics.relative:.4g} of the norm{nans}"
    )


def _format_value(value: Any) -> str:
    return "-" if value is None else str(value)


app = typer.Typer(
    help="List, inspect, compare and pin checkpoints of a run.", epilog=LIST_EXAMPLES, no_args_is_help=True
)
app.command("list", epilog=LIST_EXAMPLES)(list_checkpoints)
app.command("show", epilog=SHOW_EXAMPLES)(show)
app.command("diff", epilog=DIFF_EXAMPLES)(diff)
app.command("pin", epilog=PIN_EXAMPLES)(pin)
app.command("unpin", epilog=UNPIN_EXAMPLES)(unpin)
app.command("advice", epilog=EXAMPLES)(advice)
