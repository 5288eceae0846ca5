"""Keeps a summary of every run of a store in memory, so that the list of runs needs no storage request.

A thread reads new and unfinished runs every few seconds. A run that has ended
changes only by a new submission, so of these it only lists the submissions, once
a minute.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime

from tiphys_controller.runs import RunPhase, RunSummary, summarize_run
from tiphys_controller.submit.submitter import Submitter

from tiphys.errors import TiphysError
from tiphys.store import RunLayout, Store, list_runs, read_submissions

_READERS = 8
_REFRESH_SECONDS = 5.0
_RECHECK_SECONDS = 60.0
_ENDED = (RunPhase.SUCCEEDED, RunPhase.FAILED)


@dataclass(frozen=True)
class SubmissionSpan:
    """When a Workflow of a run was submitted, and how it ended; ``status`` is empty while no end is recorded."""

    began_at: datetime
    ended_at: datetime | None
    status: str
    workflow: str = ""
    """Name of the Workflow; empty while it is not known."""


@dataclass(frozen=True)
class IndexedRun:
    """One run, as it was at ``read_at`` of the monotonic clock."""

    summary: RunSummary
    submissions: tuple[SubmissionSpan, ...]
    submission_keys: tuple[str, ...]
    read_at: float


class RunIndex:
    """Summaries of the runs of ``store``. Thread-safe; `start` begins to read.

    Args:
        store: The store.
        submitter: Where the Workflows of running submissions are looked up; None: storage alone.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self, store: Store, submitter: Submitter | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._submitter = submitter
        self._clock = clock
        self._runs: dict[str, IndexedRun] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.total: int | None = None
        """Number of the runs of the store; None before they were listed."""
        self.error = ""
        """Why the newest round failed; empty if it did not."""

    def start(self) -> None:
        """Read in the background until `stop`."""
        self._thread = threading.Thread(target=self._keep_current, name="run_index", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the background thread after its present request."""
        self._stopping.set()

    @property
    def runs(self) -> list[IndexedRun]:
        """The runs that were read so far, in no order."""
        return list(self._runs.values())

    def find_workflow(self, name: str) -> tuple[str, int] | None:
        """Run and submission of the newest Workflow of this name, of those that were read so far."""
        found = (
            (span.began_at, indexed.summary.run, number)
            for indexed in self.runs
            for number, span in enumerate(indexed.submissions, 1)
            if span.workflow == name
        )
        newest = max(found, default=None)
        return None if newest is None else newest[1:]

    def refresh(self) -> None:
        """Read what may have changed.

        Raises:
            StoreError: the store does not answer.
        """
        names = list(list_runs(self._store))
        self.total = len(names)
        for gone in self._runs.keys() - set(names):
            del self._runs[gone]
        with ThreadPoolExecutor(max_workers=_READERS) as pool:
            for name, found in zip(names, pool.map(self._read_if_due, names), strict=True):
                self._runs[name] = found

    def _keep_current(self) -> None:
        while not self._stopping.is_set():
            try:
                self.refresh()
                self.error = ""
            except TiphysError as error:
                self.error = str(error)
            except Exception as error:  # noqa: BLE001  a worker loop: the list names the error, and the next round tries again
                self.error = f"{type(error).__name__}: {error}"
            self._stopping.wait(_REFRESH_SECONDS)

    def _read_if_due(self, name: str) -> IndexedRun:
        known, now = self._runs.get(name), self._clock()
        if known is None or known.summary.phase not in _ENDED:
            return self._read(name)
        if now - known.read_at < _RECHECK_SECONDS:
            return known
        if self._list_submissions(name) == known.submission_keys:
            return IndexedRun(known.summary, known.submissions, known.submission_keys, now)
        return self._read(name)

    def _read(self, name: str) -> IndexedRun:
        keys, read_at = self._list_submissions(name), self._clock()
        summary = summarize_run(self._store, name, self._submitter)
        indexed = IndexedRun(summary, tuple(self._read_spans(name)), keys, read_at)
        self._runs[name] = indexed  # a first round over many runs shows them as they come
        return indexed

    def _list_submissions(self, name: str) -> tuple[str, ...]:
        return tuple(info.key for info in self._store.list(RunLayout(name).submissions))

    def _read_spans(self, name: str) -> Iterator[SubmissionSpan]:
        for one in read_submissions(self._store, name, []):
            ended_at = one.end.written_at if one.end else None
            workflow = one.binding.workflow_name if one.binding else ""
            yield SubmissionSpan(one.claim.written_at, ended_at, one.end.status if one.end else "", workflow)
