"""Questions that `tiphys.store.probe` asks of S3 alone."""

import base64
import hashlib
from collections.abc import Callable
from datetime import datetime
from email.utils import parsedate_to_datetime

from botocore.exceptions import ClientError

from tiphys.store.s3 import S3Store
from tiphys.store.s3_upload import Upload


def in_parts(store: S3Store) -> S3Store:
    """The same store, sending everything in parts.

    Servers that make a PUT conditional may still ignore the condition of a
    completion, and large shards of a checkpoint rest on it.
    """
    return store.varied(upload=Upload(multipart_bytes=1))


def checksum_is_verified(store: S3Store, key: str) -> bool:
    """Whether the server refuses bytes that do not match the SHA-256 sent with them."""
    wrong = base64.b64encode(hashlib.sha256(b"other").digest()).decode()
    with store.explained("create", key):
        try:
            store.client.put_object(
                Bucket=store.bucket, Key=store.artifact_key(key), Body=b"bytes", ChecksumSHA256=wrong
            )
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] != 400:
                raise
            return True
    return False


def clock_skew_seconds(store: S3Store, now: Callable[[], datetime]) -> float:
    """How far this machine's clock is off the server's, either way. HTTP tells whole seconds."""
    with store.explained("list"):
        reply = store.client.list_objects_v2(Bucket=store.bucket, Prefix=store.artifact_key("clock"), MaxKeys=1)
    date = parsedate_to_datetime(reply["ResponseMetadata"]["HTTPHeaders"]["date"])
    return abs((date - now()).total_seconds())
