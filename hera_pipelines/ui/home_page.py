"""Selects what the list of runs shows, from the index and the filter in its address."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from urllib.parse import urlencode

from tiphys_controller.run_phase import ENDED_PHASES, RunPhase
from tiphys_controller.runs import RunSummary

from hera_pipelines.ui.run_index import IndexedRun, RunIndex
from tiphys.errors import UsageError

PAGE_SIZE = 50
_BAR_WIDTH = 120
_MIN_PART = 3.0


@dataclass(frozen=True)
class HomeFilter:
    """Which runs are shown; empty texts choose all. Pages count from 1."""

    phase: str = ""
    pipeline: str = ""
    search: str = ""
    page: int = 1

    @classmethod
    def from_query(cls, query: Mapping[str, str]) -> "HomeFilter":
        """Parse the query of the address.

        Raises:
            UsageError: there is no such phase, or the page is no number.
        """
        phase, page = query.get("phase", ""), query.get("page", "1")
        if phase and phase not in list(RunPhase):
            raise UsageError(f"there is no phase {phase!r}; there are {', '.join(RunPhase)}")
        if not page.isascii() or not page.isdigit() or not int(page[:9]) > 0:
            raise UsageError(f"page={page!r} is no number of a page")
        return cls(phase, query.get("pipeline", ""), query.get("search", ""), int(page[:9]))

    def accepts(self, summary: RunSummary) -> bool:
        return (
            self.phase in ("", summary.phase)
            and self.pipeline in ("", summary.pipeline)
            and self.search.lower() in summary.run.lower()
        )

    def address(self, **changes: object) -> str:
        """The address of the list with other values; the first page unless ``page`` is among them."""
        values = {"phase": self.phase, "pipeline": self.pipeline, "search": self.search, "page": 1, **changes}
        chosen = {name: value for name, value in values.items() if value not in ("", 1)}
        return f"/?{urlencode(chosen)}" if chosen else "/"


@dataclass(frozen=True)
class TimelinePart:
    """One submission in the small timeline of a run, in pixels; ``status`` is empty while no end is recorded."""

    x: float
    width: float
    status: str


@dataclass(frozen=True)
class RunRow:
    summary: RunSummary
    timeline: tuple[TimelinePart, ...]


@dataclass(frozen=True)
class HomeView:
    """The runs of one page of the list, grouped by pipeline, with the newest activity first."""

    groups: tuple[tuple[str, tuple[RunRow, ...]], ...]
    pipelines: tuple[str, ...]
    selected: int
    """Runs that the filter accepts."""
    known: int
    """Runs that were read so far."""
    total: int | None
    """Runs that are listed; None before they were."""
    is_whole: bool
    """Whether these are all runs of the store."""
    pages: int
    counts: Mapping[str, int]
    """Number of runs in each phase."""
    error: str
    """Why the list is not current; empty if it is."""
    bar_width: int = _BAR_WIDTH


def read_home_view(index: RunIndex, chosen: HomeFilter) -> HomeView:
    """The list of runs, without a storage request."""
    known = index.runs
    accepted = sorted((run for run in known if chosen.accepts(run.summary)), key=_newest_first)
    shown = accepted[(chosen.page - 1) * PAGE_SIZE : chosen.page * PAGE_SIZE]
    order = {run.summary.pipeline: number for number, run in reversed(list(enumerate(shown)))}
    shown.sort(key=lambda run: order[run.summary.pipeline])
    phases = [run.summary.phase.value for run in known]
    return HomeView(
        groups=tuple(
            (pipeline, tuple(RunRow(run.summary, tuple(_timeline(run))) for run in runs))
            for pipeline, runs in groupby(shown, key=lambda run: run.summary.pipeline)
        ),
        pipelines=tuple(sorted({run.summary.pipeline for run in known})),
        selected=len(accepted),
        known=len(known),
        total=index.total,
        is_whole=index.is_whole,
        pages=max(1, -(-len(accepted) // PAGE_SIZE)),
        counts={phase.value: phases.count(phase.value) for phase in RunPhase},
        error=index.error,
    )


def _newest_first(run: IndexedRun) -> tuple[float, str]:
    moment = run.summary.last_activity
    return -moment.timestamp() if moment else 0.0, run.summary.run


def _timeline(run: IndexedRun) -> list[TimelinePart]:
    """Its submissions. One without an end was lost when the next was submitted, or goes on."""
    if not run.submissions:
        return []
    last = run.summary.last_activity or run.submissions[-1].began_at
    ends = [after.began_at for after in run.submissions[1:]] + [last]
    pairs = zip(run.submissions, ends, strict=True)
    parts = [(span.began_at, span.ended_at or end, span.status) for span, end in pairs]
    begin = parts[0][0]
    scale = _BAR_WIDTH / max((max(end for _, end, _ in parts) - begin).total_seconds(), 1.0)
    newest = run.summary.phase if run.summary.phase not in ENDED_PHASES else RunPhase.INTERRUPTED
    return [
        TimelinePart(
            round(min((began - begin).total_seconds() * scale, _BAR_WIDTH - _MIN_PART), 1),
            round(max(_MIN_PART, (end - began).total_seconds() * scale), 1),
            status or (newest if number == len(parts) else RunPhase.INTERRUPTED).value,
        )
        for number, (began, end, status) in enumerate(parts, start=1)
    ]
