"""Reports the training progress: to storage, for people, and to Argo's progress file.

A report is written at intervals, in the background and by one rank, so that a
step costs one look at the clock. A report that cannot be stored is dropped: the
next one follows, and no training stops for it.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Protocol

from tiphys.checkpoint.telemetry.secret_mask import mask_secrets
from tiphys.errors import TiphysError
from tiphys.records.training_progress import MAX_REPORTED_METRICS, TrainingProgress
from tiphys.store import DirectoryStore, LineageLayout, Store
from tiphys.threads import BackgroundThread, start_background_thread

_FIRST_SECONDS = 1.0
_DIRECTORY_INTERVAL_SECONDS = 2.0
_BUCKET_INTERVAL_SECONDS = 10.0
"""A bucket charges for each write: about 8,600 writes a day."""
_PACE_REPORTS = 6
"""The pace is that of the steps between this many reports."""
_KEPT_REPORTS = 2
"""A reader may have listed the last report but one."""
_CLOSE_SECONDS = 1.0


class SavedStep(NamedTuple):
    """Step of a checkpoint, and when it was committed."""

    global_step: int
    committed_at: datetime


class CommitStatus(Protocol):
    """The commits of one attempt, as its reports describe them."""

    @property
    def newest_saved(self) -> SavedStep | None:
        """The newest checkpoint that the attempt restored or committed."""

    def explain_missing_commit(self, global_step: int) -> str:
        """Why no checkpoint was committed yet, or none any more, after ``global_step`` steps; else empty."""


class ProgressReporter:
    """Reports the progress of one attempt.

    Args:
        store: Store of the run; None for a rank that does not report.
    """

    def __init__(
        self,
        store: Store | None,
        lineage: str,
        attempt: int,
        environ: Mapping[str, str],
        commits: CommitStatus,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._layout = LineageLayout(lineage)
        self._attempt = attempt
        argo_file = environ.get("ARGO_PROGRESS_FILE")
        self._argo_file = Path(argo_file) if argo_file else None
        self._commits = commits
        self._clock = clock
        is_directory = isinstance(store, DirectoryStore)
        self._interval_seconds = _DIRECTORY_INTERVAL_SECONDS if is_directory else _BUCKET_INTERVAL_SECONDS
        self._due_at = clock() + _FIRST_SECONDS
        self._reported: deque[tuple[float, int]] = deque(maxlen=_PACE_REPORTS)
        self._stored_keys: list[str] = []
        self._last_milliseconds = 0
        self._writer: BackgroundThread | None = None

    def record_step(self, global_step: int, total_steps: int | None, metrics: Mapping[str, float] | None) -> None:
        """Report that ``global_step`` steps are complete, if a report is due or this is the last step.

        A report converts ``metrics`` to Python numbers, which waits for a device that still computes them.
        """
        now = self._clock()
        if self._store is None or (now < self._due_at and global_step != total_steps):
            return
        self._due_at = now + self._interval_seconds
        self._reported.append((now, global_step))
        if total_steps:
            self._write_argo_file(global_step, total_steps)
        self._report(global_step, total_steps, metrics or {}, self._commits.explain_missing_commit(global_step))

    def report_hindrance(self, hindrance: str) -> None:
        """Report at once why no checkpoint is committed, for a writer that sees no steps; the next report replaces it.

        ``hindrance`` ends the sentence "no commit yet, because …"; its first 240 characters are kept.
        """
        self._report(self._reported[-1][1] if self._reported else None, None, {}, hindrance)

    def close(self) -> None:
        """Wait a moment for the report that is being stored."""
        if self._writer is not None:
            self._writer.join(_CLOSE_SECONDS)

    def _report(
        self, global_step: int | None, total_steps: int | None, metrics: Mapping[str, float], hindrance: str
    ) -> None:
        if (store := self._store) is None or (self._writer is not None and self._writer.is_alive()):
            return
        checkpoint = self._commits.newest_saved
        progress = TrainingProgress(
            global_step=global_step,
            total_steps=total_steps,
            steps_per_second=self._pace(),
            metrics=_plain_numbers(metrics),
            checkpoint_step=checkpoint.global_step if checkpoint else None,
            checkpoint_at=checkpoint.committed_at if checkpoint else None,
            hindrance=mask_secrets(hindrance) if hindrance else "",
        )
        self._writer = start_background_thread(lambda: self._write(store, progress))

    def _pace(self) -> float | None:
        if not self._reported:
            return None
        (first_at, first_step), (last_at, last_step) = self._reported[0], self._reported[-1]
        return max(0.0, (last_step - first_step) / (last_at - first_at)) if last_at > first_at else None

    def _write_argo_file(self, global_step: int, total_steps: int) -> None:
        if self._argo_file is not None:
            with contextlib.suppress(OSError):
                self._argo_file.write_text(f"{min(global_step, total_steps)}/{total_steps}\n")

    def _write(self, store: Store, progress: TrainingProgress) -> None:
        # Later reports list first, even those of the same millisecond or after a clock was set back.
        milliseconds = max(self._last_milliseconds + 1, round(progress.written_at.timestamp() * 1000))
        self._last_milliseconds = milliseconds
        key = self._layout.training_progress_report(self._attempt, milliseconds)
        with contextlib.suppress(TiphysError):
            store.create(key, progress.to_bytes())
            self._stored_keys.append(key)
            while len(self._stored_keys) > _KEPT_REPORTS:
                store.delete(self._stored_keys[0])
                del self._stored_keys[0]


def _plain_numbers(metrics: Mapping[str, float]) -> dict[str, float]:
    numbers = {}
    for name, value in islice(metrics.items(), MAX_REPORTED_METRICS):
        with contextlib.suppress(Exception):  # a value may be any object, such as an array whose device is lost
            numbers[str(name)] = float(value)
    return numbers
