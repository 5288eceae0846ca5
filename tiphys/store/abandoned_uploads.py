"""Abandoned uploads: multipart uploads and temporary files of writers that died.

No listing of objects shows them, and they cost money. Google Cloud Storage and
Azure drop theirs by themselves after a week, so none are removed there. Their
age is measured by the clock of the store, which also recorded their start,
because the clock of the caller may be wrong.
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
from tiphys.store.buckets.s3 import S3Store
from tiphys.store.directory import DirectoryStore


class AbandonedUpload(NamedTuple):
    """One abandoned upload. ``remove`` deletes it, ignores a missing one, and raises `StoreError` on failure."""

    name: str
    age: timedelta
    remove: Callable[[], object]


def find_abandoned_uploads(store: Store, older_than: timedelta) -> Iterator[AbandonedUpload]:
    """Unfinished uploads older than ``older_than``, which must exceed the duration of the longest upload.

    Raises:
        StoreError: storage is unavailable.
    """
    uploads: Iterator[AbandonedUpload] = iter(())
    if isinstance(store, S3Store):
        uploads = _multipart_uploads(store)
    elif isinstance(store, DirectoryStore):
        uploads = _temporary_files(store)
    return (upload for upload in uploads if upload.age > older_than)


def _multipart_uploads(store: S3Store) -> Iterator[AbandonedUpload]:
    with store.translate_errors("list the unfinished uploads of"):
        pages = store.client.get_paginator("list_multipart_uploads").paginate(Bucket=store.bucket, Prefix=store.prefix)
        for page in pages:
            now = parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"])
            for upload in page.get("Uploads", []):
                age = now - _parse_time(upload["Initiated"])
                yield AbandonedUpload(
                    upload["Key"], age, partial(_abort_upload, store, upload["Key"], upload["UploadId"])
                )


def _parse_time(initiated: datetime | str) -> datetime:
    """Parse a time. The client of `S3Store` returns times as text, see `tiphys.store.buckets.s3_client.make_client`."""
    return initiated if isinstance(initiated, datetime) else datetime.fromisoformat(initiated)


def _abort_upload(store: S3Store, key: str, upload: str) -> None:
    with (
        store.translate_errors("abort an unfinished upload of", key),
        contextlib.suppress(store.client.exceptions.NoSuchUpload),
    ):
        store.client.abort_multipart_upload(Bucket=store.bucket, Key=key, UploadId=upload)


def _temporary_files(store: DirectoryStore) -> Iterator[AbandonedUpload]:
    folder = store.temporary_folder
    if not folder.is_dir():
        return
    probe = folder / secrets.token_hex(16)
    try:
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
        for file in sorted(folder.iterdir()):
            with contextlib.suppress(FileNotFoundError):  # its writer finished meanwhile
                started = file.stat().st_mtime
                age = datetime.fromtimestamp(now, UTC) - datetime.fromtimestamp(started, UTC)
                yield AbandonedUpload(file.name, age, partial(file.unlink, missing_ok=True))
    except OSError as error:
        raise StoreError(f"{store.url}: cannot read {folder}: {error.strerror}; check its permissions") from error
