"""What the training program has to tell: to its log at once, and to the run's events if storage lets it.

``step/total`` for the progress bar of Argo, through the file that it reads.
"""

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tiphys.errors import TiphysError
from tiphys.records import CheckpointRef, Event, Skipped
from tiphys.store import Store, append_events
from tiphys.threads import in_background

SOURCE = "trainer"


def tell(message: str) -> None:
    """Write one line to standard error, where the pod's log takes it."""
    sys.stderr.write(f"tiphys: {message}\n")
    sys.stderr.flush()


class Journal:
    """Events of one attempt. Telling never fails: it must not be what stops a training."""

    def __init__(self, store: Store, run: str, step: str, attempt: int) -> None:
        self._store = store
        self._run = run
        self._step = step
        self._attempt = attempt

    def event(self, name: str, message: str, **data: Any) -> Event:
        """An event of this attempt, for `record`."""
        return Event(name=name, step=self._step, attempt=self._attempt, message=message, data=data)

    def restored(self, ref: CheckpointRef) -> Event:
        """The attempt goes on from ``ref``."""
        message = f"attempt {self._attempt} resumes from step {ref.global_step} ({ref.words})"
        return self.event("checkpoint.restored", message, checkpoint=str(ref))

    def skipped(self, skip: Skipped, instead: str) -> Event:
        """A checkpoint was passed over; ``instead`` says what is done."""
        message = f"{skip.checkpoint.words} is corrupt: {skip.reason}; {instead}"
        return self.event("checkpoint.skipped", message, checkpoint=str(skip.checkpoint))

    def record(self, events: Sequence[Event], *, store: bool = True, timeout_seconds: float | None = None) -> None:
        """Tell ``events``, and store them unless there is no time for it; wait at most ``timeout_seconds``."""
        for event in events:
            tell(event.message)
        if not store or not events:
            return
        if timeout_seconds is None:
            self._store_events(events)
            return
        # A thread that the interpreter does not wait for.
        if writer := in_background(lambda: self._store_events(events)):
            writer.join(timeout_seconds)
        else:
            tell("the events above were not stored, since no thread could be started to do it in time")

    def _store_events(self, events: Sequence[Event]) -> None:
        try:
            append_events(self._store, self._run, SOURCE, events)
        except TiphysError as error:
            tell(f"the events above could not be stored: {error}")


_INTERVAL_SECONDS = 1.0


class Progress:
    """Writes the file at most once a second; does nothing without a path or a total."""

    def __init__(self, path: str, total_steps: int | None, clock: Callable[[], float]) -> None:
        self._path = Path(path) if path and total_steps else None
        self._total = total_steps or 0
        self._clock = clock
        self._written_at: float | None = None

    def report(self, global_step: int) -> None:
        """Note that ``global_step`` steps are complete."""
        if self._path is None:
            return
        now = self._clock()
        recent = self._written_at is not None and now - self._written_at < _INTERVAL_SECONDS
        if recent and global_step < self._total:
            return
        self._written_at = now
        with contextlib.suppress(OSError):  # a progress bar is not worth a training
            self._path.write_text(f"{min(global_step, self._total)}/{self._total}\n")
