"""``tiphys sweep``: the trials of a sweep, the best one first."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

import typer
from rich.text import Text
from tiphys_controller import API_VERSION

from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import StoreOption, existing_store, must_be_named
from tiphys.errors import UsageError
from tiphys.lineage.trials import Sweep, Trial, TrialState, read_sweep
from tiphys.protocol.fan_out import value_text
from tiphys.records import utc_now

EXAMPLES = """\b
Examples:
  tiphys sweep digits-7xk2p
  tiphys sweep digits-7xk2p/fit --metric accuracy --mode max
  tiphys sweep digits-7xk2p -o json | jq '.best as $best | .trials[] | select(.step == $best).parameters'
"""
_STYLES = {
    TrialState.DONE: "green",
    TrialState.RUNNING: "cyan",
    TrialState.FAILED: "red",
    TrialState.INTERRUPTED: "yellow",
    TrialState.WAITING: "dim",
}


class Mode(StrEnum):
    """Which values of a metric are better."""

    MIN = "min"
    MAX = "max"


def sweep(
    context: typer.Context,
    where: Annotated[str, typer.Argument(metavar="RUN[/STEP]", help="Name of the run, and of its sweep if several.")],
    metric: Annotated[
        str | None,
        typer.Option(help="Metric to compare by. Otherwise the one that keep_best of the checkpoints names."),
    ] = None,
    mode: Annotated[Mode | None, typer.Option(help="Which values are better; min unless keep_best says so.")] = None,
    store: StoreOption = None,
    output: Annotated[Format, typer.Option("-o", "--format", help="Form of the list.")] = Format.TABLE,
) -> None:
    """List the trials of a sweep: parameters, state, metric, attempts and GPU-hours; the best one is marked.

    The metric is an output parameter of that name; while there is none, the
    best that the trial's checkpoints hold, as far as they are kept. `tiphys
    lineage RUN/TRIAL` shows the checkpoints of one.
    """
    screen: Screen = context.obj
    if mode is not None and metric is None:
        raise UsageError("--mode says which values of a metric are better; add --metric NAME")
    run, _, step = where.partition("/")
    place = existing_store(screen, store)
    found = read_sweep(place, run, step, metric, mode.value if mode else None, utc_now())
    if output is not Format.TABLE:
        document = {"apiVersion": API_VERSION, "kind": "Sweep", **found.model_dump(mode="json")}
        screen.document(document, output)
        return
    _table(screen, found)
    _tell(screen, found, f" --store {place.url}" if must_be_named(store) else "")


def _table(screen: Screen, found: Sweep) -> None:
    names = list(dict.fromkeys(name for trial in found.trials for name in trial.parameters))
    measured = (found.metric.upper(), "RECORDED BY") if found.metric else ()
    columns = ("BEST", "TRIAL", *names, "STATE", *measured, "ATTEMPTS", "GPU-HOURS", "MESSAGE")
    screen.table(columns, (_row(trial, found, names) for trial in found.trials))


def _row(trial: Trial, found: Sweep, names: Iterable[str]) -> list[str | Text]:
    given = [value_text(trial.parameters[name]) if name in trial.parameters else "" for name in names]
    measured = ["" if trial.value is None else f"{trial.value:.6g}", trial.value_from] if found.metric else []
    state = Text(trial.state, style=_STYLES[trial.state])
    mark = "*" if trial.step == found.best else ""
    return [mark, trial.step, *given, state, *measured, str(trial.attempts), f"{trial.gpu_hours:.2f}", trial.message]


def _tell(screen: Screen, found: Sweep, where: str) -> None:
    """What a person asks next; ``where`` says to another command which store it is."""
    counts = {state: sum(trial.state is state for trial in found.trials) for state in TrialState}
    parts = [f"{count} {state.lower()}" for state, count in counts.items() if count]
    screen.note(f"{len(found.trials)} trials: {', '.join(parts) or 'none has begun'}")
    if found.description:
        screen.note(found.description)
    if found.note:
        screen.note(found.note)
    known = sorted({name for trial in found.trials for name in trial.metrics})
    if found.metric and known and found.metric not in known:
        screen.note(f"no trial has recorded {found.metric!r}; recorded are: {', '.join(known)}")
    if not found.metric and known:
        screen.note(f"compare by a metric with --metric; recorded are: {', '.join(known)}")
    if found.best:
        screen.note(f"`tiphys lineage {found.run}/{found.best}{where}` shows the checkpoints of the best trial")
    if not counts[TrialState.RUNNING] and counts[TrialState.FAILED] + counts[TrialState.INTERRUPTED]:
        screen.note(f"`tiphys resume {found.run}{where}` runs what is not done")
