"""Store in a bucket of Google Cloud Storage.

The store uses the official library, which the extra ``gcs`` installs. Every
upload carries ``ifGenerationMatch=0``, so that only the first writer of a key
succeeds, and a CRC32C, which the server verifies. A large object is sent by a
resumable upload: its last chunk makes the object, under the same condition.
The parts of an upload that nobody finished are no objects, cost nothing, and
are dropped by the service after a week.
Source: Google Cloud Storage, "Request preconditions" and "Resumable uploads".
"""

import contextlib
import copy
import functools
import io
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tiphys.errors import (
    ForbiddenError,
    IntegrityError,
    NotFoundError,
    ObjectExistsError,
    ObjectMissingError,
    SettingsError,
    StoreError,
    TiphysError,
    UsageError,
    install_command,
)
from tiphys.faults import failpoint
from tiphys.records.base import MAX_RECORD_BYTES
from tiphys.store.base import ObjectInfo, UploadSource, check_read_size
from tiphys.store.buckets.bucket_store import BucketStore

if TYPE_CHECKING:
    from google.cloud.storage import Blob, Bucket, Client

_EXTRA_MISSING = (
    "gs:// needs the library google-cloud-storage, which is not installed here; install tiphys "
    f"with its extra: {install_command('gcs')}"
)
# Google's rules are stricter, and its servers report them.
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
# Connecting, and one wait for bytes.
_TIMEOUT_SECONDS = (5.0, 30.0)
_POOL_CONNECTIONS = 32
# A multiple of 256 KiB. One chunk is held in memory.
_CHUNK_BYTES = 16 << 20
# The URI of a resumable upload is a credential for it.
_SECRETS = re.compile(r"(upload_id=)[^&\s:'\")]+")
_MAX_REASON = 500
_RETENTION = frozenset(("retentionPolicyNotMet", "objectUnderActiveHold"))
_CREDENTIALS = (
    "give this process application default credentials: workload identity on GKE, the service account of the machine, "
    "or `gcloud auth application-default login`"
)
_PERMISSIONS = "they need storage.objects.get, storage.objects.create, storage.objects.delete and storage.objects.list"


class GcsStore(BucketStore):
    """A store below a prefix in a bucket of Google Cloud Storage.

    Credentials are the application default credentials: workload identity, the
    service account of the machine, or ``gcloud auth application-default login``.
    ``STORAGE_EMULATOR_HOST`` names an emulator.

    Args:
        page_size: Keys per page of a listing, at most 1,000.
        retry_seconds: Limit of the time of a request with its repetitions.

    Raises:
        UsageError: the name of the bucket or the prefix is not valid, or the extra ``gcs`` is not installed.
        SettingsError: there are no credentials.
    """

    def __init__(
        self, bucket: str, prefix: str = "", *, page_size: int = 1000, retry_seconds: float = 60.0, namespace: str = ""
    ) -> None:
        if not _BUCKET.fullmatch(bucket):
            raise UsageError(f"no bucket can have the name {bucket!r}; use gs://bucket/prefix")
        self.bucket = bucket
        super().__init__(f"gs://{bucket}", prefix, page_size, namespace)
        self._is_always_resumable = False
        self._client = _make_client(self.url)
        self._bucket: Bucket = self._client.bucket(bucket)
        self._options = {"timeout": _TIMEOUT_SECONDS, "retry": _make_retry(retry_seconds)}

    def with_multipart_uploads(self) -> "GcsStore":
        other = copy.copy(self)
        other._is_always_resumable = True
        return other

    def check_bucket(self) -> None:
        if not self._has_bucket():
            raise NotFoundError(
                f"there is no store at {self.url}: {self._endpoint} has no bucket {self.bucket}; check the name, or "
                "create it"
            )

    def is_checksum_verified(self, key: str) -> bool:
        from google.api_core.exceptions import BadRequest

        blob = self._blob(key)
        blob.md5_hash = "AAAAAAAAAAAAAAAAAAAAAA=="
        with self._translate_errors("create", key):
            try:
                blob.upload_from_file(io.BytesIO(b"bytes"), size=5, checksum=None, **self._options)
            except BadRequest:
                return True
        return False

    def read(self, key: str) -> bytes:
        blob, body = self._blob(key), _RecordBody()
        with self._translate_errors("read", key):
            try:
                blob.download_to_file(body, raw_download=True, **self._options)
            except _RecordTooLargeError:
                blob.reload(**self._options)
                check_read_size(self, key, blob.size)
                raise
        return body.getvalue()

    def chunks(self, key: str, size_bytes: int = 8 << 20) -> Iterator[bytes]:
        found = self._blob(key)
        with self._translate_errors("read", key):
            found.reload(**self._options)
        # Its generation is fixed, so that all chunks are of the same object.
        blob = self._bucket.blob(found.name, generation=found.generation)
        for offset in range(0, found.size, size_bytes):
            end = min(offset + size_bytes, found.size)
            with self._translate_errors("read", key):
                # The caller verifies its own hash.
                chunk = blob.download_as_bytes(
                    start=offset, end=end - 1, raw_download=True, checksum=None, **self._options
                )
            if len(chunk) != end - offset:
                raise StoreError(f"{self.url}: {key} was cut off at byte {offset + len(chunk):,}; read it again")
            yield chunk

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for page in self._pages(prefix, fields="items(name,size,etag),nextPageToken"):
            for blob in page:
                # Skip the empty objects with names of folders that consoles create.
                if (key := self.from_artifact_key(blob.name)) is not None:
                    yield ObjectInfo(key, blob.size, blob.etag or "")

    def prefixes(self, prefix: str) -> Iterator[str]:
        for page in self._pages(prefix, fields="prefixes,nextPageToken", delimiter="/"):
            for folder in page.prefixes:
                if (key := self.from_artifact_key(folder[:-1])) is not None:
                    yield f"{key}/"

    def delete(self, key: str) -> None:
        with contextlib.suppress(ObjectMissingError), self._translate_errors("delete", key):
            self._bucket.delete_blob(self.artifact_key(key), **self._options)

    def _create(self, key: str, source: UploadSource) -> None:
        blob = self._blob(key)
        blob.chunk_size = _CHUNK_BYTES
        # The library sends an upload of unknown size, and one of more than 8 MiB, as a resumable one.
        size = None if self._is_always_resumable else source.size
        with self._translate_errors("create", key):
            blob.upload_from_file(_UploadBody(source), size=size, if_generation_match=0, **self._options)
        failpoint("store.after_publish")

    def _blob(self, key: str) -> "Blob":
        return self._bucket.blob(self.artifact_key(key))

    def _pages(self, prefix: str, **options: str) -> Iterator[Any]:
        with self._translate_errors("list", prefix):
            yield from self._client.list_blobs(
                self._bucket, prefix=self._prefix + prefix, page_size=self._page_size, **options, **self._options
            ).pages

    def _has_bucket(self) -> bool:
        from google.api_core.exceptions import NotFound

        try:
            with self._translate_errors("list"):
                next(self._client.list_blobs(self._bucket, max_results=1, **self._options).pages, None)
        except SettingsError as error:
            if not isinstance(error.__cause__, NotFound):
                raise
            return False
        return True

    @property
    def _endpoint(self) -> str:
        return str(self._client._connection.API_BASE_URL)

    @contextlib.contextmanager
    def _translate_errors(self, action: str, key: str = "") -> Iterator[None]:
        try:
            yield
        except _library_errors() as error:
            raise self._translate(error, f"{action} {key}".strip(), key) from error

    def _translate(self, error: Exception, action: str, key: str) -> TiphysError:
        from google.api_core.exceptions import GoogleAPICallError, RetryError
        from google.auth.exceptions import GoogleAuthError, TransportError
        from google.cloud.storage.exceptions import DataCorruption, InvalidResponse

        if isinstance(error, RetryError) and isinstance(error.cause, Exception):
            error = error.cause
        if isinstance(error, DataCorruption):
            return IntegrityError(f"{self.url}: {key} is not what was stored: its checksum differs; read it again")
        if isinstance(error, GoogleAPICallError):
            return self._translate_reply(error, int(error.code or 0), action, key)
        if isinstance(error, InvalidResponse):
            return self._translate_reply(error, error.response.status_code, action, key)
        if isinstance(error, GoogleAuthError) and not isinstance(error, TransportError):
            return SettingsError(f"{self.url}: cannot {action}: {_describe(error)}; {_CREDENTIALS}")
        return StoreError(
            f"{self.url}: cannot {action}: {self._endpoint} did not answer, or closed the connection "
            f"({_describe(error)}); check the network and STORAGE_EMULATOR_HOST, then try again"
        )

    def _translate_reply(self, error: Exception, status: int, action: str, key: str) -> TiphysError:
        reason = _describe(error)
        if status == 412:
            return ObjectExistsError(f"{self.url} already has an object {key}; objects are never overwritten")
        if status == 404:
            # An emulator names no reason.
            if key and ("No such object" in reason or ("bucket does not exist" not in reason and self._has_bucket())):
                return ObjectMissingError(f"{self.url} has no object {key}")
            return SettingsError(
                f"{self.url}: cannot {action}: {self._endpoint} has no such bucket; check the name, or create it"
            )
        if any(row.get("reason") in _RETENTION for row in getattr(error, "errors", ()) if isinstance(row, dict)):
            return SettingsError(
                f"{self.url}: cannot {action}: a retention policy or a hold of the bucket keeps it; Tiphys deletes old "
                "checkpoints and finished records, so use a bucket without one"
            )
        if status in (401, 403):
            kind = ForbiddenError if status == 403 else SettingsError
            return kind(f"{self.url}: the credentials in use may not {action} ({reason}); {_PERMISSIONS}")
        return StoreError(f"{self.url}: cannot {action}: {self._endpoint} answered {status}: {reason}; try again later")


class _UploadBody(io.RawIOBase):
    """The bytes of an upload as a stream."""

    def __init__(self, source: UploadSource) -> None:
        self._source = source
        self._offset = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._offset

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._offset = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._offset, io.SEEK_END: self._source.size}[whence]
        return self._offset

    def read(self, size: int = -1) -> bytes:
        left = self._source.size - self._offset
        taken = left if size < 0 else min(size, left)
        if taken == left:  # the request with the last bytes makes the object
            failpoint("store.before_publish")
        data = self._source.read(self._offset, taken)
        self._offset += taken
        return bytes(data)


class _RecordTooLargeError(Exception):
    pass


class _RecordBody(io.BytesIO):
    """Takes no more bytes than a record may have."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > MAX_RECORD_BYTES:
            raise _RecordTooLargeError
        return super().write(data)


def _make_client(url: str) -> "Client":
    try:
        from google.api_core.client_info import ClientInfo
        from google.auth.exceptions import GoogleAuthError
        from google.cloud.storage import Client
        from requests.adapters import HTTPAdapter
    except ImportError as error:
        raise UsageError(_EXTRA_MISSING) from error
    try:
        client = Client(project=None, client_info=ClientInfo(user_agent="tiphys"))  # type: ignore[no-untyped-call]
    except (GoogleAuthError, ValueError) as error:
        raise SettingsError(f"{url}: cannot open it: {_describe(error)}; {_CREDENTIALS}") from error
    # For traces, the library would ask for the metadata of the bucket, in a thread and with a right of its own.
    client._bucket_metadata_cache = None
    # Several shards and listings at a time; the default keeps ten connections.
    for scheme in ("https://", "http://"):
        client._http.mount(scheme, HTTPAdapter(pool_maxsize=_POOL_CONNECTIONS))
    return client


def _make_retry(seconds: float) -> Any:
    """A policy that repeats what the library repeats; also a write after a lost reply, see `tiphys.store.claims`."""
    from google.cloud.storage.retry import DEFAULT_RETRY

    return DEFAULT_RETRY.with_delay(initial=0.2, maximum=10.0, multiplier=2.0).with_timeout(seconds)


@functools.cache
def _library_errors() -> tuple[type[Exception], ...]:
    from google.api_core.exceptions import GoogleAPIError
    from google.auth.exceptions import GoogleAuthError
    from google.cloud.storage.exceptions import DataCorruption, InvalidResponse
    from requests import RequestException
    from urllib3.exceptions import HTTPError

    return (
        GoogleAPIError,
        GoogleAuthError,
        DataCorruption,
        InvalidResponse,
        RequestException,
        HTTPError,
        ConnectionError,
    )


def _describe(error: Exception) -> str:
    """The reason in an error of the library, without the URI of an upload, which is a credential."""
    response = getattr(error, "response", None)
    text = response.text if response is not None and response.text else str(error)
    with contextlib.suppress(ValueError, TypeError, KeyError):
        text = json.loads(text)["error"]["message"]
    return _SECRETS.sub(r"\1…", " ".join(str(text).split()))[:_MAX_REASON]
