"""What the stores in a bucket have in common: a prefix before each key, and what the probe of a store asks of them."""

import contextlib
import copy
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Self

from tiphys.errors import UsageError
from tiphys.store.base import Store, UploadSource, bytes_source, check_key, file_source


class BucketStore(Store, ABC):
    """Base of the stores in a bucket.

    Args:
        bucket_url: URL of the bucket, without a final slash.
        prefix: Prefix of all keys, without slashes at its ends.
        page_size: Keys per page of a listing.
        namespace: The namespace whose runs it holds; empty if unknown.
    """

    def __init__(self, bucket_url: str, prefix: str, page_size: int, namespace: str) -> None:
        self._namespace = namespace
        self._bucket_url = bucket_url
        self._prefix = f"{check_key(prefix)}/" if prefix else ""
        self._page_size = page_size

    @property
    def url(self) -> str:
        return f"{self._bucket_url}/{self._prefix}".rstrip("/")

    @property
    def namespace(self) -> str:
        return self._namespace

    @property
    def prefix(self) -> str:
        """Prefix of its keys in the bucket: empty, or with a final slash."""
        return self._prefix

    @abstractmethod
    def check_bucket(self) -> None:
        """Check that the bucket exists.

        Raises:
            NotFoundError: it does not.
        """

    @abstractmethod
    def with_multipart_uploads(self) -> Self:
        """The same store, with uploads in parts for all sizes.

        Servers that support a conditional PUT may ignore the condition of the
        request that completes an upload in parts, on which large shards depend.
        """

    @abstractmethod
    def is_checksum_verified(self, key: str) -> bool:
        """Whether the server refuses bytes that do not match the checksum sent with them. May create an object."""

    @abstractmethod
    def _create(self, key: str, source: UploadSource) -> None:
        """Create an object, or raise `ObjectExistsError`."""

    def with_page_size(self, page_size: int) -> Self:
        """The same store with the same client and smaller pages of listings."""
        other = copy.copy(self)
        other._page_size = page_size
        return other

    def create(self, key: str, data: bytes | bytearray, *, sha256: str | None = None) -> None:
        self._create(key, bytes_source(data, sha256))

    def create_from_file(self, key: str, path: Path) -> None:
        with file_source(path) as source:
            self._create(key, source)

    def artifact_key(self, key: str) -> str:
        return check_key(self._prefix + check_key(key))

    def from_artifact_key(self, key: str) -> str | None:
        with contextlib.suppress(UsageError):
            if key.startswith(self._prefix):
                return check_key(key[len(self._prefix) :])
        return None
