"""Claims: create-only records that exactly one writer creates.

A write that fails with "exists" may have met the caller's own object: the first
request succeeded, its reply was lost, and the client repeated it. The nonce of
the record shows which writer created it.
"""

from typing import Generic, NamedTuple, TypeVar

from pydantic import ValidationError

from tiphys.errors import IntegrityError, ObjectExistsError, ObjectMissingError, UsageError
from tiphys.records import StoredRecord
from tiphys.records.base import SCHEMA_VERSION, UNKNOWN_VERSION
from tiphys.store.base import Store

RecordT = TypeVar("RecordT", bound=StoredRecord)


class ClaimResult(NamedTuple, Generic[RecordT]):
    """The record under the key, and whether this caller wrote it."""

    record: RecordT
    is_ours: bool


def claim_record(store: Store, key: str, record: RecordT) -> ClaimResult[RecordT]:
    """Write ``record`` under ``key`` unless the key exists; return the record that the key holds.

    Raises:
        UsageError: the record is larger than readers accept.
        IntegrityError: the key holds something else than a valid record of this kind.
    """
    data = record.to_bytes()
    if len(data) > record.max_bytes:
        raise UsageError(
            f"{type(record).__name__} {key} would have {len(data):,} bytes, and such a record has at most "
            f"{record.max_bytes:,}; nothing was written: make the Workflow, or the number of files, smaller"
        )
    try:
        store.create(key, data)
    except ObjectExistsError:
        stored = read_record(store, key, type(record))
        return ClaimResult(stored, is_ours=stored.nonce == record.nonce)
    return ClaimResult(record, is_ours=True)


def read_record(store: Store, key: str, kind: type[RecordT]) -> RecordT:
    """Read and validate one record.

    Raises:
        ObjectMissingError: no object has this key.
        IntegrityError: the object is not a valid record of this kind, has another schema version, or names another
            namespace than that of the store.
    """
    data = store.read(key)
    if len(data) > kind.max_bytes:
        raise IntegrityError(
            f"{store.url}: {key} has {len(data):,} bytes, and a {kind.__name__} has at most {kind.max_bytes:,}; it was "
            f"not read: {kind.damage_remedy}"
        )
    try:
        record = kind.model_validate_json(data)
    except ValidationError as error:
        problem = error.errors()[0]
        if problem["type"] == UNKNOWN_VERSION:
            raise IntegrityError(
                f"{store.url}: {key} was written by another version of Tiphys: {problem['msg']}, and this one reads "
                f"{SCHEMA_VERSION}; nothing was changed: use the version that wrote it, or a later one"
            ) from error
        raise IntegrityError(
            f"{store.url}: {key} is not a valid {kind.__name__}: {problem['msg']}; "
            f"records are never edited: {kind.damage_remedy}"
        ) from error
    _check_namespace(store, key, record)
    return record


def find_record(store: Store, key: str, kind: type[RecordT]) -> RecordT | None:
    """Like `read_record`, but None if no object has this key."""
    try:
        return read_record(store, key, kind)
    except ObjectMissingError:
        return None


def _check_namespace(store: Store, key: str, record: StoredRecord) -> None:
    """Refuse a record that names another namespace than that of its store: it must not reach what runs there."""
    for namespace in record.named_namespaces():
        if store.namespace and namespace and namespace != store.namespace:
            raise IntegrityError(
                f"{store.url}: {key} names namespace {namespace}, and this store belongs to namespace "
                f"{store.namespace}; nothing was done there: remove the object, and find out which program wrote it"
            )
