"""Renders the costs of failures of a run as one self-contained HTML page.

One chart shows the phases of each step, the other the parts of each recovery.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tiphys_controller.goodput import RECOVERY_PARTS, Recovery, StepTimeUsage, TimeUsage

from hera_pipelines.draw.charts import Axes, Picture, box, time_marks
from hera_pipelines.draw.templates import load_picture_template, shorten
from tiphys.lineage.attempt_phases import TimePhase
from tiphys.protocol.quantities import format_duration

CHART_WIDTH = 746
_RIGHT = 24
"""Pixels right of a chart, for the last mark of its axis."""
_CHARACTER_WIDTH = 7.4
"""Pixels of one character of a label, on average and rather too much than too little."""
_MAX_LABEL_CHARACTERS = 60
_TOP, _ROW, _BAR = 26, 26, 16
MAX_ROWS = 40
"""Most steps, and most recoveries, in a chart; the page says how many it leaves out."""
_MIN_BAR_WIDTH = 0.6
NONE = "-"
"""What a table shows for no value."""

PHASE_STYLES = {
    TimePhase.USEFUL: ("useful", "#2f9e6e"),
    TimePhase.DISCARDED: ("discarded", "#d6453d"),
    TimePhase.UNSAVED: ("not saved yet", "#e58f6b"),
    TimePhase.STARTING: ("starting", "#5b8ecb"),
    TimePhase.LOADING: ("loading", "#8f7fc7"),
    TimePhase.FIRST_STEP: ("first step", "#4fb3bf"),
    TimePhase.DETECTING: ("detecting", "#e0a030"),
}
_WAITING = ("waiting", "#7a8591")
"""Between two attempts of a step."""
PART_COLOURS = {
    "detect": "#e0a030",
    "decide": "#a35f2a",
    "submit": "#8c959f",
    "wait": "#5f6b77",
    "start": "#5b8ecb",
    "load": "#8f7fc7",
    "first_step": "#4fb3bf",
}


@dataclass(frozen=True)
class ReportBar:
    """Seconds of a row; ``tooltip`` appears under the pointer."""

    begin: float
    seconds: float
    colour: str
    tooltip: str


@dataclass(frozen=True)
class ReportRow:
    label: str
    note: str
    bars: tuple[ReportBar, ...]


@dataclass(frozen=True)
class ReportChart:
    """Rows on one axis of ``seconds``."""

    title: str
    about: str
    rows: tuple[ReportRow, ...]
    seconds: float
    legend: tuple[tuple[str, str], ...]


def report_page(title: str, figures: Sequence[tuple[str, str]], usage: TimeUsage) -> str:
    """Render the HTML page; ``figures`` are name and value of each number at its head."""
    charts = [chart for chart in (time_chart(usage.steps), recovery_chart(usage.steps)) if chart.rows]
    sections = [(chart, render_chart_svg(chart)) for chart in charts]
    return load_picture_template("economics.html.jinja").render(title=title, figures=figures, sections=sections)


def render_chart_svg(chart: ReportChart) -> str:
    """Render one chart as an SVG document, with its legend."""
    labels = [shorten(row.label, _MAX_LABEL_CHARACTERS) for row in chart.rows]
    longest = max(
        (len(f"{label} {row.note}".rstrip()) for label, row in zip(labels, chart.rows, strict=True)), default=0
    )
    left = round(longest * _CHARACTER_WIDTH) + _RIGHT
    axes = Axes(left, _TOP, CHART_WIDTH, _ROW * len(chart.rows), (0.0, chart.seconds))
    picture = Picture(chart.title)
    picture.add_legend(left, 2, chart.legend)
    picture.mark_times(axes, time_marks(chart.seconds))
    for index, (label, row) in enumerate(zip(labels, chart.rows, strict=True)):
        top = _TOP + _ROW * index
        picture.write(left - 12, top + _BAR - 1, label, "end", note=row.note, tooltip=row.label)
        for bar in row.bars:
            width = max(_MIN_BAR_WIDTH, CHART_WIDTH * bar.seconds / chart.seconds)
            path = box(axes.left + CHART_WIDTH * bar.begin / chart.seconds, top + 2, width, _BAR)
            picture.draw(path, colour=bar.colour, tooltip=bar.tooltip)
    return picture.render(axes.right + _RIGHT, axes.bottom + 26)


def summarize_usage(usage: TimeUsage) -> Iterator[tuple[str, str]]:
    """Names and values of the figures that sum a run up."""
    unit = time_unit(usage)
    yield "goodput", format_share(usage.goodput)
    yield "failures", str(usage.failures)
    yield f"{unit} held", format_time(usage.held_gpu_seconds)
    yield f"{unit} useful", format_time(usage.gpu_seconds(TimePhase.USEFUL))
    yield f"{unit} lost", format_time(usage.lost_gpu_seconds)


def time_unit(usage: TimeUsage) -> str:
    """What the seconds of ``usage`` are called: those of a step without GPUs count once."""
    return "GPU time" if any(step.gpus for step in usage.steps) else "time"


def format_share(value: float | None) -> str:
    """A share in percent; ``-`` if there is none."""
    return NONE if value is None else f"{value:.1%}"


def format_time(seconds: float) -> str:
    """A duration; ``-`` for none."""
    return format_duration(seconds) if seconds else NONE


def _describe_shown(shown: int, total: int, which: str) -> str:
    return f" {shown} of {total} shown: {which}." if shown < total else ""


def time_chart(steps: Sequence[StepTimeUsage]) -> ReportChart:
    """Phases of the attempts of each step, on one time axis."""
    shown = sorted(steps, key=lambda step: step.began_at)[:MAX_ROWS]
    begin = min((step.began_at for step in shown), default=None)
    end = max((step.ended_at for step in shown), default=None)
    total = max((end - begin).total_seconds(), 1e-3) if begin and end else 1.0

    def bars(step: StepTimeUsage) -> Iterator[ReportBar]:
        assert begin is not None
        ended_at = None
        for entry in step.entries:
            if ended_at and entry.spans and (waited := (entry.spans[0].begin - ended_at).total_seconds()) > 0:
                tooltip = f"before attempt {entry.attempt}: {_WAITING[0]} {format_duration(waited)}"
                yield ReportBar((ended_at - begin).total_seconds(), waited, _WAITING[1], tooltip)
            ended_at = entry.spans[-1].end if entry.spans else ended_at
            for span in entry.spans:
                phase, colour = PHASE_STYLES[span.phase]
                tooltip = f"attempt {entry.attempt}: {phase} {format_duration(span.seconds)}"
                cause = f"; it ended by {entry.failed_by}" if entry.failed_by else ""
                yield ReportBar((span.begin - begin).total_seconds(), span.seconds, colour, tooltip + cause)

    rows = [ReportRow(step.label(), f"{step.gpus} GPUs" if step.gpus > 1 else "", tuple(bars(step))) for step in shown]
    about = "Each row is a step, from its first admission to its end. Waiting is for a turn, for GPUs or for a resume."
    about += _describe_shown(len(shown), len(steps), "those that began first")
    legend = [style for phase, style in PHASE_STYLES.items() if any(step.seconds(phase) for step in shown)]
    legend += [_WAITING] * any(len(step.entries) > 1 for step in shown)
    return ReportChart("Where the time went", about, tuple(rows), total, tuple(legend))


def recovery_chart(steps: Sequence[StepTimeUsage]) -> ReportChart:
    """Parts of the longest recoveries."""
    all_recoveries = [(step, recovery) for step in steps for recovery in step.recoveries]
    longest = heapq.nlargest(MAX_ROWS, range(len(all_recoveries)), key=lambda index: all_recoveries[index][1].seconds)
    recoveries = [all_recoveries[index] for index in sorted(longest)]
    total = max((recovery.seconds for _, recovery in recoveries), default=0.0) or 1.0
    rows = [
        ReportRow(step.label(recovery.after), _label_text(recovery.failed_by), tuple(_recovery_bars(recovery)))
        for step, recovery in recoveries
    ]
    parts = [part for part in RECOVERY_PARTS if any(getattr(recovery, part) for _, recovery in recoveries)]
    about = "From the end of a program to the first step of the next attempt, by the attempt that failed."
    about += _describe_shown(len(recoveries), len(all_recoveries), "the longest")
    legend = tuple((_label_text(part), PART_COLOURS[part]) for part in parts)
    return ReportChart("What each recovery took", about, tuple(rows), total, legend)


def _recovery_bars(recovery: Recovery) -> Iterator[ReportBar]:
    begin = 0.0
    for part in RECOVERY_PARTS:
        seconds = getattr(recovery, part)
        if seconds > 0:
            tooltip = f"{_label_text(part)} {format_duration(seconds)}"
            yield ReportBar(begin, seconds, PART_COLOURS[part], tooltip)
        begin += seconds


def _label_text(name: str) -> str:
    return name.replace("_", " ")
