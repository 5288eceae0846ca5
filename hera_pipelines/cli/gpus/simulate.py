"""``tiphys simulate``: replays a trace of jobs under a queue file, to test quotas before they apply.

Shows one replay as a table, or compares the replays of two queue files.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text
from tiphys_plugin import load_queues
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.simulation.jobs import PreemptionCosts, ReplayResult, Trace, TraceJob
from tiphys_plugin.quota.simulation.prepare import (
    assign_by_quota,
    assign_to_queue,
    check_queue_names,
    declare_job_durations,
    select_common_jobs,
    spread_over_nodes,
)
from tiphys_plugin.quota.simulation.replay import POLICIES, replay_jobs
from tiphys_plugin.quota.simulation.results import QueueOutcome, SimulationOutcome, measure_replay
from tiphys_plugin.quota.simulation.trace import read_trace

from hera_pipelines.authoring.policies import resolve_duration
from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import FormatOption
from hera_pipelines.draw.simulation_svg import render_simulation_svg
from tiphys.errors import UsageError
from tiphys.protocol.quantities import format_duration

_NONE = "-"
_OPTIONAL_MEASURES = ("REJECTED", "NOT STARTED", "PREEMPTED", "LOST")
_ALL = "all"
MeasureValue = float | None
MeasureUnit = Literal["count", "time", "factor", "share"]
"""Unit of a measure; it decides the format of a value and of a change."""


class SimulationMeasure(NamedTuple):
    """One measure of a replay: its column title, its unit, and its value for a queue."""

    name: str
    unit: MeasureUnit
    extract: Callable[[QueueOutcome], MeasureValue]


def _wait_statistic(name: str) -> Callable[[QueueOutcome], MeasureValue]:
    return lambda outcome: None if outcome.wait is None else attrgetter(name)(outcome.wait)


MEASURES = (
    SimulationMeasure("JOBS", "count", lambda outcome: outcome.jobs),
    SimulationMeasure("REJECTED", "count", lambda outcome: sum(outcome.rejected.values())),
    SimulationMeasure("NOT STARTED", "count", lambda outcome: outcome.waiting),
    SimulationMeasure("MEAN WAIT", "time", _wait_statistic("mean")),
    SimulationMeasure("P50", "time", _wait_statistic("p50")),
    SimulationMeasure("P90", "time", _wait_statistic("p90")),
    SimulationMeasure("P99", "time", _wait_statistic("p99")),
    SimulationMeasure("MAX", "time", _wait_statistic("most")),
    SimulationMeasure("JCT", "time", lambda outcome: outcome.completion_seconds),
    SimulationMeasure("SLOWDOWN", "factor", lambda outcome: outcome.slowdown),
    SimulationMeasure("GPU-HOURS", "count", lambda outcome: outcome.gpu_hours),
    SimulationMeasure("BORROWED", "count", lambda outcome: outcome.borrowed_gpu_hours),
    SimulationMeasure("OF QUOTA", "share", lambda outcome: outcome.quota_utilisation),
    SimulationMeasure("PREEMPTED", "count", lambda outcome: outcome.preemptions),
    SimulationMeasure("LOST", "count", lambda outcome: outcome.lost_gpu_hours),
    SimulationMeasure("MAX WAITING", "count", lambda outcome: outcome.longest_line),
)


def outcome_table(outcome: SimulationOutcome) -> tuple[list[str], list[list[str | Text]]]:
    """Header and rows: one row per queue, and one for all queues. Optional measures appear only if they are not 0."""
    shown = [
        measure for measure in MEASURES if measure.name not in _OPTIONAL_MEASURES or measure.extract(outcome.total)
    ]
    rows: list[list[str | Text]] = [
        [queue.queue or _ALL, *(format_measure(measure.unit, measure.extract(queue)) for measure in shown)]
        for queue in (*outcome.queues, outcome.total)
    ]
    rows[-1] = [Text(str(cell), style="bold") for cell in rows[-1]]
    return ["QUEUE", *(measure.name for measure in shown)], rows


def comparison_rows(before: SimulationOutcome, after: SimulationOutcome) -> Iterator[Sequence[str | Text]]:
    """One row for each measure of each queue: before, after, and the change; includes queues of one side only."""
    old = {outcome.queue: outcome for outcome in (*before.queues, before.total)}
    new = {outcome.queue: outcome for outcome in (*after.queues, after.total)}
    for queue in [*dict.fromkeys(name for name in [*old, *new] if name is not None), None]:
        for measure in MEASURES:
            pair = [measure.extract(side[queue]) if queue in side else None for side in (old, new)]
            if any(pair) or measure is MEASURES[0]:
                queue_cell = (queue or _ALL) if measure is MEASURES[0] else ""
                yield (
                    queue_cell,
                    measure.name.lower(),
                    *(format_measure(measure.unit, value) for value in pair),
                    _format_change(measure.unit, *pair),
                )


def summary_facts(outcome: SimulationOutcome) -> Iterator[tuple[str, MeasureUnit, MeasureValue]]:
    """Measures of the whole replay: name, unit, value."""
    yield "from first submission to last end", "time", outcome.span_seconds
    if outcome.inventory_utilisation is not None:
        yield "inventory in use", "share", outcome.inventory_utilisation
    for cohort, index in outcome.fairness.items():
        yield f"fairness in cohort {cohort} (Jain)", "factor", index


def format_measure(unit: MeasureUnit, value: MeasureValue) -> str:
    """Format a value in its unit; ``-`` for no value."""
    if value is None:
        return _NONE
    if unit == "time":
        return format_duration(value)
    if unit == "share":
        return f"{value:.1%}"
    return f"{value:,.0f}" if unit == "count" else f"{value:,.2f}"


def _format_change(unit: MeasureUnit, before: MeasureValue, after: MeasureValue) -> str:
    if before is None or after is None or format_measure(unit, before) == format_measure(unit, after):
        return ""
    if unit == "count":
        return f"{after - before:+,.0f}"
    if unit == "share":
        return f"{100 * (after - before):+.1f} points"
    return f"{after / before - 1:+.0%}" if before else ""


EXAMPLES = """\b
Examples:
  tiphys simulate jobs.csv --queues queues.yaml
  tiphys simulate jobs.csv --queues queues.yaml --against proposed.yaml --plot both.svg
  tiphys simulate jobs.csv --queues queues.yaml --queue research --declare-durations
  tiphys simulate jobs.csv --queues queues.yaml --checkpoint-every 30m --save-seconds 60
  tiphys simulate jobs.csv --queues queues.yaml --policy skip -o json | jq '.replays[0].total.wait'

\b
A trace, with the last eight columns optional:
  submit_seconds,duration_seconds,gpus,queue,gpu_type,speed,priority,name,limit_seconds,spot,namespace
  0,7200,8,research,H100|A100,2.5|1,0,pretrain,10800,allowed,vision
"""


def simulate(
    context: typer.Context,
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="CSV file with one job per line.")],
    queues: Annotated[Path, typer.Option("--queues", metavar="FILE", help="Queue file to test.")],
    against: Annotated[
        Path | None, typer.Option("--against", metavar="FILE", help="Second queue file to compare with the first.")
    ] = None,
    policy: Annotated[
        Literal["tiphys", "fifo", "skip"],
        typer.Option(
            "--policy", help="fifo: strictly in order of arrival; skip: any job that fits, without reservations."
        ),
    ] = "tiphys",
    queue: Annotated[
        str | None,
        typer.Option("--queue", metavar="NAME", help="Queue of jobs that name none. Default: drawn by quotas."),
    ] = None,
    declare_durations: Annotated[
        bool, typer.Option("--declare-durations", help="Treat each job's duration as known in advance.")
    ] = False,
    checkpoint_every: Annotated[
        str, typer.Option("--checkpoint-every", metavar="TIME", help="Training time between checkpoints, such as 10m.")
    ] = "10m",
    save_seconds: Annotated[
        float, typer.Option("--save-seconds", min=0, help="Seconds from a preemption to the end of the job.")
    ] = PreemptionCosts.save_seconds,
    restart_seconds: Annotated[
        float, typer.Option("--restart-seconds", min=0, help="Seconds from a new grant of GPUs to training.")
    ] = PreemptionCosts.restart_seconds,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed for drawing queues.")] = 0,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Write an SVG picture of GPUs held and waited for.")
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Replay a trace of jobs under the quotas of a queue file.

    The replay uses the scheduling rules of the service; it starts no jobs and needs
    no cluster. Jobs without a queue go to --queue, or are drawn over the queues in
    proportion to their quotas. A preempted job saves, waits for GPUs and continues
    from its last checkpoint, with the times of --checkpoint-every, --save-seconds
    and --restart-seconds.
    """
    screen: Screen = context.obj
    files = {path: load_queues(path) for path in (queues, against) if path is not None}
    job_trace = read_trace(trace)
    prepared = _prepare_jobs(job_trace, files, queue, declare_durations, seed)
    jobs = select_common_jobs(prepared, list(files.values()))
    if not jobs and prepared:
        raise UsageError(f"{queues} and {against} admit no job of {trace} both; make the quotas of one of them larger")
    costs = PreemptionCosts(_parse_checkpoint_interval(checkpoint_every), save_seconds, restart_seconds)

    def replay(path: Path, rules: Queues) -> ReplayResult:
        with _progress(screen, len(jobs), f"replaying {path}") as advance:
            own_costs = costs if policy == "tiphys" else None
            return replay_jobs(rules, spread_over_nodes(jobs, rules), POLICIES[policy], advance, own_costs)

    replays = {path: replay(path, rules) for path, rules in files.items()}
    outcomes = {path: measure_replay(result) for path, result in replays.items()}
    if output is Format.TABLE:
        _show_outcomes(screen, outcomes)
    else:
        about = {"policy": policy, "seed": seed, "costs": asdict(costs), "trace": _trace_document(trace, job_trace)}
        documents = [{"queue_file": str(path), **_to_json_types(asdict(found))} for path, found in outcomes.items()]
        screen.typed_document("Simulation", output, **about, replays=documents)
    if left_out := len(prepared) - len(jobs):
        screen.note(f"left out: {_format_count(left_out, 'job')} that only one of the files admits")
    for note in _notes(job_trace, jobs, outcomes, drawn=queue is None, seed=seed):
        screen.note(note)
    if plot:
        screen.save(plot, _draw(f"{trace.name}, policy {policy}", jobs, replays), "picture")


def _parse_checkpoint_interval(checkpoint_every: str) -> float:
    """Seconds between two checkpoints."""
    every = resolve_duration(checkpoint_every, "--checkpoint-every")
    if every <= 0:
        raise UsageError(f"--checkpoint-every {checkpoint_every}: the time must be longer than 0, such as 10m")
    return every


def _prepare_jobs(
    trace: Trace, files: Mapping[Path, Queues], queue: str | None, declare_durations: bool, seed: int
) -> tuple[TraceJob, ...]:
    rules = list(files.values())
    if queue is None:
        jobs = assign_by_quota(trace.jobs, rules[0], seed)
    else:
        jobs = trace.jobs
        for queues in rules:  # raises if one of the files does not have the queue
            jobs = assign_to_queue(jobs, queues, queue)
    for path, queues in files.items():
        check_queue_names(jobs, queues, f"queue file {path}")
    return declare_job_durations(jobs) if declare_durations else jobs


@contextmanager
def _progress(screen: Screen, total: int, text: str) -> Iterator[Callable[[int], None]]:
    """Yield a callback for the number of jobs started or rejected since the last call."""
    columns = (TextColumn(text), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    is_hidden = screen.quiet or not screen.err.is_terminal
    with Progress(*columns, console=screen.err, disable=is_hidden, transient=True) as progress:
        task = progress.add_task(text, total=total)
        yield lambda count: progress.advance(task, count)


def _show_outcomes(screen: Screen, outcomes: dict[Path, SimulationOutcome]) -> None:
    first, *others = outcomes.values()
    if not others:
        screen.table(*outcome_table(first))
        for name, unit, value in summary_facts(first):
            screen.note(f"{name}: {format_measure(unit, value)}")
        return
    screen.table(("QUEUE", "MEASURE", *map(str, outcomes), "CHANGE"), comparison_rows(first, others[0]))
    for path, outcome in outcomes.items():
        facts = (f"{name} {format_measure(unit, value)}" for name, unit, value in summary_facts(outcome))
        ran = f"ran {outcome.total.started} of {_format_count(outcome.total.jobs, 'job')}"
        screen.note(f"{path}: {', '.join((ran, *facts))}")


def _notes(
    trace: Trace, jobs: Sequence[TraceJob], outcomes: dict[Path, SimulationOutcome], *, drawn: bool, seed: int
) -> Iterator[str]:
    for reason, count in trace.skipped.items():
        yield f"left out: {_format_count(count, 'row')} {reason}"
    if trace.ignored:
        yield f"ignored columns: {', '.join(trace.ignored)}"
    if drawn and (unassigned := sum(job.queue is None for job in trace.jobs)):
        yield (
            f"{_format_count(unassigned, 'job')} without a queue drawn over the queues by their quotas, "
            f"with seed {seed}"
        )
    if cut_short := sum(job.is_cut_short for job in jobs):
        yield f"{_format_count(cut_short, 'job')} ended at limit_seconds, before the duration was over"
    for path, outcome in outcomes.items():
        reasons = Counter({reason.value: count for reason, count in outcome.total.rejected.items()})
        for reason, count in reasons.most_common():
            yield f"{path}: {_format_count(count, 'job')} rejected: {reason}"
        if outcome.total.waiting:
            yield f"{path}: {_format_count(outcome.total.waiting, 'job')} never started: the queue is stopped"


def _draw(title: str, jobs: Sequence[TraceJob], replays: dict[Path, ReplayResult]) -> str:
    begin = jobs[0].submit_seconds
    end = max((run.ended_seconds for replay in replays.values() for run in replay.runs), default=begin)
    by_name = {str(path): replay for path, replay in replays.items()}
    return render_simulation_svg(title, by_name, begin, max(1.0, end - begin))


def _trace_document(path: Path, trace: Trace) -> dict[str, Any]:
    return {"file": str(path), "form": trace.format_name, "jobs": len(trace.jobs), "skipped": dict(trace.skipped)}


def _to_json_types(value: Any) -> Any:
    """Convert ``value`` to JSON types: keys become strings, and tuples lists."""
    if isinstance(value, dict):
        return {str(key): _to_json_types(inner) for key, inner in value.items()}
    return [_to_json_types(inner) for inner in value] if isinstance(value, list | tuple) else value


def _format_count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
