"""Create-only records: who won, told apart even when a reply was lost.

A write that answers "exists" may be our own, applied before its reply got lost
and repeated by the client's retry. The record's nonce says so.
"""

from typing import Generic, NamedTuple, TypeVar

from pydantic import ValidationError

from tiphys.errors import IntegrityError, ObjectExistsError, ObjectMissingError
from tiphys.records import StoredRecord
from tiphys.records.base import SCHEMA_VERSION, UNKNOWN_VERSION
from tiphys.store.base import Store

RecordT = TypeVar("RecordT", bound=StoredRecord)


class Claim(NamedTuple, Generic[RecordT]):
    """``record`` is what the key holds now; ``won`` says whether it is the one we wrote."""

    record: RecordT
    won: bool


def claim(store: Store, key: str, record: RecordT) -> Claim[RecordT]:
    """Write ``record`` under ``key`` unless the key is taken; answer what the key holds."""
    try:
        store.create(key, record.to_bytes())
    except ObjectExistsError:
        held = read_record(store, key, type(record))
        return Claim(held, won=held.nonce == record.nonce)
    return Claim(record, won=True)


def read_record(store: Store, key: str, kind: type[RecordT]) -> RecordT:
    """Read and check one record.

    Raises:
        ObjectMissingError: no object has this key.
        IntegrityError: the object is not such a record.
    """
    data = store.read(key)
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        problem = error.errors()[0]
        if problem["type"] == UNKNOWN_VERSION:
            raise IntegrityError(
                f"{store.url}: {key} was written by another version of Tiphys: {problem['msg']}, and this one reads "
                f"{SCHEMA_VERSION}; nothing was changed: use the version that wrote it, or a later one"
            ) from error
        raise IntegrityError(
            f"{store.url}: {key} is not a valid {kind.__name__}: {problem['msg']}; "
            "records are never edited: restore the object or remove the run"
        ) from error


def find_record(store: Store, key: str, kind: type[RecordT]) -> RecordT | None:
    """Like `read_record`, with None where there is no such object."""
    try:
        return read_record(store, key, kind)
    except ObjectMissingError:
        return None
