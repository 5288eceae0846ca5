"""Reads the records of one run incrementally.

Records never change, so each is read once. A call of `RunLog.read` costs three
listings and at most `READS` reads, however long the run is; the rest follows
with the next call.
"""

from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from typing import NamedTuple

from tiphys.errors import IntegrityError
from tiphys.protocol.fan_out import find_item
from tiphys.records import AttemptClaim, AttemptEndOutcome, Cause, Event, EventBatch
from tiphys.store import RunLayout, Store, read_attempt_end, read_record
from tiphys.store.attempt_ends import unreadable_end
from tiphys.store.layout import parse_attempt, parse_event_batch
from tiphys.store.runs import list_program_batches, read_concurrently, read_program_events

READS = 64
REPORTED_EVENTS = {
    "checkpoint.skipped": ("CheckpointSkipped", True),
    "checkpoint.save_failed": ("CheckpointNotSaved", True),
    "run.resumed": ("RunResumed", False),
    "run.triggered": ("RunTriggered", False),
    "lease.forced": ("LeaseForced", True),
}
"""Reason of the Kubernetes Event, and whether it is a warning, by the name of the event of the run."""

AttemptKey = tuple[str, int]
"""Step id and number of an attempt."""


class AttemptStart(NamedTuple):
    """Fields of an attempt's claim that Events report."""

    submission: int
    opened_at: datetime
    starts_from: str
    """Description of the checkpoint; empty for none."""
    skipped_checkpoints: tuple[str, ...]
    """Checkpoints that were skipped, each with the reason."""
    lineage: str
    """Lineage of a training; empty for another step."""


class AttemptOutcome(NamedTuple):
    """How an attempt ended."""

    ended_at: datetime
    outcome: AttemptEndOutcome
    cause: Cause | None
    message: str


class RunLog:
    """The records of one run that have been read so far."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.attempt_starts: dict[AttemptKey, AttemptStart] = {}
        self.attempt_outcomes: dict[AttemptKey, AttemptOutcome] = {}
        self.events: dict[str, tuple[Event, ...]] = {}
        """Events that are worth a Kubernetes Event, by the key of their batch."""
        self.is_complete = False
        """Whether the last `read` reached the end."""
        self._layout = RunLayout(run)
        self._step_names: dict[str, str] = {}

    def step_name(self, step: str) -> str:
        """Name of a step or item for people, such as ``fit[2]``; its step id as long as none of its claims was read."""
        return self._step_names.get(step, step)

    def read(self, store: Store) -> None:
        """Read new records, up to `READS`.

        Raises:
            StoreError: storage is out of reach.
            IntegrityError: a record is damaged.
        """
        unread = [*self._attempts(store), *self._events(store)]
        read_concurrently(lambda read: read(), unread[:READS])
        self.is_complete = len(unread) <= READS

    def _attempts(self, store: Store) -> Iterator[Callable[[], None]]:
        for info in store.list(self._layout.attempts):
            if (record_key := parse_attempt(info.key)) is None:
                continue
            step, attempt, is_end = record_key
            if (step, attempt) not in (self.attempt_outcomes if is_end else self.attempt_starts):
                keep = self._keep_end if is_end else self._keep_claim
                yield partial(keep, store, (step, attempt))

    def _events(self, store: Store) -> Iterator[Callable[[], None]]:
        for info in store.list(self._layout.events):
            if parse_event_batch(info.key) is not None and info.key not in self.events:
                yield partial(self._keep_events, info.key, lambda key: read_record(store, key, EventBatch).events)
        for key in list_program_batches(store, self.run):
            if key not in self.events:
                yield partial(self._keep_events, key, partial(read_program_events, store))

    def _keep_claim(self, store: Store, attempt: AttemptKey) -> None:
        claim = read_record(store, self._layout.attempt(*attempt), AttemptClaim)
        if item := find_item(claim.instance):
            self._step_names[claim.step] = item.display_name
        start = claim.starts_from
        self.attempt_starts[attempt] = AttemptStart(
            submission=claim.submission,
            opened_at=claim.written_at,
            starts_from=f"checkpoint {start.global_step} of attempt {start.attempt}" if start else "",
            skipped_checkpoints=tuple(
                f"checkpoint {skip.checkpoint.global_step} of attempt {skip.checkpoint.attempt} was skipped: "
                f"{skip.reason}"
                for skip in claim.skipped
            ),
            lineage=claim.lineage,
        )

    def _keep_end(self, store: Store, attempt: AttemptKey) -> None:
        try:
            end = read_attempt_end(store, self.run, *attempt)
        except IntegrityError as error:
            end = unreadable_end(read_record(store, self._layout.attempt(*attempt), AttemptClaim), error)
        self.attempt_outcomes[attempt] = AttemptOutcome(end.written_at, end.outcome, end.cause, end.message)

    def _keep_events(self, key: str, read: Callable[[str], tuple[Event, ...]]) -> None:
        self.events[key] = tuple(event for event in read(key) if event.name in REPORTED_EVENTS)
