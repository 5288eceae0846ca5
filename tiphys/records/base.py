"""Base classes of all stored records.

A record is written once, under a key that no other writer can reuse. After a
lost reply its writer reads the object back and compares ``nonce``, which differs
between competing writers (see `tiphys.store.claims`). ``written_at`` is for
display; no decision depends on it, because clocks disagree.
"""

import json
import secrets
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from tiphys.records.names import json_digest


def utc_now() -> datetime:
    """The current time in UTC, truncated to milliseconds."""
    now = datetime.now(UTC)
    return now.replace(microsecond=now.microsecond // 1000 * 1000)


def _serialize_timestamp(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _check_has_utc(time: datetime) -> datetime:
    try:
        time.astimezone(UTC)
    except OverflowError as error:
        raise ValueError("it is before the first or after the last year of the calendar") from error
    return time


Timestamp = Annotated[
    AwareDatetime,
    AfterValidator(_check_has_utc),
    PlainSerializer(_serialize_timestamp, return_type=str, when_used="json"),
]
"""A time whose JSON form (RFC 3339, UTC) always has three decimals, so that it sorts as text."""


UNKNOWN_VERSION = "unknown_version"
"""Type of the validation error for a record with another schema version."""


class Record(BaseModel):
    """A frozen value with a stable JSON form. Readers ignore fields they do not know."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    def to_bytes(self) -> bytes:
        """The stored form: JSON with sorted keys and a final newline."""
        return encode_document(self.model_dump(mode="json", exclude_none=True))


def encode_document(document: dict[str, Any]) -> bytes:
    """The stored bytes of a JSON document."""
    return json.dumps(document, sort_keys=True, ensure_ascii=False).encode() + b"\n"


SCHEMA_VERSION = 1
"""Version of all stored records. New fields do not change it; it changes only if old readers would be wrong."""


def shortened(characters: int) -> BeforeValidator:
    """Cut a text that a program wrote, when it is written and when it is read: services keep such texts in memory."""
    return BeforeValidator(lambda text: text[:characters] if isinstance(text, str) else text)


MAX_RECORD_BYTES = 4 << 20
"""Size of the largest record, and of the largest object that `tiphys.store.Store.read` returns. Without a limit, one
object of a tenant could fill the memory of a service that reads the records of all tenants."""
MAX_PROGRAM_RECORD_BYTES = 64 << 10
"""Size of the largest record of the kinds that programs write and services read by the dozen."""


class StoredRecord(Record):
    """A record with its own key in storage. Validation refuses other schema versions, whose meaning is unknown."""

    max_bytes: ClassVar[int] = MAX_RECORD_BYTES
    """Writers refuse, and readers do not parse, a larger record of this kind."""
    damage_remedy: ClassVar[str] = "restore the object or remove the run"
    """What to do about a damaged record of this kind."""

    version: int = SCHEMA_VERSION
    nonce: str = Field(default_factory=lambda: secrets.token_hex(8))
    written_at: Timestamp = Field(default_factory=utc_now)

    def named_namespaces(self) -> tuple[str, ...]:
        """Namespaces of the cluster that the record names; they must be that of its store."""
        return ()

    @model_validator(mode="before")
    @classmethod
    def _check_version(cls, document: Any, info: ValidationInfo) -> Any:
        if info.mode == "json" and isinstance(document, dict):
            check_version(document)
        return document


class StoreFormatRecord(StoredRecord):
    """``control/format.json``: names the format of the store; written before its first run."""

    format: int


class SealedRecord(StoredRecord):
    """A record stored with a digest of itself. Reading a record that was changed later fails."""

    def to_bytes(self) -> bytes:
        document = self.model_dump(mode="json", exclude_none=True)
        return encode_document({**document, "seal": compute_seal(document)})

    @model_validator(mode="before")
    @classmethod
    def _check_seal(cls, document: Any, info: ValidationInfo) -> Any:
        # Checked on the document: the model drops fields that a later version added.
        if info.mode != "json" or not isinstance(document, dict):
            return document
        check_seal(document)
        return {name: value for name, value in document.items() if name != "seal"}


def check_version(document: dict[str, Any]) -> None:
    """Check the schema version of a stored document.

    Raises:
        PydanticCustomError: the version differs; its type is `UNKNOWN_VERSION`.
    """
    version = document.get("version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise PydanticCustomError(UNKNOWN_VERSION, "it has schema version {version}", {"version": json.dumps(version)})


def check_seal(document: dict[str, Any]) -> None:
    """Check the schema version and the seal of a stored document.

    Raises:
        PydanticCustomError: the version differs, as in `check_version`.
        ValueError: the document was changed after it was written.
    """
    check_version(document)  # first: another schema version may compute the seal in another way
    if document.get("seal") != compute_seal(document):
        raise ValueError("it was changed after it was written, its seal does not match")


def compute_seal(document: dict[str, Any]) -> str:
    """Digest of all fields of a stored document except the seal."""
    return json_digest({name: value for name, value in document.items() if name != "seal"})
