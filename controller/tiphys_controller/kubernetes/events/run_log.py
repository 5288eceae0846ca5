"""What storage says of the run of one Workflow, read piece by piece.

Records never change, so each is read once and its facts are kept. A look costs
two listings and at most `READS` reads, however long the run is; what is left
over comes with the next look.
"""

from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from typing import NamedTuple

from tiphys.records import AttemptClaim, AttemptEnd, Cause, Event, EventBatch, Outcome
from tiphys.store import RunLayout, Store, read_record
from tiphys.store.layout import parse_attempt, parse_event_batch
from tiphys.store.runs import concurrently

READS = 64

AttemptKey = tuple[str, int]
"""Step id and number of an attempt."""


class Opened(NamedTuple):
    """Of an attempt's claim, what people are told."""

    submission: int
    at: datetime
    starts_from: str
    """The checkpoint in words; empty for none."""
    skipped: tuple[str, ...]
    """Checkpoints that were passed over, and why."""


class Ended(NamedTuple):
    """How an attempt ended."""

    at: datetime
    outcome: Outcome
    cause: Cause | None
    message: str


class RunLog:
    """The facts of one run that have been read so far."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.opened: dict[AttemptKey, Opened] = {}
        self.ended: dict[AttemptKey, Ended] = {}
        self.events: dict[int, tuple[Event, ...]] = {}
        self.complete = False
        """False while there is more to read."""
        self._layout = RunLayout(run)

    def read(self, store: Store) -> None:
        """Read what is new, up to `READS` records.

        Raises:
            StoreError: storage is out of reach.
            IntegrityError: a record is damaged.
        """
        wanted = [*self._attempts(store), *self._events(store)]
        concurrently(lambda read: read(), wanted[:READS])
        self.complete = len(wanted) <= READS

    def _attempts(self, store: Store) -> Iterator[Callable[[], None]]:
        for info in store.list(self._layout.attempts):
            if (place := parse_attempt(info.key)) is None:
                continue
            step, attempt, is_end = place
            if (step, attempt) not in (self.ended if is_end else self.opened):
                keep = self._keep_end if is_end else self._keep_claim
                yield partial(keep, store, (step, attempt), info.key)

    def _events(self, store: Store) -> Iterator[Callable[[], None]]:
        for info in store.list(self._layout.events):
            number = parse_event_batch(info.key)
            if number is not None and number not in self.events:
                yield partial(self._keep_events, store, number, info.key)

    def _keep_claim(self, store: Store, place: AttemptKey, key: str) -> None:
        claim = read_record(store, key, AttemptClaim)
        start = claim.starts_from
        self.opened[place] = Opened(
            submission=claim.submission,
            at=claim.written_at,
            starts_from=f"checkpoint {start.global_step} of attempt {start.attempt}" if start else "",
            skipped=tuple(
                f"checkpoint {one.checkpoint.global_step} of attempt {one.checkpoint.attempt} was passed over: "
                f"{one.reason}"
                for one in claim.skipped
            ),
        )

    def _keep_end(self, store: Store, place: AttemptKey, key: str) -> None:
        end = read_record(store, key, AttemptEnd)
        self.ended[place] = Ended(end.written_at, end.outcome, end.cause, end.message)

    def _keep_events(self, store: Store, number: int, key: str) -> None:
        self.events[number] = read_record(store, key, EventBatch).events
