"""``tiphys cache``: the results that steps share between runs."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated

import typer
from rich.text import Text

from hera_pipelines.cli.screen import Format, Screen, format_local_time
from hera_pipelines.cli.shared_options import FormatOption, StoreOption, complete_run, existing_store
from tiphys.lineage.shared_results import SharedResult, SharedResultFilter, drop_shared_result, list_shared_results
from tiphys.protocol.quantities import parse_duration_seconds
from tiphys.records import utc_now
from tiphys.store.runs import read_concurrently

DROP_EXAMPLES = """\b
Examples:
  tiphys cache drop
  tiphys cache drop --pipeline digits --step prep --yes
  tiphys cache drop --older-than 30d -o json | jq -r '.results[].run'
"""

app = typer.Typer(
    help="Show and drop results that steps share between runs.", epilog=DROP_EXAMPLES, no_args_is_help=True
)


@app.command("drop", epilog=DROP_EXAMPLES)
def drop(
    context: typer.Context,
    pipeline: Annotated[str, typer.Option("--pipeline", metavar="NAME", help="Only of runs of this pipeline.")] = "",
    run: Annotated[
        str, typer.Option("--run", metavar="RUN", help="Only of this run.", autocompletion=complete_run)
    ] = "",
    step: Annotated[
        str, typer.Option("--step", metavar="STEP", help="Only of this step, or of this item, such as 'fit[2]'.")
    ] = "",
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="DURATION", help="Only shared longer ago, such as 2h or 30d.")
    ] = "",
    damaged: Annotated[bool, typer.Option("--damaged", help="Only those whose record cannot be read.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Drop them. Without it, only show what would be dropped.")] = False,
    store: StoreOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Drop shared results, so that the next run computes its own.

    A step with share=True offers its result to other runs; a dropped result is no
    longer offered. Nothing is dropped without --yes. Outputs stay: runs that took them
    over still have them, and `tiphys runs rm` deletes them with the run that made them.
    A resume or fork of that run still reuses them; `resume --from STEP` does not.
    """
    screen: Screen = context.obj
    shared_before = utc_now() - timedelta(seconds=parse_duration_seconds(older_than)) if older_than else None
    chosen_store = existing_store(screen, store)
    results = list_shared_results(chosen_store, SharedResultFilter(pipeline, run, step, shared_before, damaged))
    if yes:
        read_concurrently(lambda result: drop_shared_result(chosen_store, result), results)
    if output is Format.TABLE:
        _show_results(screen, results, yes)
        return
    rows = [{**row._asdict(), "shared_at": row.shared_at.isoformat() if row.shared_at else None} for row in results]
    screen.typed_document("SharedResultDrop", output, store=chosen_store.url, dry_run=not yes, results=rows)


def _show_results(screen: Screen, results: Sequence[SharedResult], done: bool) -> None:
    if not results:
        screen.note("no shared result matches; a step shares its result with share=True")
        return
    state = Text("dropped" if done else "would be dropped", style="red")
    rows = [
        (
            result.step,
            result.run,
            result.pipeline,
            format_local_time(result.shared_at) if result.shared_at else "",
            state,
            result.damage,
        )
        for result in results
    ]
    screen.table(("STEP", "RUN", "PIPELINE", "SHARED", "STATE", "WHY"), rows, hide=("PIPELINE", "SHARED"), wraps=True)
    if not done:
        screen.note("nothing was dropped; add --yes to drop")
