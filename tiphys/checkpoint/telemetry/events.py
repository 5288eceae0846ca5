"""What a session reports: log lines on standard error, and events of the run.

A line is logged at once; an event is stored if storage accepts it in time.
Reporting never fails, because it must not stop a training.
"""

import functools
import sys
from collections.abc import Sequence
from typing import Any

from tiphys.checkpoint.telemetry.secret_mask import mask_secrets, mask_texts
from tiphys.errors import TiphysError
from tiphys.protocol import environment
from tiphys.records import CheckpointRef, Event, SkippedCheckpoint
from tiphys.records.event import PROGRAM_EVENT_SOURCE
from tiphys.store import Store, append_events
from tiphys.threads import start_background_thread


def log_message(message: str) -> None:
    """Write one line to standard error, which is the log of the pod."""
    sys.stderr.write(f"{environment.LOG_PREFIX}{message}\n")
    sys.stderr.flush()


@functools.cache
def log_once(message: str) -> None:
    """Write a line that this process has not written yet, as `log_message` does."""
    log_message(message)


class EventLog:
    """Logs and stores the events of one attempt; a failure of storage is only logged."""

    def __init__(self, store: Store, run: str, step: str, attempt: int) -> None:
        self._store = store
        self._run = run
        self._step = step
        self._attempt = attempt
        self.stores = True
        """Whether events are stored; otherwise they are only logged."""

    def make_event(self, name: str, message: str, **data: Any) -> Event:
        """Return an event of this attempt, for `record`."""
        message = mask_secrets(message)
        return Event(name=name, step=self._step, attempt=self._attempt, message=message, data=mask_texts(data))

    def restored_event(self, ref: CheckpointRef) -> Event:
        """Return the event that the attempt resumes from ``ref``."""
        message = f"attempt {self._attempt} resumes from step {ref.global_step} ({ref.display_name})"
        return self.make_event("checkpoint.restored", message, checkpoint=str(ref))

    def skipped_event(self, skip: SkippedCheckpoint, fallback: str) -> Event:
        """Return the event that a corrupt checkpoint was skipped; ``fallback`` says what happens instead."""
        message = f"{skip.checkpoint.display_name} is corrupt: {skip.reason}; {fallback}"
        return self.make_event("checkpoint.skipped", message, checkpoint=str(skip.checkpoint))

    def record(self, events: Sequence[Event], *, store: bool = True, timeout_seconds: float | None = None) -> None:
        """Log ``events`` and store them with the run. Never raises.

        ``store=False`` logs them only, such as when no time is left. Without ``timeout_seconds`` this waits until
        storage answers.
        """
        for event in events:
            log_message(event.message)
        if not (store and self.stores) or not events:
            return
        if timeout_seconds is None:
            self._store_events(events)
            return
        # A daemon thread, so that storage without an answer does not keep the program alive.
        if writer := start_background_thread(lambda: self._store_events(events)):
            writer.join(timeout_seconds)
            if writer.is_alive():
                log_message(f"the events above were not stored: storage has not answered for {timeout_seconds:g} s")
        else:
            log_message("the events above were not stored, because no thread could be started to store them in time")

    def _store_events(self, events: Sequence[Event]) -> None:
        try:
            append_events(self._store, self._run, PROGRAM_EVENT_SOURCE, events)
        except TiphysError as error:
            log_message(f"the events above could not be stored: {error}")
