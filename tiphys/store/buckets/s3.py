"""Store in a bucket of S3, or of a server with an S3 API.

The store uses boto3, except for uploads: boto3's transfer manager cannot make an
upload conditional on a free key. `S3Uploader` sends one PUT, or the parts of a
multipart upload and its completion. Each request carries the SHA-256 of its
bytes, which S3 verifies before it stores them, and the creating request carries
``If-None-Match: *``, so that only the first writer of a key succeeds.
Source: AWS, "How to prevent object overwrites with conditional writes".
"""

import base64
import contextlib
import copy
import hashlib
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, IncompleteReadError

from tiphys.errors import NotFoundError, ObjectExistsError, ObjectMissingError, StoreError, UsageError
from tiphys.faults import failpoint
from tiphys.store.base import ObjectInfo, UploadSource, check_read_size
from tiphys.store.buckets.bucket_store import BucketStore
from tiphys.store.buckets.s3_client import error_code, make_client, skip_stored_checksum, translate_boto_errors
from tiphys.threads import map_parallel

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client
    from types_boto3_s3.type_defs import CompletedPartTypeDef, ListObjectsV2OutputTypeDef


_MOST_PARTS = 10_000


@dataclass(frozen=True)
class S3Uploader:
    """Conditional uploads. Each part under way holds ``part_bytes`` in memory."""

    multipart_bytes: int = 64 << 20
    """Objects of at least this size are sent in parts."""
    part_bytes: int = 16 << 20
    """Size of a part, at least 5 MiB (the minimum of S3). Larger parts are used if 10,000 parts are not enough."""
    parallel_parts: int = 4

    def create(self, client: "S3Client", bucket: str, key: str, source: UploadSource) -> None:
        """Create the object. Errors of botocore are not translated."""
        if source.size < self.multipart_bytes:
            _put(client, bucket, key, source.read(0, source.size), source.sha256)
        else:
            self._create_multipart(client, bucket, key, source)

    def _create_multipart(self, client: "S3Client", bucket: str, key: str, source: UploadSource) -> None:
        started = client.create_multipart_upload(Bucket=bucket, Key=key, ChecksumAlgorithm="SHA256")
        upload_id = started["UploadId"]
        completed = False
        try:
            parts = self._send_parts(client, bucket, key, upload_id, source)
            failpoint("store.before_publish")
            _complete(client, bucket, key, upload_id, parts)
            completed = True
            failpoint("store.after_publish")
        finally:
            if not completed:
                # Parts cost money until the upload is aborted. An error of the abort would hide the first error.
                with contextlib.suppress(ClientError, BotoCoreError):
                    client.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload_id)

    def _send_parts(
        self, client: "S3Client", bucket: str, key: str, upload_id: str, source: UploadSource
    ) -> "list[CompletedPartTypeDef]":
        size = max(self.part_bytes, -(-source.size // _MOST_PARTS))
        offsets = range(0, source.size, size)

        def send(index: int, offset: int) -> "CompletedPartTypeDef":
            number = index + 1
            data = source.read(offset, min(size, source.size - offset))
            sha256 = _sha256(data)
            sent = client.upload_part(
                Bucket=bucket, Key=key, UploadId=upload_id, PartNumber=number, Body=_body(data), ChecksumSHA256=sha256
            )
            return {"PartNumber": number, "ETag": sent["ETag"], "ChecksumSHA256": sha256}

        return map_parallel(send, offsets, self.parallel_parts)


def _put(client: "S3Client", bucket: str, key: str, data: bytes | bytearray, sha256: str | None) -> None:
    failpoint("store.before_publish")
    checksum = base64.b64encode(bytes.fromhex(sha256)).decode() if sha256 else _sha256(data)
    client.put_object(Bucket=bucket, Key=key, Body=_body(data), IfNoneMatch="*", ChecksumSHA256=checksum)
    failpoint("store.after_publish")


def _complete(client: "S3Client", bucket: str, key: str, upload_id: str, parts: "list[CompletedPartTypeDef]") -> None:
    try:
        client.complete_multipart_upload(
            Bucket=bucket, Key=key, UploadId=upload_id, MultipartUpload={"Parts": parts}, IfNoneMatch="*"
        )
    except ClientError as error:
        # botocore repeats a completion after a lost reply; the upload no longer exists then.
        if error_code(error) != "NoSuchUpload" or not _exists(client, bucket, key):
            raise
        raise ObjectExistsError(
            f"s3://{bucket} already has an object {key}: an earlier request or another writer made it"
        ) from error


def _exists(client: "S3Client", bucket: str, key: str) -> bool:
    try:
        client.head_object(Bucket=bucket, Key=key)
    except ClientError as error:
        if error_code(error) != "404":
            raise
        return False
    return True


def _body(data: bytes | bytearray) -> bytes:
    """``data`` itself. botocore also sends a bytearray without a copy, which its type hints do not allow."""
    return cast("bytes", data)


def _sha256(data: bytes | bytearray) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


# The rule of botocore. Servers have stricter rules and report them.
_BUCKET = re.compile(r"[A-Za-z0-9._-]{1,255}")
# S3 returns these codes instead of 412 if a conditional write races with another request for the key.
_CONFLICTS = ("ConditionalRequestConflict", "OperationAborted")
_REFUSED = ("AccessDenied", "403")
_MAX_TRIES = 5
_FIRST_PAUSE_SECONDS = 0.1


_RequestContext = Callable[[], contextlib.AbstractContextManager[None]]


class S3Store(BucketStore):
    """A store below a prefix in a bucket. Credentials, region and endpoint come from the settings of the AWS SDKs.

    Args:
        bucket: Name of the bucket. Directory buckets (S3 Express) are refused,
            because their listings have no order.
        uploader: Sizes and parallelism of uploads.
        page_size: Keys per page of a listing, at most 1,000.
        variables: ``AWS_…`` variables to use instead of the settings of this process.

    Raises:
        UsageError: the name of the bucket, the prefix or the endpoint is not valid.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        uploader: S3Uploader | None = None,
        page_size: int = 1000,
        sleep: Callable[[float], None] = time.sleep,
        namespace: str = "",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.bucket = _check_bucket_name(bucket)
        super().__init__(f"s3://{bucket}", prefix, page_size, namespace)
        self._uploader = uploader or S3Uploader()
        self._sleep = sleep
        with translate_boto_errors(self.url, "open it", "AWS"):
            self.client = make_client(variables)

    def with_multipart_uploads(self) -> "S3Store":
        other = copy.copy(self)
        other._uploader = S3Uploader(multipart_bytes=1)
        return other

    def is_checksum_verified(self, key: str) -> bool:
        wrong = _sha256(b"other")
        with self.translate_errors("create", key):
            try:
                self.client.put_object(
                    Bucket=self.bucket, Key=self.artifact_key(key), Body=b"bytes", ChecksumSHA256=wrong
                )
            except ClientError as error:
                if error.response["ResponseMetadata"]["HTTPStatusCode"] != 400:
                    raise
                return True
        return False

    def translate_errors(self, action: str, key: str = "") -> contextlib.AbstractContextManager[None]:
        """Raise errors of botocore as `TiphysError`; the message names the failed ``action`` and ``key``."""
        return translate_boto_errors(self.url, f"{action} {key}".strip(), self.client.meta.endpoint_url, key)

    def check_bucket(self) -> None:
        with self.translate_errors("list"):
            try:
                self.client.list_objects_v2(Bucket=self.bucket, Prefix=self._prefix, MaxKeys=1)
            except self.client.exceptions.NoSuchBucket:
                raise NotFoundError(
                    f"there is no store at {self.url}: {self.client.meta.endpoint_url} has no bucket {self.bucket}; "
                    "check the name and AWS_ENDPOINT_URL_S3, or create it"
                ) from None

    def read(self, key: str) -> bytes:
        return b"".join(self._read_chunks(key, 8 << 20, contextlib.nullcontext, as_a_whole=True))

    def chunks(self, key: str, size_bytes: int = 8 << 20) -> Iterator[bytes]:
        return self._read_chunks(key, size_bytes, skip_stored_checksum)

    def _read_chunks(
        self, key: str, size_bytes: int, request_context: _RequestContext, *, as_a_whole: bool = False
    ) -> Iterator[bytes]:
        """The object in pieces. After a lost connection the read continues at the same offset."""
        offset, failures = 0, 0
        with self.translate_errors("read", key):
            while True:
                try:
                    for chunk in self._chunks_from(key, offset, size_bytes, request_context, as_a_whole):
                        offset, failures = offset + len(chunk), 0
                        yield chunk
                except (HTTPClientError, IncompleteReadError):
                    failures += 1
                    if failures == _MAX_TRIES:
                        raise
                else:
                    return
                self._pause(failures)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for page in self._pages(prefix, delimiter=""):
            for row in page.get("Contents", ()):
                # Skip the empty objects with names of folders that S3 consoles create.
                if (key := self.from_artifact_key(row["Key"])) is not None:
                    yield ObjectInfo(key, row["Size"], row.get("ETag", "").strip('"'))

    def prefixes(self, prefix: str) -> Iterator[str]:
        for page in self._pages(prefix, delimiter="/"):
            for row in page.get("CommonPrefixes", ()):
                if (folder := self.from_artifact_key(row["Prefix"][:-1])) is not None:
                    yield f"{folder}/"

    def delete(self, key: str) -> None:
        with self.translate_errors("delete", key):
            self.client.delete_object(Bucket=self.bucket, Key=self.artifact_key(key))

    def _create(self, key: str, source: UploadSource) -> None:
        artifact_key, failures = self.artifact_key(key), 0
        with self.translate_errors("create", key):
            while True:
                try:
                    return self._uploader.create(self.client, self.bucket, artifact_key, source)
                except ClientError as error:
                    failures += 1
                    if error_code(error) not in _CONFLICTS or failures == _MAX_TRIES:
                        raise
                self._pause(failures)

    def _chunks_from(
        self, key: str, offset: int, size_bytes: int, request_context: _RequestContext, as_a_whole: bool
    ) -> Iterator[bytes]:
        artifact_key = self.artifact_key(key)
        with self.translate_errors("read", key), request_context():
            try:
                if offset:
                    reply = self.client.get_object(Bucket=self.bucket, Key=artifact_key, Range=f"bytes={offset}-")
                else:
                    reply = self.client.get_object(Bucket=self.bucket, Key=artifact_key)
            except ClientError as error:
                if error_code(error) in _REFUSED and not self._is_listed(artifact_key):
                    raise ObjectMissingError(f"{self.url} has no object {key}") from error
                raise
        if offset and not reply.get("ContentRange", "").startswith(f"bytes {offset}-"):
            raise StoreError(f"{self.url}: the server cannot resume a read of {key} at byte {offset:,}; read it again")
        with contextlib.closing(reply["Body"]) as body:
            if as_a_whole:
                check_read_size(self, key, offset + reply["ContentLength"])
            yield from body.iter_chunks(size_bytes)

    def _is_listed(self, artifact_key: str) -> bool:
        """Whether a listing shows the object.

        S3 answers 403 for a missing object if the right to list depends on the prefix, as in a policy for one tenant.
        Source: S3 API reference, "GetObject", permissions.
        """
        page = self.client.list_objects_v2(Bucket=self.bucket, Prefix=artifact_key, MaxKeys=1)
        return any(row["Key"] == artifact_key for row in page.get("Contents", ()))

    def _pages(self, prefix: str, delimiter: str) -> "Iterator[ListObjectsV2OutputTypeDef]":
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket,
            Prefix=self._prefix + prefix,
            Delimiter=delimiter,
            PaginationConfig={"PageSize": self._page_size},
        )
        with self.translate_errors("list", prefix):
            yield from pages

    def _pause(self, failures: int) -> None:
        # Jitter, so that writers that conflicted do not conflict again.
        self._sleep(_FIRST_PAUSE_SECONDS * 2 ** (failures - 1) * random.uniform(0.5, 1.5))  # noqa: S311  no secret


def _check_bucket_name(bucket: str) -> str:
    if not _BUCKET.fullmatch(bucket):
        raise UsageError(f"no bucket can have the name {bucket!r}; use s3://bucket/prefix")
    if bucket.endswith("--x-s3"):
        raise UsageError(
            f"{bucket} is a directory bucket (S3 Express), whose listings are not ordered as Tiphys requires; "
            "use a general purpose bucket"
        )
    return bucket
