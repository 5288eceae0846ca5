"""``tiphys simulate``: what a trace of jobs would meet under a queue file, before any person does.

The numbers of a replay for people: one table, or two replays side by side.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum, StrEnum
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text
from tiphys_controller import API_VERSION
from tiphys_plugin import load_queues
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.simulation.jobs import Costs, Job, Replay, Trace
from tiphys_plugin.quota.simulation.prepare import declared, given_to, shared_out, spread
from tiphys_plugin.quota.simulation.replay import POLICIES, replay
from tiphys_plugin.quota.simulation.results import Outcome, QueueOutcome, outcome
from tiphys_plugin.quota.simulation.trace import read_trace

from hera_pipelines.authoring.policies import duration
from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.draw import largest, rehearsal_of, rehearsal_svg
from tiphys.errors import StoreError, UsageError

_NONE = "-"
_SELDOM = ("REJECTED", "NOT STARTED", "PREEMPTED", "LOST")
_ALL = "all"
_UNITS = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))
Value = float | None


class Unit(Enum):
    """How a number is told, and how the difference of two of them."""

    COUNT = "count"
    TIME = "time"
    FACTOR = "factor"
    SHARE = "share"


@dataclass(frozen=True)
class Measure:
    name: str
    unit: Unit
    of: Callable[[QueueOutcome], Value]


def _wait(name: str) -> Callable[[QueueOutcome], Value]:
    return lambda outcome: None if outcome.wait is None else attrgetter(name)(outcome.wait)


MEASURES = (
    Measure("JOBS", Unit.COUNT, lambda outcome: outcome.jobs),
    Measure("REJECTED", Unit.COUNT, lambda outcome: sum(outcome.rejected.values())),
    Measure("NOT STARTED", Unit.COUNT, lambda outcome: outcome.waiting),
    Measure("MEAN WAIT", Unit.TIME, _wait("mean")),
    Measure("P50", Unit.TIME, _wait("p50")),
    Measure("P90", Unit.TIME, _wait("p90")),
    Measure("P99", Unit.TIME, _wait("p99")),
    Measure("MAX", Unit.TIME, _wait("most")),
    Measure("JCT", Unit.TIME, lambda outcome: outcome.completion_seconds),
    Measure("SLOWDOWN", Unit.FACTOR, lambda outcome: outcome.slowdown),
    Measure("GPU-HOURS", Unit.COUNT, lambda outcome: outcome.gpu_hours),
    Measure("BORROWED", Unit.COUNT, lambda outcome: outcome.borrowed_gpu_hours),
    Measure("OF QUOTA", Unit.SHARE, lambda outcome: outcome.quota_utilisation),
    Measure("PREEMPTED", Unit.COUNT, lambda outcome: outcome.preemptions),
    Measure("LOST", Unit.COUNT, lambda outcome: outcome.lost_gpu_hours),
    Measure("LINE", Unit.COUNT, lambda outcome: outcome.longest_line),
)


def columns(outcome: Outcome) -> tuple[list[str], list[list[str | Text]]]:
    """Header and rows: one for each queue, and one for all. Columns of what need not happen only where it did."""
    shown = [one for one in MEASURES if one.name not in _SELDOM or one.of(outcome.total)]
    rows: list[list[str | Text]] = [
        [each.queue or _ALL, *(told(one.unit, one.of(each)) for one in shown)]
        for each in (*outcome.queues, outcome.total)
    ]
    rows[-1] = [Text(str(cell), style="bold") for cell in rows[-1]]
    return ["QUEUE", *(one.name for one in shown)], rows


def side_by_side(before: Outcome, after: Outcome) -> Iterator[Sequence[str | Text]]:
    """A row for each queue and measure: before, after, and the difference. Queues of only one side are there, too."""
    old = {each.queue: each for each in (*before.queues, before.total)}
    new = {each.queue: each for each in (*after.queues, after.total)}
    for queue in [*dict.fromkeys(one for one in [*old, *new] if one is not None), None]:
        for one in MEASURES:
            pair = [one.of(side[queue]) if queue in side else None for side in (old, new)]
            if any(pair) or one is MEASURES[0]:
                first = (queue or _ALL) if one is MEASURES[0] else ""
                yield first, one.name.lower(), *(told(one.unit, value) for value in pair), _change(one.unit, *pair)


def facts(outcome: Outcome) -> Iterator[tuple[str, Unit, Value]]:
    """What is not of one queue: name, unit, value."""
    yield "from first submission to last end", Unit.TIME, outcome.span_seconds
    if outcome.inventory_utilisation is not None:
        yield "inventory in use", Unit.SHARE, outcome.inventory_utilisation
    for cohort, index in outcome.fairness.items():
        yield f"fairness in cohort {cohort} (Jain)", Unit.FACTOR, index


def told(unit: Unit, value: Value) -> str:
    """A number for a person."""
    if value is None:
        return _NONE
    if unit is Unit.TIME:
        return cell_duration(value)
    if unit is Unit.SHARE:
        return f"{value:.1%}"
    return f"{value:,.0f}" if unit is Unit.COUNT else f"{value:,.2f}"


def cell_duration(seconds: float) -> str:
    """The two largest units that matter: ``3h 20m``."""
    left = round(seconds)
    counts: list[tuple[int, str]] = []
    for size, unit in _UNITS:
        count, left = divmod(left, size)
        if count or counts:
            counts.append((count, unit))
    return " ".join(f"{count}{unit}" for count, unit in counts[:2] if count) or "0s"


def _change(unit: Unit, before: Value, after: Value) -> str:
    if before is None or after is None or told(unit, before) == told(unit, after):
        return ""
    if unit is Unit.COUNT:
        return f"{after - before:+,.0f}"
    if unit is Unit.SHARE:
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
A trace, with the last six columns optional:
  submit_seconds,duration_seconds,gpus,queue,gpu_type,priority,name,limit_seconds,spot
  0,7200,8,research,A100,0,pretrain,10800,allowed
"""


class PolicyName(StrEnum):
    """Who may start: the product's own rule, or one to compare it with."""

    TIPHYS = "tiphys"
    FIFO = "fifo"
    SKIP = "skip"


def simulate(
    context: typer.Context,
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="CSV file with one job in each line.")],
    queues: Annotated[Path, typer.Option("--queues", metavar="FILE", help="Queue file to rehearse.")],
    against: Annotated[
        Path | None, typer.Option("--against", metavar="FILE", help="A second one; both are shown side by side.")
    ] = None,
    policy: Annotated[
        PolicyName,
        typer.Option("--policy", help="fifo: strictly in order of arrival; skip: whoever fits, nothing is reserved."),
    ] = PolicyName.TIPHYS,
    queue: Annotated[
        str | None,
        typer.Option("--queue", metavar="NAME", help="Queue of jobs that name none; else they are drawn by quotas."),
    ] = None,
    declare_durations: Annotated[
        bool, typer.Option("--declare-durations", help="As if each job had said how long it takes.")
    ] = False,
    checkpoint_every: Annotated[
        str, typer.Option("--checkpoint-every", metavar="TIME", help="Training between two checkpoints: 10m, 1h.")
    ] = "10m",
    save_seconds: Annotated[
        float, typer.Option("--save-seconds", min=0, help="From being asked to go to being saved and gone.")
    ] = Costs.save_seconds,
    restart_seconds: Annotated[
        float, typer.Option("--restart-seconds", min=0, help="From having GPUs again to training again.")
    ] = Costs.restart_seconds,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="For drawing queues; the same seed, the same.")] = 0,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Write an SVG picture of GPUs held and waited for.")
    ] = None,
    output: Annotated[Format, typer.Option("-o", "--format", help="Form of the numbers.")] = Format.TABLE,
) -> None:
    """Replay a trace of jobs under the quotas of a queue file, decided by the rules that the service itself goes by.

    Nothing is started and no cluster is asked. Jobs that name no queue are those
    of --queue, or drawn over the queues of --queues in proportion to their quotas.
    Where a queue has trainings go for others, they save and come back, as they
    would in a cluster: how long that takes is up to the last three options.
    """
    screen: Screen = context.obj
    files = {path: load_queues(path) for path in (queues, against) if path is not None}
    found = read_trace(trace)
    jobs = _prepared(found, list(files.values()), queue, declare_durations, seed)
    costs = Costs(_above_zero(checkpoint_every), save_seconds, restart_seconds)
    with _progress(screen, len(jobs) * len(files)) as advance:
        replays = {
            path: replay(
                rules, spread(jobs, rules), POLICIES[policy], advance, costs if policy is PolicyName.TIPHYS else None
            )
            for path, rules in files.items()
        }
    outcomes = {path: outcome(one) for path, one in replays.items()}
    if output is Format.TABLE:
        _show(screen, outcomes)
    else:
        about = {"policy": policy.value, "seed": seed, "costs": asdict(costs), "trace": _trace(trace, found)}
        screen.document(_document(about, outcomes), output)
    for note in _notes(found, jobs, outcomes, drawn=queue is None, seed=seed):
        screen.note(note)
    if plot:
        _draw(plot, f"{trace.name}, policy {policy.value}", jobs, replays)
        screen.note(f"wrote {plot}")


def _above_zero(checkpoint_every: str) -> float:
    """Seconds between two checkpoints."""
    every = duration(checkpoint_every, "--checkpoint-every")
    if every <= 0:
        raise UsageError(f"--checkpoint-every {checkpoint_every}: checkpoints are some time apart, such as 10m")
    return every


def _prepared(
    found: Trace, rules: Sequence[Queues], queue: str | None, declare_durations: bool, seed: int
) -> tuple[Job, ...]:
    if queue is None:
        jobs = shared_out(found.jobs, rules[0], seed)
    else:
        jobs = found.jobs
        for one in rules:  # the second time to learn whether that file has the queue, too
            jobs = given_to(jobs, one, queue)
    return declared(jobs) if declare_durations else jobs


@contextmanager
def _progress(screen: Screen, total: int) -> Iterator[Callable[[int], None]]:
    """A callback for the number of jobs that were started or rejected."""
    bar = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    hidden = screen.quiet or not screen.err.is_terminal
    with Progress(*bar, console=screen.err, disable=hidden, transient=True) as progress:
        task = progress.add_task("replaying", total=total)
        yield lambda count: progress.advance(task, count)


def _show(screen: Screen, outcomes: dict[Path, Outcome]) -> None:
    first, *others = outcomes.values()
    if not others:
        screen.table(*columns(first))
        for name, unit, value in facts(first):
            screen.note(f"{name}: {told(unit, value)}")
        return
    screen.table(("QUEUE", "MEASURE", *map(str, outcomes), "CHANGE"), side_by_side(first, others[0]))
    for path, one in outcomes.items():
        screen.note(f"{path}: " + ", ".join(f"{name} {told(unit, value)}" for name, unit, value in facts(one)))


def _notes(
    found: Trace, jobs: Sequence[Job], outcomes: dict[Path, Outcome], *, drawn: bool, seed: int
) -> Iterator[str]:
    for why, count in found.skipped.items():
        yield f"left out: {_counted(count, 'row')} {why}"
    if found.ignored:
        yield f"columns that say nothing here: {', '.join(found.ignored)}"
    if drawn and (homeless := sum(job.queue is None for job in found.jobs)):
        yield f"{_counted(homeless, 'job')} without a queue drawn over the queues by their quotas, with seed {seed}"
    if cut := sum(job.held_seconds < job.duration_seconds for job in jobs):
        yield f"{_counted(cut, 'job')} ended at limit_seconds, before the duration was over"
    for path, one in outcomes.items():
        reasons = Counter({why.value: count for why, count in one.total.rejected.items()})
        for why, count in reasons.most_common():
            yield f"{path}: {_counted(count, 'job')} rejected: {why}"
        if one.total.waiting:
            yield f"{path}: {_counted(one.total.waiting, 'job')} never started: the queue is stopped"


def _draw(plot: Path, title: str, jobs: Sequence[Job], replays: dict[Path, Replay]) -> None:
    begin = jobs[0].submit_seconds
    end = max((run.ended_seconds for one in replays.values() for run in one.runs), default=begin)
    shown = largest(list(replays.values()))
    pictures = [rehearsal_of(str(path), one, begin, max(1.0, end - begin), shown) for path, one in replays.items()]
    try:
        plot.write_text(rehearsal_svg(title, pictures), encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot write the picture to {plot}: {error.strerror}; name another file") from error


def _document(about: dict[str, Any], outcomes: dict[Path, Outcome]) -> dict[str, Any]:
    replays = [{"queue_file": str(path), **_plain(asdict(one))} for path, one in outcomes.items()]
    return {"apiVersion": API_VERSION, "kind": "Simulation", **about, "replays": replays}


def _trace(path: Path, found: Trace) -> dict[str, Any]:
    return {"file": str(path), "form": found.form, "jobs": len(found.jobs), "skipped": dict(found.skipped)}


def _plain(value: Any) -> Any:
    """``value`` of JSON types alone: reasons become words, and tuples lists."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
