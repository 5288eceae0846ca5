"""``tiphys sweep``: lists the trials of a sweep and marks the best one."""

import shlex
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

import typer
from rich.text import Text

from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import (
    FormatOption,
    StoreOption,
    complete_run_step,
    existing_store,
    store_arguments,
)
from tiphys.errors import UsageError
from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.trials import SweepReport, Trial, TrialState, read_sweep
from tiphys.protocol.fan_out import format_item_value
from tiphys.records import utc_now

EXAMPLES = """\b
Examples:
  tiphys sweep digits-7xk2p
  tiphys sweep digits-7xk2p/fit --metric accuracy --mode max
  tiphys sweep digits-7xk2p -o json | jq '.best as $best | .trials[] | select(.step == $best).parameters'
"""
_TRIAL_STYLES = {
    TrialState.DONE: "green",
    TrialState.RUNNING: "cyan",
    TrialState.FAILED: "red",
    TrialState.INTERRUPTED: "yellow",
    TrialState.WAITING: "dim",
}


def sweep(
    context: typer.Context,
    where: Annotated[
        str,
        typer.Argument(
            metavar="RUN[/STEP]",
            help="Name of the run, and of a sweep if it has several.",
            autocompletion=complete_run_step,
        ),
    ],
    metric: Annotated[
        str | None, typer.Option(help="Metric to compare by. Default: the metric of the checkpoints' keep_best.")
    ] = None,
    mode: Annotated[
        Literal["min", "max"] | None, typer.Option(help="Which values are better. Default: keep_best's mode, then min.")
    ] = None,
    store: StoreOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """List the trials of a sweep, and mark the best one.

    The value of a metric is the trial's output parameter of that name; before that
    output exists, the best value in the trial's remaining checkpoints. `tiphys
    lineage RUN/TRIAL` shows the checkpoints of one trial.
    """
    screen: Screen = context.obj
    if mode is not None and metric is None:
        raise UsageError("--mode says which values of a metric are better; add --metric NAME")
    run, _, step = where.partition("/")
    run_store = existing_store(screen, store)
    history = RunHistory.for_display(run_store, run)
    report = read_sweep(history, step, metric, mode, utc_now())
    if output is not Format.TABLE:
        screen.typed_document("Sweep", output, **report.model_dump(mode="json"))
        return
    _show_trials(screen, report)
    _show_sweep_notes(screen, report, store_arguments(run_store, store))


def _show_trials(screen: Screen, report: SweepReport) -> None:
    names = list(dict.fromkeys(name for trial in report.trials for name in trial.parameters))
    metric_columns = (report.metric.upper(), "RECORDED BY") if report.metric else ()
    columns = ("BEST", "TRIAL", *names, "STATE", *metric_columns, "ATTEMPTS", "GPU-HOURS", "MESSAGE")
    screen.table(
        columns,
        (_trial_row(trial, report, names) for trial in report.trials),
        hide=("RECORDED BY", "GPU-HOURS", "ATTEMPTS"),
    )


def _trial_row(trial: Trial, report: SweepReport, names: Iterable[str]) -> list[str | Text]:
    parameters = [format_item_value(trial.parameters[name]) if name in trial.parameters else "" for name in names]
    metric_cells = ["" if trial.value is None else f"{trial.value:.6g}", trial.value_from] if report.metric else []
    state = Text(trial.state, style=_TRIAL_STYLES[trial.state])
    mark = "*" if trial.step == report.best else ""
    return [
        mark,
        trial.name,
        *parameters,
        state,
        *metric_cells,
        str(trial.attempts),
        f"{trial.gpu_hours:.2f}",
        trial.message,
    ]


def _show_sweep_notes(screen: Screen, report: SweepReport, store_option: Sequence[str]) -> None:
    """Print a summary and the next commands; ``store_option`` is their ``--store`` option, or empty."""
    counts = {state: sum(trial.state is state for trial in report.trials) for state in TrialState}
    parts = [f"{count} {state.lower()}" for state, count in counts.items() if count]
    screen.note(f"{len(report.trials)} trials: {', '.join(parts) or 'none has started'}")
    if report.description:
        screen.note(report.description)
    if report.note:
        screen.note(report.note)
    recorded = sorted({name for trial in report.trials for name in trial.metrics})
    if report.metric and recorded and report.metric not in recorded:
        screen.note(f"no trial has recorded {report.metric!r}; recorded are: {', '.join(recorded)}")
    if not report.metric and recorded:
        screen.note(f"compare by a metric with --metric; recorded are: {', '.join(recorded)}")
    if report.best:
        best = next(trial.name for trial in report.trials if trial.step == report.best)
        lineage = shlex.join(["tiphys", "lineage", f"{report.run}/{best}", *store_option])
        screen.note(f"`{lineage}` shows the checkpoints of the best trial")
    if not counts[TrialState.RUNNING] and counts[TrialState.FAILED] + counts[TrialState.INTERRUPTED]:
        screen.note(f"`{shlex.join(['tiphys', 'resume', report.run, *store_option])}` runs the unfinished trials")
