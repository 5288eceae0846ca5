"""``tiphys report``: what failures have cost."""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text
from tiphys_controller import API_VERSION
from tiphys_controller.failure_cost import PARTS, Account, Phase, accounts, by_queue

from hera_pipelines.cli.quota_commands.simulate import cell_duration
from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import StoreOption, existing_store
from tiphys.errors import StoreError, UsageError
from tiphys.records import utc_now
from tiphys.store import list_runs

EXAMPLES = """\b
Examples:
  tiphys report digits-7xk2p
  tiphys report digits-7xk2p -o html --output report.html
  tiphys report                       # every run of the store, and every queue
  tiphys report -o json | jq '.queues[] | {name, goodput}'
"""

_NONE = "-"
_BRIEF_SECONDS = 60


class ReportFormat(StrEnum):
    """A report can also be a page with plots."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    HTML = "html"


def report(
    context: typer.Context,
    runs: Annotated[list[str] | None, typer.Argument(metavar="[RUN]...", help="Names of runs; none: all.")] = None,
    store: StoreOption = None,
    output: Annotated[
        ReportFormat, typer.Option("-o", "--format", help="html is a self-contained page with plots, of one run.")
    ] = ReportFormat.TABLE,
    output_file: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write the page there, not to stdout.")
    ] = None,
) -> None:
    """Tell what failures have cost: goodput, training that was lost, and what each recovery took.

    Goodput is the share of the time from the first admission of a step to its
    end that was training which a result rests on. Times are weighted by GPUs.
    """
    screen: Screen = context.obj
    if output is ReportFormat.HTML and (not runs or len(runs) != 1):
        raise UsageError("a page tells of one run; name it, such as `tiphys report digits-7xk2p -o html`")
    if output_file and output is not ReportFormat.HTML:
        raise UsageError("--output is for the page; add -o html, or redirect stdout")
    place = existing_store(screen, store)
    found = accounts(place, runs or list_runs(place), utc_now())
    if output is ReportFormat.TABLE:
        _tables(screen, found)
    elif output is ReportFormat.HTML:
        _page(screen, found[0], output_file)
    else:
        screen.document(_document(found), Format(output.value))


def _tables(screen: Screen, found: Sequence[Account]) -> None:
    if len(found) == 1:
        _one(screen, found[0])
        return
    screen.table(["RUN", *_SUMMARY], [[one.name, *_summary(one)] for one in found])
    if queues := by_queue(found):
        screen.write("")
        screen.table(["QUEUE", *_SUMMARY], [[one.name, *_summary(one)] for one in queues])


def _one(screen: Screen, found: Account) -> None:
    phases = [phase for phase in Phase if found.gpu_seconds(phase)]
    header = ["STEP", "GPUS", "ATTEMPTS", "SPAN", *(_title(phase.value) for phase in phases), "WAITING", "GOODPUT"]
    rows: list[Sequence[str | Text]] = []
    for step in found.steps:
        alone = Account(name=step.step, steps=(step,))
        times = (_time(step.seconds(phase)) for phase in phases)
        waiting = _time(max(0.0, step.span - step.held))
        gpus = str(step.gpus) if step.gpus else _NONE
        rows.append([step.step, gpus, str(len(step.entries)), _time(step.span), *times, waiting, _share(alone.goodput)])
    screen.table(header, rows)
    if found.costs:
        screen.write("")
        screen.table(["ENDED BY", "TIMES", "GPU TIME LOST", "RECOVERY, ALL TOGETHER"], list(_costs(found)))
    if any(step.recoveries for step in found.steps):
        screen.write("")
        screen.table(["AFTER", "ENDED BY", *map(_title, PARTS), "RECOVERY"], list(_recoveries(found)))
    screen.write("")
    screen.write(", ".join(f"{name} {value}" for name, value in _figures(found)))


def _costs(found: Account) -> Iterator[list[str]]:
    for cause, cost in found.costs.items():
        yield [cause.replace("_", " "), str(cost.failures), _time(cost.lost), _time(cost.recovery)]


def _recoveries(found: Account) -> Iterator[list[str]]:
    for step in found.steps:
        for one in step.recoveries:
            parts = (_time(getattr(one, part)) for part in PARTS)
            yield [f"{step.step}/{one.after}", one.failed_by.replace("_", " "), *parts, _time(one.seconds)]


_SUMMARY = ("STEPS", "FAILURES", "GPU TIME HELD", "USEFUL", "LOST", "GOODPUT")


def _summary(one: Account) -> list[str]:
    times = (one.held, one.gpu_seconds(Phase.USEFUL), one.held - one.gpu_seconds(Phase.USEFUL))
    return [str(len(one.steps)), str(one.failures), *map(_time, times), _share(one.goodput)]


def _page(screen: Screen, found: Account, path: Path | None) -> None:
    from hera_pipelines.draw.report_html import report_page

    page = report_page(f"What failures have cost {found.name}", list(_figures(found)), found)
    if path is None:
        screen.write(page)
        return
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot write the page to {path}: {error.strerror}; name another file") from error
    screen.note(f"wrote {path}")


def _figures(found: Account) -> Iterator[tuple[str, str]]:
    """What is told at the head of a report."""
    unit = "GPU time" if any(step.gpus for step in found.steps) else "time"
    yield "goodput", _share(found.goodput)
    yield "failures", str(found.failures)
    yield f"{unit} held", _time(found.held)
    yield f"{unit} useful", _time(found.gpu_seconds(Phase.USEFUL))
    yield f"{unit} lost", _time(found.held - found.gpu_seconds(Phase.USEFUL))


def _document(found: Sequence[Account]) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": "Report",
        "runs": [_told(one) for one in found],
        "queues": [{**_told(one), "steps": [step.step for step in one.steps]} for one in by_queue(found)],
    }


def _told(one: Account) -> dict[str, Any]:
    return {
        "name": one.name,
        "goodput": one.goodput,
        "gpu_seconds": {"held": one.held, **{phase.value: one.gpu_seconds(phase) for phase in Phase}},
        "costs": {cause: cost.model_dump(mode="json") for cause, cost in one.costs.items()},
        "steps": [step.model_dump(mode="json") for step in one.steps],
    }


def _title(name: str) -> str:
    return name.replace("_", " ").upper()


def _share(value: float | None) -> str:
    return _NONE if value is None else f"{value:.1%}"


def _time(seconds: float) -> str:
    if not seconds:
        return _NONE
    return f"{seconds:.1f}s" if seconds < _BRIEF_SECONDS else cell_duration(seconds)
