"""What writers that died left behind: uploads in parts that never became an object, and temporary files.

Nobody sees them, and they cost money. Their age is told by the clock of the
store, which has also written when they began: that of the caller may be wrong.
"""

import contextlib
import secrets
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from typing import NamedTuple

from tiphys.errors import StoreError
from tiphys.store.base import Store
from tiphys.store.directory import DirectoryStore
from tiphys.store.s3 import S3Store


class Leftover(NamedTuple):
    """One of them, and how to remove it. ``remove`` raises `StoreError`, and nothing if it is gone."""

    name: str
    age: timedelta
    remove: Callable[[], object]


def leftovers(store: Store, older_than: timedelta) -> Iterator[Leftover]:
    """Those that are older than this; whoever is still writing one of them would have to take longer.

    Raises:
        StoreError: storage is out of reach.
    """
    found: Iterator[Leftover] = iter(())
    if isinstance(store, S3Store):
        found = _uploads(store)
    elif isinstance(store, DirectoryStore):
        found = _files(store)
    return (one for one in found if one.age > older_than)


def _uploads(store: S3Store) -> Iterator[Leftover]:
    with store.explained("list the unfinished uploads of"):
        pages = store.client.get_paginator("list_multipart_uploads").paginate(Bucket=store.bucket, Prefix=store.prefix)
        for page in pages:
            now = parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"])
            for upload in page.get("Uploads", []):
                age = now - _time(upload["Initiated"])
                yield Leftover(upload["Key"], age, partial(_abort, store, upload["Key"], upload["UploadId"]))


def _time(initiated: datetime | str) -> datetime:
    """The client of this store leaves times as they are on the wire: listings have many, and nobody reads them."""
    return initiated if isinstance(initiated, datetime) else datetime.fromisoformat(initiated)


def _abort(store: S3Store, key: str, upload: str) -> None:
    with (
        store.explained("abort an unfinished upload of", key),
        contextlib.suppress(store.client.exceptions.NoSuchUpload),
    ):
        store.client.abort_multipart_upload(Bucket=store.bucket, Key=key, UploadId=upload)


def _files(store: DirectoryStore) -> Iterator[Leftover]:
    folder = store.temporary
    if not folder.is_dir():
        return
    probe = folder / secrets.token_hex(16)
    try:
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
        for file in sorted(folder.iterdir()):
            with contextlib.suppress(FileNotFoundError):  # its writer was not dead
                begun = file.stat().st_mtime
                age = datetime.fromtimestamp(now, UTC) - datetime.fromtimestamp(begun, UTC)
                yield Leftover(file.name, age, partial(file.unlink, missing_ok=True))
    except OSError as error:
        raise StoreError(f"{store.url}: cannot look at {folder}: {error.strerror}; check its permissions") from error
