"""``tiphys verify``: is everything that a run relies on what was recorded?"""

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
from tiphys_controller import API_VERSION

from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import StoreOption, existing_store
from tiphys.errors import IntegrityError
from tiphys.lineage.audit.audit import audit, bar
from tiphys.lineage.audit.findings import Audit, Damage
from tiphys.records import CheckpointRef

EXAMPLES = """\b
Examples:
  tiphys verify digits-7xk2p
  tiphys verify digits-7xk2p/fit --deep
  tiphys verify digits-7xk2p --deep --quarantine
  tiphys verify digits-7xk2p --deep -o json | jq '.damage[] | .key'
"""

Told = Callable[[int], None]


def verify(
    context: typer.Context,
    what: Annotated[str, typer.Argument(metavar="RUN[/STEP]", help="Name of the run, and of a step to look at alone.")],
    deep: Annotated[bool, typer.Option("--deep", help="Read and hash every byte, not only records and sizes.")] = False,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", metavar="N", min=1, help="Threads that read with --deep; else one for each core."),
    ] = None,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="Bar checkpoints that are found damaged from being loaded.")
    ] = False,
    store: StoreOption = None,
    output: Annotated[Format, typer.Option("-o", "--format", help="Form of the findings.")] = Format.TABLE,
) -> None:
    """Compare a run's records, checkpoints and outputs with what was recorded about them.

    Exit code 5 if anything is damaged that was not in quarantine before.
    """
    screen: Screen = context.obj
    run, _, step = what.partition("/")
    place = existing_store(screen, store)
    with _progress(screen, shown=deep) as (begin, advance):
        found = audit(place, run, step, deep=deep, jobs=jobs or os.cpu_count(), begin=begin, advance=advance)
    barred = bar(place, found) if quarantine else []
    if output == Format.TABLE:
        _show(screen, found)
    else:
        screen.document(_document(found, barred), output)
    for note in found.notes:
        screen.note(note)
    screen.note(_summary(found))
    if barred:
        screen.note(f"put in quarantine: {', '.join(_words(ref) for ref in barred)}")
    if not found.sound:
        wrong = sum(not one.barred for one in found.damage)
        objects = "1 object" if wrong == 1 else f"{wrong} objects"
        raise IntegrityError(f"{what}: {objects} did not match what was recorded; the findings say what to do")


@contextmanager
def _progress(screen: Screen, *, shown: bool) -> Iterator[tuple[Told, Told]]:
    """Callbacks for the number of bytes there are, and for those that were read."""
    columns = (
        TextColumn("verifying"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    hidden = not shown or screen.quiet or not screen.err.is_terminal
    with Progress(*columns, console=screen.err, disable=hidden, transient=True) as progress:
        task = progress.add_task("verifying", total=None)
        yield (
            lambda total: progress.update(task, total=total),
            lambda count: progress.advance(task, count),
        )


def _show(screen: Screen, found: Audit) -> None:
    if found.damage:
        screen.table(("DAMAGED", "STEP", "BYTES", "WHERE, WHY, WHAT TO DO"), (_row(one) for one in found.damage))
    if found.quarantined:
        rows = [(_words(one.checkpoint), one.checkpoint.lineage, one.by, one.reason) for one in found.quarantined]
        screen.table(("QUARANTINED", "LINEAGE", "BY", "REASON"), rows)


def _row(one: Damage) -> tuple[str | Text, ...]:
    checkpoint = f" of checkpoint {one.checkpoint}" if one.checkpoint else ""
    style = "dim" if one.barred else "bold red"
    what = Text(f"{one.layer}{checkpoint}", style=style)
    return what, one.step, one.damaged_bytes, f"{one.key}\n{one.fault}\n→ {one.remedy}"


def _summary(found: Audit) -> str:
    how = "every byte was read" if found.deep else "records and sizes were compared; --deep reads every byte"
    return (
        f"{found.checkpoints} checkpoints and {found.attempts} attempts of {found.run}, {found.objects} objects, "
        f"{found.size_bytes} bytes: {len(found.damage)} damaged, {len(found.quarantined)} in quarantine; {how}"
    )


def _document(found: Audit, barred: list[CheckpointRef]) -> dict[str, object]:
    return {
        "apiVersion": API_VERSION,
        "kind": "Audit",
        "sound": found.sound,
        **found.model_dump(mode="json"),
        "newly_quarantined": [ref.model_dump(mode="json") for ref in barred],
    }


def _words(ref: CheckpointRef) -> str:
    return f"checkpoint {ref.global_step} of attempt {ref.attempt}"
