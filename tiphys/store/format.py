"""The format of a store, named by a marker inside it.

A process that met keys of another layout would see a store without runs, and
would start each run from the beginning. The marker lets it refuse instead.
"""

import contextlib

from tiphys.errors import ObjectExistsError, StoreFormatError
from tiphys.records import StoreFormatRecord
from tiphys.store.base import Store
from tiphys.store.claims import find_record
from tiphys.store.layout import FORMAT_MARKER

STORE_FORMAT = 3
"""Increased when a release writes keys that the release before cannot find."""


def check_format(store: Store) -> None:
    """Return if this version reads the format of ``store``, or if the store has no marker yet. Costs one read.

    Raises:
        StoreFormatError: another version of Tiphys wrote the store.
    """
    marker = find_record(store, FORMAT_MARKER, StoreFormatRecord)
    if marker is not None and marker.format != STORE_FORMAT:
        raise StoreFormatError(_refusal(store, marker.format))


def mark_format(store: Store) -> None:
    """Write the marker if it is missing; `tiphys.store.claim_run` does so before it writes the record of a run."""
    with contextlib.suppress(ObjectExistsError):
        store.create(FORMAT_MARKER, StoreFormatRecord(format=STORE_FORMAT).to_bytes())


def _refusal(store: Store, found: int) -> str:
    if found < STORE_FORMAT:
        remedy = "finish its runs with the version that wrote it, and give this version an empty prefix or folder"
    else:
        remedy = "update Tiphys here"
    return (
        f"{store.url} has format {found}, and this version of Tiphys reads format {STORE_FORMAT}; "
        f"nothing was changed: {remedy}"
    )
