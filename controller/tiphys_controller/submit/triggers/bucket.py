"""Lists the objects of a bucket, with what identifies their content."""

import threading
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tiphys.records import ObjectVersion
from tiphys.store.buckets.s3_client import make_client, translate_boto_errors

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

_PAGE_OBJECTS = 1000


class ObjectPage(NamedTuple):
    """A part of a listing, in ascending order of keys."""

    versions: tuple[ObjectVersion, ...]
    next_key: str
    """Key after which the listing goes on; empty at its end."""


class Buckets(Protocol):
    """Buckets of the storage service. Both methods raise `StoreError` if it is unavailable or refuses the request."""

    def find(self, bucket: str, key: str) -> ObjectVersion | None:
        """The object; None if there is none."""

    def list_page(self, bucket: str, prefix: str, after: str) -> ObjectPage:
        """The next objects whose key begins with ``prefix`` and is greater than ``after``, a thousand at most."""


class S3Buckets:
    """Buckets of S3, by `s3:ListBucket` alone: no object is read."""

    def __init__(self, create_client: "Callable[[], S3Client]" = lambda: make_client(whole_listings=True)) -> None:
        self._create_client = create_client
        self._created: S3Client | None = None
        self._lock = threading.Lock()

    def find(self, bucket: str, key: str) -> ObjectVersion | None:
        # Of all keys that begin with `key`, `key` itself comes first.
        page = self._list(bucket, key, "", 1)
        return next((version for version in page.versions if version.key == key), None)

    def list_page(self, bucket: str, prefix: str, after: str) -> ObjectPage:
        return self._list(bucket, prefix, after, _PAGE_OBJECTS)

    def _list(self, bucket: str, prefix: str, after: str, limit: int) -> ObjectPage:
        client = self._client()
        with translate_boto_errors(f"s3://{bucket}", f"list {prefix[:200]}", client.meta.endpoint_url):
            if after:
                reply = client.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=limit, StartAfter=after)
            else:
                reply = client.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=limit)
        rows = reply.get("Contents", ())
        versions = tuple(
            ObjectVersion(
                bucket=bucket,
                key=row["Key"],
                etag=row["ETag"].strip('"'),
                size=row["Size"],
                # The client's parser leaves times as they are.
                modified=datetime.fromisoformat(str(row["LastModified"])),
            )
            for row in rows
        )
        return ObjectPage(versions, versions[-1].key if versions and reply["IsTruncated"] else "")

    def _client(self) -> "S3Client":
        with self._lock:
            if self._created is None:
                self._created = self._create_client()
            return self._created
