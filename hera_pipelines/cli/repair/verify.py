"""``tiphys verify``: compares the objects of a run in storage with their records."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import FormatOption, RunStepArgument, StoreOption, existing_store, parse_run_step
from tiphys.errors import IntegrityError
from tiphys.lineage.audit.audit import audit_run, quarantine_damaged
from tiphys.lineage.audit.findings import AuditFinding, AuditReport
from tiphys.protocol.quantities import format_bytes
from tiphys.records import CheckpointRef
from tiphys.store import Store

EXAMPLES = """\b
Examples:
  tiphys verify digits-7xk2p
  tiphys verify digits-7xk2p/fit --deep
  tiphys verify 'digits-7xk2p/fit[2]'
  tiphys verify digits-7xk2p --deep --quarantine
  tiphys verify digits-7xk2p --deep -o json | jq '.damage[] | .key'
"""

ByteCounter = Callable[[int], None]


def verify(
    context: typer.Context,
    what: RunStepArgument,
    deep: Annotated[bool, typer.Option("--deep", help="Read and hash every byte, not only records and sizes.")] = False,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", metavar="N", min=1, help="Reading threads for --deep. Default: one per core."),
    ] = None,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="Quarantine damaged checkpoints, so that no attempt loads them.")
    ] = False,
    store: StoreOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Verify a run's records, checkpoints and outputs.

    Compares sizes with the records and, with --deep, the hash of every byte. Exit
    code 5 if an object is damaged whose checkpoint was not in quarantine before.
    """
    screen: Screen = context.obj
    run_store = existing_store(screen, store)
    run, step, name_of = _find_step(run_store, what)
    with _progress(screen, shown=deep) as (begin, advance):
        report = audit_run(
            run_store, run, step, deep=deep, threads=jobs or os.cpu_count(), on_total_bytes=begin, on_bytes_read=advance
        )
    newly_quarantined = quarantine_damaged(run_store, report) if quarantine else []
    if output == Format.TABLE:
        _show(screen, report, name_of)
    else:
        quarantined = [ref.model_dump(mode="json") for ref in newly_quarantined]
        fields = {**report.model_dump(mode="json"), "newly_quarantined": quarantined}
        screen.typed_document("Audit", output, sound=report.is_sound, **fields)
    for note in report.notes:
        screen.note(note)
    screen.note(_summary(report))
    if newly_quarantined:
        screen.note(f"put in quarantine: {', '.join(_format_checkpoint(ref) for ref in newly_quarantined)}")
    if not report.is_sound:
        count = sum(not finding.barred for finding in report.damage)
        objects = "1 object does" if count == 1 else f"{count} objects do"
        raise IntegrityError(f"{what}: {objects} not match the records; the findings say what to do")


def _find_step(store: Store, what: str) -> tuple[str, str, Callable[[str], str]]:
    """Run and step id that ``RUN[/STEP]`` names, and a function that names steps for people."""
    try:
        history, step = parse_run_step(store, what)
    except IntegrityError:  # a damaged Workflow is a finding, not the end of the audit
        run, _, step = what.partition("/")
        return run, step, str
    return history.run, step, history.names.name


@contextmanager
def _progress(screen: Screen, *, shown: bool) -> Iterator[tuple[ByteCounter, ByteCounter]]:
    """Yield two callbacks: one for the total number of bytes, one for the bytes read since the last call."""
    columns = (
        TextColumn("verifying"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    is_hidden = not shown or screen.quiet or not screen.err.is_terminal
    with Progress(*columns, console=screen.err, disable=is_hidden, transient=True) as progress:
        task = progress.add_task("verifying", total=None)
        yield (
            lambda total: progress.update(task, total=total),
            lambda count: progress.advance(task, count),
        )


def _show(screen: Screen, report: AuditReport, name_of: Callable[[str], str]) -> None:
    if report.damage:
        screen.table(
            ("DAMAGED", "STEP", "BYTES", "OBJECT, FAULT, REMEDY"),
            (_damage_row(finding, name_of(finding.step)) for finding in report.damage),
            wraps=True,
        )
    if report.quarantined:
        rows = [
            (_format_checkpoint(entry.checkpoint), entry.checkpoint.lineage, entry.by, entry.reason)
            for entry in report.quarantined
        ]
        screen.table(("QUARANTINED", "LINEAGE", "BY", "REASON"), rows, hide=("BY",), wraps=True)


def _damage_row(finding: AuditFinding, step: str) -> tuple[str | Text, ...]:
    checkpoint = f" of checkpoint {finding.checkpoint}" if finding.checkpoint else ""
    style = "dim" if finding.barred else "bold red"
    layer = Text(f"{finding.layer}{checkpoint}", style=style)
    return layer, step, finding.damaged_bytes, f"{finding.key}\n{finding.fault}\n→ {finding.remedy}"


def _summary(report: AuditReport) -> str:
    depth = "every byte was read" if report.deep else "records and sizes were compared; --deep reads every byte"
    size = format_bytes(report.size_bytes)
    return (
        f"{report.checkpoints} checkpoints and {report.attempts} attempts of {report.run}, {report.objects} objects, "
        f"{size}: {len(report.damage)} damaged, {len(report.quarantined)} in quarantine; {depth}"
    )


def _format_checkpoint(ref: CheckpointRef) -> str:
    return f"checkpoint {ref.global_step} of attempt {ref.attempt}"
