"""Events: occurrences in a run that no other record holds, such as a skipped checkpoint."""

from typing import Any

from pydantic import Field

from tiphys.records.base import Record, StoredRecord, Timestamp, utc_now


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


class EventBatch(StoredRecord):
    """``events/<n>.json``: events of one writer. The writer claims the number n by creating the object."""

    run: str
    source: str
    """The writer: ``plugin``, ``trainer``, ``controller`` or ``engine``."""
    events: tuple[Event, ...]
