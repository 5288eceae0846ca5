"""Finds runs for people: all, or the newest and those that have not ended, which cost the same among very many."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import islice
from typing import NamedTuple

from tiphys.lineage.run_history import RunHistory
from tiphys.store import Store, list_open_submissions, list_runs
from tiphys.store.layout import RUNS
from tiphys.store.run_markers import list_newest_markers
from tiphys_controller.run_phase import RunPhase
from tiphys_controller.runs import RunSummary, summarize_run
from tiphys_controller.submit.submitter import Submitter

_READERS = 8
_MAX_OPEN_RUNS = 200
"""Runs that have not ended, of those that a search with a limit reads at once."""
_CLOCK_SKEW = timedelta(hours=1)
"""How much older than ``since`` a marker may be: the clocks of those who write markers differ."""


def list_run_summaries(store: Store, submitter: Submitter | None = None) -> list[RunSummary]:
    """Summaries of all runs, sorted by name. A run that cannot be read is listed with the reason.

    ``submitter`` is the cluster to search for the Workflows of running submissions; None: storage alone.
    """
    return _summarize_runs(store, submitter, list_runs(store))


class RunSearch(NamedTuple):
    """Runs that were found, in no order."""

    summaries: list[RunSummary]
    looked_at: int
    """Runs that were read."""
    is_complete: bool
    """Whether these are all runs of the store."""


class RunOrder(StrEnum):
    """Orders of a list of runs. Equal ones are in the order of their names."""

    NAME = "name"
    ACTIVITY = "activity"
    """The newest first."""
    PIPELINE = "pipeline"
    STATE = "state"


class RunFilter(NamedTuple):
    """Which runs of a list are shown."""

    pipeline: str = ""
    """Empty for all."""
    phases: Collection[RunPhase] = ()
    """Empty for all."""
    since: datetime | None = None
    """Only runs with activity since then; None for all."""

    def accepts(self, summary: RunSummary) -> bool:
        return (
            self.pipeline in ("", summary.pipeline)
            and (not self.phases or summary.phase in self.phases)
            and (self.since is None or (summary.last_activity is not None and summary.last_activity >= self.since))
        )


def sort_runs(summaries: Iterable[RunSummary], order: RunOrder) -> list[RunSummary]:
    """Sort summaries of runs."""
    phases = list(RunPhase)

    def sort_key(summary: RunSummary) -> tuple[float | str, str]:
        match order:
            case RunOrder.ACTIVITY:
                return -summary.last_activity.timestamp() if summary.last_activity else 0.0, summary.run
            case RunOrder.PIPELINE:
                return summary.pipeline, summary.run
            case RunOrder.STATE:
                return float(phases.index(summary.phase)), summary.run
            case RunOrder.NAME:
                return "", summary.run

    return sorted(summaries, key=sort_key)


class RunMarkers(NamedTuple):
    """The runs of a store with the keys that led to them: those that have not ended, and then all others."""

    opened: dict[str, set[str]]
    ended: Iterator[tuple[str, str]]
    """The newest first, and perhaps names of no run. Pages are fetched as they are consumed; this adds the newest keys
    of the open runs to ``opened``."""


def list_run_markers(store: Store, most_open: int | None, since: datetime | None = None) -> RunMarkers:
    """List the open runs, of very many the newest ``most_open``, and the others since ``since``."""
    opened: defaultdict[str, set[str]] = defaultdict(set)
    for submission in list_open_submissions(store):
        opened[submission.run].add(submission.marker)
    first = dict(islice(opened.items(), most_open))

    def ended() -> Iterator[tuple[str, str]]:
        for run, key in list_newest_markers(store, since):
            if run in first:
                first[run].add(key)
            else:
                yield run, key

    return RunMarkers(first, ended())


def search_runs(
    store: Store, wanted: RunFilter, submitter: Submitter | None = None, limit: int | None = None
) -> RunSearch:
    """Summaries of the runs that ``wanted`` accepts.

    With a limit or a time, the runs are read that have not ended (of very many the newest), and then the others from
    the newest creation or end on, until enough are found. So the cost does not grow with the number of runs.

    ``submitter`` is as in `list_run_summaries`. ``limit`` is how many runs that have ended are enough; None for all.
    """
    if limit is None and wanted.since is None:
        summaries = list_run_summaries(store, submitter)
        return RunSearch(list(filter(wanted.accepts, summaries)), len(summaries), is_complete=True)
    most_open = None if limit is None else max(limit, _MAX_OPEN_RUNS)
    markers = list_run_markers(store, most_open, wanted.since and wanted.since - _CLOCK_SKEW)
    newest = (run for run, _ in markers.ended)
    read = _summarize_runs(store, submitter, markers.opened)
    looked_at, found, ended = len(read), list(filter(wanted.accepts, read)), 0
    is_complete = wanted.since is None
    while batch := list(islice(newest, max(limit or 0, _READERS))):
        read = _summarize_runs(store, submitter, batch)
        accepted = list(filter(wanted.accepts, read))
        looked_at, found, ended = looked_at + len(read), found + accepted, ended + len(accepted)
        if limit is not None and ended >= limit:
            is_complete = False
            break
    return RunSearch(found, looked_at, is_complete)


def _summarize_runs(store: Store, submitter: Submitter | None, runs: Iterable[str]) -> list[RunSummary]:
    """Summaries of the runs of which the store holds anything."""

    def summarize(run: str) -> RunSummary | None:
        return summarize_stored_run(RunHistory.for_display(store, run), submitter)

    with ThreadPoolExecutor(max_workers=_READERS) as pool:
        return [summary for summary in pool.map(summarize, runs) if summary]


def summarize_stored_run(history: RunHistory, submitter: Submitter | None) -> RunSummary | None:
    """The summary of a run; None if the store has nothing of it but a marker, as after a crash."""
    summary = summarize_run(history, submitter)
    return summary if summary.pipeline or any(history.store.list(f"{RUNS}{history.run}/")) else None
