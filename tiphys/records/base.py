"""What every stored record has in common.

A record is written once, under a key that nobody else may take. ``nonce`` tells
its writer apart from a competitor when a reply was lost: the writer reads the
object back and compares (see `tiphys.store.claims`). ``written_at`` is for
people; no decision is taken from it, because clocks disagree.
"""

import json
import secrets
from datetime import UTC, datetime
from typing import Annotated

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, PlainSerializer


def utc_now() -> datetime:
    """The present time, to the millisecond, in UTC."""
    now = datetime.now(UTC)
    return now.replace(microsecond=now.microsecond // 1000 * 1000)


def _fixed_width(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


Timestamp = Annotated[AwareDatetime, PlainSerializer(_fixed_width, return_type=str, when_used="json")]
"""A time whose JSON form always has three decimals, so that it sorts as text (RFC 3339, UTC)."""


class Record(BaseModel):
    """A frozen value with a stable JSON form. Readers ignore fields they do not know."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    def to_bytes(self) -> bytes:
        """The stored form: JSON with sorted keys and a final newline."""
        document = self.model_dump(mode="json", exclude_none=True)
        return json.dumps(document, sort_keys=True, ensure_ascii=False).encode() + b"\n"


class StoredRecord(Record):
    """A record with a key of its own in storage."""

    version: int = 1
    nonce: str = Field(default_factory=lambda: secrets.token_hex(8))
    written_at: Timestamp = Field(default_factory=utc_now)
