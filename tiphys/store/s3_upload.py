"""Conditional uploads to S3: one PUT, or parts that become an object at their completion.

Each request carries the SHA-256 of its bytes, which S3 checks before it stores
them, and ``If-None-Match: *``, which makes the key's first writer its only one.
Source: AWS, "How to prevent object overwrites with conditional writes".
"""

import base64
import contextlib
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from botocore.exceptions import BotoCoreError, ClientError

from tiphys.errors import ObjectExistsError
from tiphys.faults import failpoint
from tiphys.store.s3_errors import code_of
from tiphys.store.source import Source
from tiphys.threads import in_parallel

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client
    from types_boto3_s3.type_defs import CompletedPartTypeDef

_MOST_PARTS = 10_000


@dataclass(frozen=True)
class Upload:
    """How bytes travel. Each running part holds ``part_bytes`` in memory."""

    multipart_bytes: int = 64 << 20
    """Objects of this size and above are sent in parts."""
    part_bytes: int = 16 << 20
    """Size of a part; S3 takes no less than 5 MiB. Larger where 10,000 of them would not do."""
    parallel_parts: int = 4

    def create(self, client: "S3Client", bucket: str, key: str, source: Source) -> None:
        """Create the object; lets botocore's errors through."""
        if source.size < self.multipart_bytes:
            _put(client, bucket, key, source.read(0, source.size), source.sha256)
        else:
            self._create_multipart(client, bucket, key, source)

    def _create_multipart(self, client: "S3Client", bucket: str, key: str, source: Source) -> None:
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
                # Parts cost money until they are aborted. The first error is the one to report.
                with contextlib.suppress(ClientError, BotoCoreError):
                    client.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload_id)

    def _send_parts(
        self, client: "S3Client", bucket: str, key: str, upload_id: str, source: Source
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

        return in_parallel(send, offsets, self.parallel_parts)


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
        # A completion whose reply was lost is repeated, and then finds its upload gone.
        if code_of(error) != "NoSuchUpload" or not _exists(client, bucket, key):
            raise
        raise ObjectExistsError(
            f"s3://{bucket} already has an object {key}: an earlier request or another writer made it"
        ) from error


def _exists(client: "S3Client", bucket: str, key: str) -> bool:
    try:
        client.head_object(Bucket=bucket, Key=key)
    except ClientError as error:
        if code_of(error) != "404":
            raise
        return False
    return True


def _body(data: bytes | bytearray) -> bytes:
    """``data`` itself: botocore sends a bytearray without a copy, which its types do not say."""
    return cast("bytes", data)


def _sha256(data: bytes | bytearray) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()
