"""What every stored record has in common.

A record is written once, under a key that nobody else may take. ``nonce`` tells
its writer apart from a competitor when a reply was lost: the writer reads the
object back and compares (see `tiphys.store.claims`). ``written_at`` is for
people; no decision is taken from it, because clocks disagree.
"""

import json
import secrets
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, PlainSerializer, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from tiphys.records.names import digest


def utc_now() -> datetime:
    """The present time, to the millisecond, in UTC."""
    now = datetime.now(UTC)
    return now.replace(microsecond=now.microsecond // 1000 * 1000)


def _fixed_width(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


Timestamp = Annotated[AwareDatetime, PlainSerializer(_fixed_width, return_type=str, when_used="json")]
"""A time whose JSON form always has three decimals, so that it sorts as text (RFC 3339, UTC)."""


UNKNOWN_VERSION = "unknown_version"
"""Type of the validation error about a record that another version of Tiphys wrote."""


class Record(BaseModel):
    """A frozen value with a stable JSON form. Readers ignore fields they do not know."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    def to_bytes(self) -> bytes:
        """The stored form: JSON with sorted keys and a final newline."""
        return stored_form(self.model_dump(mode="json", exclude_none=True))


def stored_form(document: dict[str, Any]) -> bytes:
    """The bytes of a JSON document as records are stored."""
    return json.dumps(document, sort_keys=True, ensure_ascii=False).encode() + b"\n"


SCHEMA_VERSION = 1
"""Of all stored records. Fields are added without a new one; it changes only when old readers would be wrong."""


class StoredRecord(Record):
    """A record with a key of its own in storage. One of another schema version is refused: it may mean anything."""

    version: int = SCHEMA_VERSION
    nonce: str = Field(default_factory=lambda: secrets.token_hex(8))
    written_at: Timestamp = Field(default_factory=utc_now)

    @model_validator(mode="before")
    @classmethod
    def _check_version(cls, document: Any, info: ValidationInfo) -> Any:
        if info.mode == "json" and isinstance(document, dict):
            check_version(document)
        return document


class SealedRecord(StoredRecord):
    """A record that decisions rest on, stored with a digest of itself; reading one that was changed since fails."""

    def to_bytes(self) -> bytes:
        document = self.for_storage(self.model_dump(mode="json", exclude_none=True))
        return stored_form({**document, "seal": seal(document)})

    @classmethod
    def for_storage(cls, document: dict[str, Any]) -> dict[str, Any]:
        """The stored form of a document, where it differs for the sake of readers of older versions."""
        return document

    @classmethod
    def from_storage(cls, document: dict[str, Any]) -> dict[str, Any]:
        """The opposite of `for_storage`."""
        return document

    @model_validator(mode="before")
    @classmethod
    def _check_seal(cls, document: Any, info: ValidationInfo) -> Any:
        # On the document rather than the model, which leaves out fields that a later version added.
        if info.mode != "json" or not isinstance(document, dict):
            return document
        check_version(document)  # first: another version may seal in another way
        if document.get("seal") != seal(document):
            raise ValueError("it was changed after it was written, its seal does not match")
        return cls.from_storage({name: value for name, value in document.items() if name != "seal"})


def check_version(document: dict[str, Any]) -> None:
    """Refuse a stored document of another schema version; the error has the type `UNKNOWN_VERSION`."""
    version = document.get("version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise PydanticCustomError(UNKNOWN_VERSION, "it has schema version {version}", {"version": json.dumps(version)})


def seal(document: dict[str, Any]) -> str:
    """Digest of all fields of a stored document but the seal itself."""
    return digest({name: value for name, value in document.items() if name != "seal"})
