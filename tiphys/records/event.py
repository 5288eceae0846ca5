"""What happened that no other record says."""

from typing import Any

from pydantic import Field

from tiphys.records.base import Record, StoredRecord, Timestamp, utc_now


class Event(Record):
    """One sentence for a person, with the facts beside it for a program.

    ``name`` is ``noun.verb_past``, such as ``checkpoint.skipped``.
    """

    name: str
    at: Timestamp = Field(default_factory=utc_now)
    step: str = ""
    attempt: int | None = None
    message: str
    data: dict[str, Any] = {}


class EventBatch(StoredRecord):
    """``events/<n>.json``: events of one writer; n is claimed by creating the object."""

    run: str
    source: str
    """Which program wrote it: ``plugin``, ``trainer``, ``controller`` or ``engine``."""
    events: tuple[Event, ...]
