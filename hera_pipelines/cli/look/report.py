"""``tiphys report``: the cost of failures, as tables, documents or an HTML page."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.text import Text
from tiphys_controller.goodput import RECOVERY_PARTS, TimeUsage, group_by_queue, measure_time_usage
from tiphys_controller.run_phase import find_last_sign_of_life

from hera_pipelines.cli.look.gpu_costs import show_gpu_costs
from hera_pipelines.cli.screen import Format, Screen, format_local_time
from hera_pipelines.cli.shared_options import StoreOption, choose_format, complete_run, existing_store
from hera_pipelines.cli.target import find_local_workflows, is_on_cluster
from hera_pipelines.draw.report_html import NONE, format_share, format_time, report_page, summarize_usage, time_unit
from tiphys.errors import UsageError
from tiphys.lineage.attempt_phases import TimePhase
from tiphys.lineage.run_history import RunHistory
from tiphys.records import utc_now
from tiphys.store import Store, list_runs

EXAMPLES = """\b
Examples:
  tiphys report digits-7xk2p
  tiphys report digits-7xk2p -o html --output report.html
  tiphys report                       # every run of the store, and every queue
  tiphys report -o json | jq '.queues[] | {name, goodput}'
  tiphys report --by namespace --since 2026-11 -n team-a -n team-b --queues queues.yaml
"""


def report(
    context: typer.Context,
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN", help="Names of runs. Default: all runs.", autocompletion=complete_run),
    ] = None,
    store: StoreOption = None,
    output: Annotated[
        Literal["table", "wide", "json", "yaml", "html"],
        typer.Option(
            "-o",
            "--format",
            callback=choose_format,
            help="Output format; html is a self-contained page with plots of one run.",
        ),
    ] = "table",
    output_file: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write the page to this file instead of stdout.")
    ] = None,
    by: Annotated[
        Literal["namespace"] | None,
        typer.Option("--by", help="GPU hours and their cost by namespace and month, in its place."),
    ] = None,
    since: Annotated[
        str, typer.Option("--since", metavar="TIME", help="With --by: begin at this month, day or time before now.")
    ] = "",
    namespaces: Annotated[
        list[str] | None,
        typer.Option(
            "-n", "--namespace", metavar="NAME", help="With --by: a namespace, in the place of {namespace} in the URL."
        ),
    ] = None,
    queues: Annotated[
        Path | None, typer.Option("--queues", metavar="FILE", help="With --by: queue file, for its gpu_prices.")
    ] = None,
) -> None:
    """Report what failures cost: goodput, lost training, recovery.

    Goodput is the share of useful training in what was useful or lost to failures;
    training is useful if the result builds on it. Times are weighted by GPUs.
    """
    screen: Screen = context.obj
    if by is not None:
        if runs or output == "html":
            raise UsageError("--by counts all runs, and has no page; drop the names of runs and -o html")
        show_gpu_costs(screen, store, namespaces or (), since, queues, Format(output))
        return
    if since or namespaces or queues:
        raise UsageError("--since, --namespace and --queues are for --by namespace; add it, or drop them")
    if output == "html" and (not runs or len(runs) != 1):
        raise UsageError("a page shows one run; name it, such as `tiphys report digits-7xk2p -o html`")
    if output_file and output != "html":
        raise UsageError("--output is for the page; add -o html, or redirect stdout")
    run_store = existing_store(screen, store)
    now = utc_now()
    usages = [_measure(screen, run_store, run, now) for run in runs or list_runs(run_store)]
    for damaged in (message for usage in usages for message in usage.damaged):
        screen.note(f"damaged, so the report is incomplete: {damaged}")
    if output == "table":
        _show_tables(screen, usages)
    elif output == "html":
        [usage] = usages
        page = report_page(f"What failures have cost {usage.name}", list(summarize_usage(usage)), usage)
        screen.save(output_file, page, "page")
    else:
        by_queue = [
            {**_cost_document(usage), "steps": [step.step for step in usage.steps]} for usage in group_by_queue(usages)
        ]
        screen.typed_document("Report", Format(output), runs=[*map(_cost_document, usages)], queues=by_queue)


def _measure(screen: Screen, store: Store, run: str, now: datetime) -> TimeUsage:
    """The time usage of a run; a note says if its engine on this machine is gone, and recorded no end."""
    history = RunHistory.for_display(store, run)
    last, lost_at = history.last_submission, None
    if last is not None and last.end is None and not is_on_cluster(last):
        with suppress(UsageError):  # it ran on another machine, and may still do
            lost_at = find_last_sign_of_life(last, find_local_workflows(last, run))
    if lost_at is not None:
        screen.note(
            f"run {run}: its engine is gone and recorded no end; what was open counts until its last sign of life, "
            f"{format_local_time(lost_at)}, as interrupted"
        )
    return measure_time_usage(history, now, lost_at=lost_at)


def _show_tables(screen: Screen, usages: Sequence[TimeUsage]) -> None:
    if len(usages) == 1:
        _show_run(screen, usages[0])
        return
    screen.table(["RUN", *_SUMMARY_COLUMNS], [[usage.name, *_summary_cells(usage)] for usage in usages])
    if queues := group_by_queue(usages):
        screen.write("")
        screen.table(["QUEUE", *_SUMMARY_COLUMNS], [[usage.name, *_summary_cells(usage)] for usage in queues])


def _show_run(screen: Screen, usage: TimeUsage) -> None:
    phases = [phase for phase in TimePhase if usage.gpu_seconds(phase)]
    has_items = any(step.item for step in usage.steps)
    header = [
        "STEP",
        *(["ITEM"] if has_items else []),
        "GPUS",
        "ATTEMPTS",
        "SPAN",
        *(_column_title(phase.value) for phase in phases),
        "WAITING",
        "LOST",
        "GOODPUT",
    ]
    rows: list[Sequence[str | Text]] = []
    for step in usage.steps:
        step_usage = TimeUsage(name=step.step, steps=(step,))
        times = (format_time(step.seconds(phase)) for phase in phases)
        waiting = format_time(max(0.0, step.elapsed_seconds - step.held_seconds))
        gpus = str(step.gpus) if step.gpus else NONE
        rows.append(
            [
                step.name,
                *([step.item] if has_items else []),
                gpus,
                str(len(step.entries)),
                format_time(step.elapsed_seconds),
                *times,
                waiting,
                format_time(step.lost_seconds),
                format_share(step_usage.goodput),
            ]
        )
    screen.table(header, rows, hide=[*map(_column_title, _DETAIL_PHASES), "WAITING", "GPUS", "SPAN"])
    if usage.costs:
        screen.write("")
        screen.table(
            ["ENDED BY", "TIMES", f"{time_unit(usage)} LOST".upper(), "TOTAL RECOVERY"], list(_cost_rows(usage))
        )
    if any(step.recoveries for step in usage.steps):
        screen.write("")
        screen.table(
            ["AFTER", "ENDED BY", *map(_column_title, RECOVERY_PARTS), "RECOVERY"], list(_recovery_rows(usage))
        )
    screen.write("")
    screen.show(Text(", ".join(f"{name} {value}" for name, value in summarize_usage(usage))))


def _cost_rows(usage: TimeUsage) -> Iterator[list[str]]:
    for cause, cost in usage.costs.items():
        yield [cause.replace("_", " "), str(cost.failures), format_time(cost.lost), format_time(cost.recovery)]


def _recovery_rows(usage: TimeUsage) -> Iterator[list[str]]:
    for step in usage.steps:
        for recovery in step.recoveries:
            parts = (format_time(getattr(recovery, part)) for part in RECOVERY_PARTS)
            yield [
                f"{step.name}/{recovery.after}",
                recovery.failed_by.replace("_", " "),
                *parts,
                format_time(recovery.seconds),
            ]


_DETAIL_PHASES = [phase for phase in TimePhase if phase is not TimePhase.USEFUL]
_SUMMARY_COLUMNS = ("STEPS", "FAILURES", "GPU TIME HELD", "USEFUL", "LOST", "GOODPUT")


def _summary_cells(usage: TimeUsage) -> list[str]:
    times = (
        usage.held_gpu_seconds,
        usage.gpu_seconds(TimePhase.USEFUL),
        usage.lost_gpu_seconds,
    )
    return [str(len(usage.steps)), str(usage.failures), *map(format_time, times), format_share(usage.goodput)]


def _cost_document(usage: TimeUsage) -> dict[str, Any]:
    return {
        "name": usage.name,
        "goodput": usage.goodput,
        "lost_gpu_seconds": usage.lost_gpu_seconds,
        "gpu_seconds": {
            "held": usage.held_gpu_seconds,
            **{phase.value: usage.gpu_seconds(phase) for phase in TimePhase},
        },
        "costs": {cause: cost.model_dump(mode="json") for cause, cost in usage.costs.items()},
        "steps": [step.model_dump(mode="json") for step in usage.steps],
    }


def _column_title(name: str) -> str:
    return name.replace("_", " ").upper()
