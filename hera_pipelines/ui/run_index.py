"""Keeps summaries of the newest runs of a store in memory, so that the list of runs needs no storage request.

A thread reads new and unfinished runs every few seconds. A run that has ended
changes only by a new submission, which is then open. For the page of queues it
also keeps which GPUs its attempts held.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice

from tiphys_controller.run_phase import ENDED_PHASES, RunPhase
from tiphys_controller.run_search import list_run_markers, summarize_stored_run
from tiphys_controller.runs import RunSummary
from tiphys_controller.submit.submitter import Submitter

from hera_pipelines.draw.queue_shares import GpuHold
from tiphys.errors import IntegrityError, NotFoundError, TiphysError, UsageError
from tiphys.lineage.run_history import RunHistory
from tiphys.protocol.compiled_workflow import shown_status
from tiphys.records import task_name
from tiphys.store import Store, Submission

_READERS = 8
_REFRESH_SECONDS = 5.0
MAX_RUNS = 1000
"""Most runs that are kept: of those that have not ended, and of the others, the newest of each."""
_RECHECK_SECONDS = 60.0
_MAX_HOLDS = 2000
"""Most attempts of a run whose GPUs are read and kept in memory: the newest of each step."""


@dataclass(frozen=True)
class SubmissionSpan:
    """When a Workflow of a run was submitted, and how it ended; ``status`` is empty while no end is recorded."""

    began_at: datetime
    ended_at: datetime | None
    status: str
    workflow: str = ""
    """Name of the Workflow; empty while it is not known."""

    @classmethod
    def from_submission(cls, submission: Submission) -> "SubmissionSpan":
        claim, binding, end = submission.records
        return cls(
            began_at=claim.written_at,
            ended_at=end.written_at if end else None,
            status=shown_status(end.status, end.message) if end else "",
            workflow=binding.workflow_name if binding else "",
        )


@dataclass(frozen=True)
class IndexedRun:
    """One run. ``markers`` are the keys that led to it when it was read: of another submission there are others."""

    summary: RunSummary
    submissions: tuple[SubmissionSpan, ...]
    markers: frozenset[str]
    holds: tuple[GpuHold, ...] = ()
    """GPUs that its attempts held; empty unless the index reads them."""
    holds_of: RunSummary | None = None
    """The summary at the time when ``holds`` were read; None before."""
    holds_read_at: float = 0.0


class RunIndex:
    """Summaries of the newest runs of ``store``. Thread-safe; `start` begins to read.

    Args:
        submitter: Where the Workflows of running submissions are looked up; None: storage alone.
        reads_holds: Whether to read which GPUs attempts held, which costs a read for each record of an attempt.
    """

    def __init__(self, store: Store, submitter: Submitter | None = None, reads_holds: bool = False) -> None:
        self._store = store
        self._submitter = submitter
        self._reads_holds = reads_holds
        self._runs: dict[str, IndexedRun] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.total: int | None = None
        """Number of the runs that it keeps; None before they were listed."""
        self.is_whole = True
        """Whether these are all runs of the store."""
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
        opened, ended = list_run_markers(self._store, MAX_RUNS)
        markers = opened | {name: {marker} for name, marker in islice(ended, MAX_RUNS)}
        self.total, self.is_whole = len(markers), next(ended, None) is None
        with ThreadPoolExecutor(max_workers=_READERS) as pool:
            read = pool.map(self._read_if_due, markers, map(frozenset, markers.values()))
            found = {name: run for name, run in zip(markers, read, strict=True) if run}
            self._runs, self.total = found, len(found)
            if self._reads_holds:  # after all summaries, because the list of runs waits for these alone
                for name, held in zip(found, pool.map(self._read_holds_if_due, list(found)), strict=True):
                    self._runs[name] = held

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

    def _read_if_due(self, name: str, markers: frozenset[str]) -> IndexedRun | None:
        known = self._runs.get(name)
        if known is None or known.summary.phase not in ENDED_PHASES or known.markers != markers:
            return self._read(name, markers)
        return known

    def _read(self, name: str, markers: frozenset[str]) -> IndexedRun | None:
        """The run; None if the store has none of this name."""
        spans = tuple[SubmissionSpan, ...]()
        history = RunHistory.for_display(self._store, name)
        with contextlib.suppress(NotFoundError, UsageError):  # it is being deleted, and the summary says so
            spans = tuple(map(SubmissionSpan.from_submission, history.submissions))
        summary = summarize_stored_run(history, self._submitter)
        if summary is None:
            return None
        indexed = IndexedRun(summary, spans, markers)
        if (known := self._runs.get(name)) is not None:
            indexed = replace(indexed, holds=known.holds, holds_of=known.holds_of, holds_read_at=known.holds_read_at)
        self._runs[name] = indexed  # a first round over many runs shows them as they come
        return indexed

    def _read_holds_if_due(self, name: str) -> IndexedRun:
        known, now = self._runs[name], time.monotonic()
        goes_on = known.summary.phase is RunPhase.RUNNING and known.holds_of is not None
        if known.holds_of == known.summary or (goes_on and now - known.holds_read_at < _RECHECK_SECONDS):
            return known
        holds = tuple(read_gpu_holds(self._store, name, known.summary))
        return replace(known, holds=holds, holds_of=known.summary, holds_read_at=now)


def read_gpu_holds(store: Store, run: str, summary: RunSummary) -> Iterator[GpuHold]:
    """GPUs that the attempts of a run held, as far as its records can be read.

    An attempt without an end of a run that does not go on held them until the newest record of the run.

    Raises:
        StoreError: the store does not answer.
    """
    history = RunHistory.for_display(store, run)
    try:
        steps = history.pipeline.steps
    except (IntegrityError, NotFoundError, UsageError):
        return
    requests = {name: spec.gpu for name, spec in steps.items() if spec.gpu is not None}
    for step, attempts in history.read_attempts(slice(_MAX_HOLDS)).items() if requests else ():
        if (request := requests.get(task_name(step))) is None:
            continue
        for claim, end in attempts:
            gpus = request.gpus * (claim.members or request.members) // request.members
            last = None if summary.phase is RunPhase.RUNNING else summary.last_activity or claim.written_at
            yield GpuHold(request.queue, gpus, claim.written_at, end.ended_at if end else last)
