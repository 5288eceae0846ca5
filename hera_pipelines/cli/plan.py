"""``tiphys plan``: what would run, and why."""

import shlex
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.text import Text
from tiphys_controller import PlanReport, plan_run

from hera_pipelines.cli.changes import FromOption
from hera_pipelines.cli.location import StoreOption, existing_store
from hera_pipelines.cli.screen import Format, Screen

PLAN_EXAMPLES = """\b
Examples:
  tiphys plan digits-7xk2p
  tiphys plan digits-7xk2p --from fit
  tiphys plan digits-7xk2p -o json | jq '.steps[] | select(.decision == "run")'
"""

_STYLES = {"skip": "dim", "run": "bold cyan"}


def plan(
    context: typer.Context,
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    again: FromOption = None,
    store: StoreOption = None,
    output: Annotated[Format, typer.Option("-o", "--format", help="Form of the plan.")] = Format.TABLE,
) -> None:
    """Show what a resume would run and what it would skip, and why. Reads storage and writes nothing."""
    screen: Screen = context.obj
    report = plan_run(existing_store(screen, store), run, again or ())
    show_plan(screen, report, output)
    if report.running:
        words = [word for step in again or () for word in ("--from", step)]
        screen.note(f"next: {shlex.join(['tiphys', 'resume', run, *words])}")


def show_plan(screen: Screen, report: PlanReport, output: Format) -> None:
    """Print the plan to stdout, and what it took to make it to stderr."""
    if output == Format.TABLE:
        screen.table(("STEP", "KIND", "DECISION", "REASON"), _rows(report))
    else:
        screen.document(report.model_dump(mode="json", by_alias=True), output)
    screen.note(
        f"{len(report.running)} of {len(report.steps)} steps would run; "
        f"{report.requests} requests to storage, {report.seconds:.2f} s"
    )


def _rows(report: PlanReport) -> Iterator[tuple[str | Text, ...]]:
    for step in report.steps:
        yield step.name, step.kind, Text(step.decision, style=_STYLES[step.decision]), step.reason
        for item in step.items:
            yield f"  {item.step}", "item", "done" if item.done else "run", item.reason
