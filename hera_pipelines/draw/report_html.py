"""What failures have cost a run, as one self-contained page: where its time went, and what each recovery took."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tiphys_controller.failure_cost import PARTS, Account, Phase, Recovery, StepLedger

from hera_pipelines.draw.lineage_svg import template
from hera_pipelines.draw.simulation_svg import time_marks

WIDTH = 960
LEFT = 190
CHART_WIDTH = 746
ROW = 26
BAR = 16
MOST_ROWS = 40
"""Steps, and recoveries, that are drawn; the table has all of them."""
_THINNEST = 0.6

PHASES = {
    Phase.USEFUL: ("useful", "#2f9e6e"),
    Phase.LOST: ("lost", "#d6453d"),
    Phase.STARTING: ("starting", "#5b8ecb"),
    Phase.LOADING: ("loading", "#8f7fc7"),
    Phase.FIRST_STEP: ("first step", "#4fb3bf"),
    Phase.DETECTING: ("detecting", "#e0a030"),
}
PART_COLOURS = {
    "detect": "#e0a030",
    "decide": "#a35f2a",
    "submit": "#8c959f",
    "wait": "#c4ccd4",
    "start": "#5b8ecb",
    "load": "#8f7fc7",
    "first_step": "#4fb3bf",
}


@dataclass(frozen=True)
class Bar:
    """A piece of a row; ``says`` appears for whoever points at it."""

    x: float
    width: float
    colour: str
    says: str


@dataclass(frozen=True)
class Row:
    label: str
    note: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Chart:
    """Rows on one axis; ``marks`` are x and label on it."""

    title: str
    about: str
    rows: tuple[Row, ...]
    marks: tuple[tuple[float, str], ...]
    legend: tuple[tuple[str, str], ...]

    @property
    def height(self) -> int:
        return ROW * len(self.rows) + 26


def report_page(title: str, figures: Sequence[tuple[str, str]], found: Account) -> str:
    """An HTML document. ``figures`` are what is told at its head, as name and value."""
    charts = [chart for chart in (_times(found.steps), _recoveries(found.steps)) if chart.rows]
    return template("economics.html.jinja").render(
        title=title, figures=figures, charts=charts, width=WIDTH, left=LEFT, chart_width=CHART_WIDTH, row=ROW, bar=BAR
    )


def _times(steps: Sequence[StepLedger]) -> Chart:
    shown = sorted(steps, key=lambda step: step.began_at)[:MOST_ROWS]
    begin = min((step.began_at for step in shown), default=None)
    end = max((step.ended_at for step in shown), default=None)
    total = max((end - begin).total_seconds(), 1e-3) if begin and end else 1.0

    def bars(step: StepLedger) -> Iterator[Bar]:
        for entry in step.entries:
            for span in entry.spans:
                assert begin is not None
                words, colour = PHASES[span.phase]
                says = f"attempt {entry.attempt}: {words} {_seconds(span.seconds)}"
                ended = f"; it ended by {entry.failed_by}" if entry.failed_by else ""
                yield _bar((span.begin - begin).total_seconds(), span.seconds, total, colour, says + ended)

    rows = [Row(step.step, f"{step.gpus} GPUs" if step.gpus > 1 else "", tuple(bars(step))) for step in shown]
    about = "Each row is a step, from its first admission to its end. A gap is waiting: for a turn, GPUs or a resume."
    used = [look for phase, look in PHASES.items() if any(step.seconds(phase) for step in shown)]
    return Chart("Where the time went", about, tuple(rows), _marks(total), tuple(used))


def _recoveries(steps: Sequence[StepLedger]) -> Chart:
    found = [(step.step, one) for step in steps for one in step.recoveries][-MOST_ROWS:]
    total = max((one.seconds for _, one in found), default=0.0) or 1.0
    rows = [Row(f"{step}/{one.after}", _words(one.failed_by), tuple(_parts(one, total))) for step, one in found]
    took = [part for part in PARTS if any(getattr(one, part) for _, one in found)]
    about = "From the end of a program to the first step of the next attempt, by the attempt that failed."
    legend = tuple((_words(part), PART_COLOURS[part]) for part in took)
    return Chart("What each recovery took", about, tuple(rows), _marks(total), legend)


def _parts(one: Recovery, total: float) -> Iterator[Bar]:
    begin = 0.0
    for part in PARTS:
        seconds = getattr(one, part)
        if seconds > 0:
            yield _bar(begin, seconds, total, PART_COLOURS[part], f"{_words(part)} {_seconds(seconds)}")
        begin += seconds


def _bar(begin: float, seconds: float, total: float, colour: str, says: str) -> Bar:
    scale = CHART_WIDTH / total
    return Bar(round(LEFT + begin * scale, 2), round(max(_THINNEST, seconds * scale), 2), colour, says)


def _marks(total: float) -> tuple[tuple[float, str], ...]:
    return tuple((round(LEFT + CHART_WIDTH * at / total, 1), label) for at, label in time_marks(total))


def _words(name: str) -> str:
    return name.replace("_", " ")


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s"
