"""Events: occurrences in a run that no other record holds, such as a skipped checkpoint."""

from typing import Any, ClassVar

from pydantic import Field

from tiphys.records.base import MAX_PROGRAM_RECORD_BYTES, Record, StoredRecord, Timestamp, utc_now


class Event(Record):
    """One occurrence: a sentence for people, and its data for programs.

    ``name`` is ``noun.verb_past``, such as ``checkpoint.skipped``.
    """

    name: str
    at: Timestamp = Field(default_factory=utc_now)
    step: str = ""
    attempt: int | None = None
    message: str
    data: dict[str, Any] = {}


PROGRAM_EVENT_SOURCE = "trainer"
"""Source of the events of training programs, which have a place of their own in the store."""

PROGRAM_EVENT_PREFIXES = ("checkpoint.", "program.")
"""Programs report on their checkpoints and their own processes. Readers drop every other event of theirs as forged."""


class EventBatch(StoredRecord):
    """``events/<n>.json``: events of one writer. The writer claims the number n by creating the object."""

    run: str
    source: str
    """The writer: ``plugin``, ``trainer``, ``controller`` or ``engine``."""
    events: tuple[Event, ...]


class ProgramEventBatch(EventBatch):
    """A batch that a training program stored."""

    max_bytes: ClassVar[int] = MAX_PROGRAM_RECORD_BYTES
