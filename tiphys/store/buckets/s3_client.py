"""The boto3 client of `S3Store`: timeouts, retries, checksums, and translation of errors.

A small request costs about a millisecond of CPU time, most of it in boto3, and
a plugin that serves a cluster sends thousands. The client therefore skips work
that the store does not need. `translate_boto_errors` turns each error of boto3
into a `TiphysError` with the cause and the remedy.
"""

import contextlib
import functools
import gc
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    InvalidConfigError,
    InvalidRegionError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
    ProfileNotFound,
    SSOError,
)
from botocore.exceptions import ConnectionError as NoConnectionError

from tiphys.errors import (
    ForbiddenError,
    IntegrityError,
    ObjectExistsError,
    ObjectMissingError,
    SettingsError,
    StoreError,
    StoreFullError,
    TiphysError,
    UsageError,
)

if TYPE_CHECKING:
    from botocore.loaders import Loader
    from types_boto3_s3 import S3Client


_thread_state = threading.local()


@contextlib.contextmanager
def skip_stored_checksum() -> Iterator[None]:
    """Skip the check of stored checksums for reads in this block; the caller verifies its own hash."""
    _thread_state.hashes = True
    try:
        yield
    finally:
        _thread_state.hashes = False


@functools.cache
def _descriptions(folders: str | None) -> "Loader":
    """The description of the S3 API, read once per process: it is most of the time and memory of a client."""
    from botocore.loaders import create_loader

    return create_loader(folders)


def make_client(variables: Mapping[str, str] | None = None, *, whole_listings: bool = False) -> "S3Client":
    """Create an S3 client with its own session; creating clients from a shared session is not thread-safe.

    Args:
        variables: ``AWS_…`` variables with the credentials, region and endpoint, instead of those of this process.
        whole_listings: Whether rows of listings have all fields; otherwise only keys and sizes.
    """
    # Imported here, because they load slowly and `DirectoryStore` does not need them.
    import boto3
    import botocore.session
    from botocore.config import Config

    core = botocore.session.get_session()
    core.register_component("data_loader", _descriptions(core.get_config_variable("data_path")))
    # The store does not use modification times, and parsing them takes more than half of the time per listed object.
    # Text is sufficient for the expiry times of credentials; the AWS CLI configures its parser in the same way.
    core.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=lambda text: text)
    config = Config(
        # Short, so that a retry soon tries another address of the server.
        connect_timeout=5,
        # Limits one wait for bytes, not a whole part or object.
        read_timeout=30,
        # Standard mode also repeats a write after a lost reply, see `tiphys.store.claims`.
        retries={"mode": "standard", "total_max_attempts": 5},
        # Several shards at a time, each with several parts.
        max_pool_connections=32,
        # Keeps idle connections open across NAT gateways between two saves.
        tcp_keepalive=True,
        # Uploads carry a SHA-256 in a header; the default would add a trailer that many servers refuse.
        request_checksum_calculation="when_required",
        # Downloads are compared with the checksum that was stored.
        response_checksum_validation="when_supported",
        # The signed header with the SHA-256 already protects the bytes of an upload.
        s3={"payload_signing_enabled": False},
        # botocore builds its default user agent for each request, at a tenth of the request's CPU time.
        user_agent=f"tiphys Boto3/{boto3.__version__} Botocore/{botocore.__version__}",
    )
    given = variables or {}
    session = boto3.session.Session(
        botocore_session=core,
        aws_access_key_id=given.get("AWS_ACCESS_KEY_ID"),
        aws_secret_access_key=given.get("AWS_SECRET_ACCESS_KEY"),
        aws_session_token=given.get("AWS_SESSION_TOKEN"),
        region_name=given.get("AWS_DEFAULT_REGION") or given.get("AWS_REGION"),
    )
    endpoint = given.get("AWS_ENDPOINT_URL_S3") or given.get("AWS_ENDPOINT_URL")
    client: S3Client = session.client("s3", config=config, endpoint_url=endpoint)
    client.meta.events.register("before-call.s3.GetObject", _disable_checksum_mode)
    # A handler with this name runs before botocore's S3 handler, which parses each reply to detect errors.
    if not whole_listings:
        client.meta.events.register("before-parse.*.ListObjectsV2", _parse_listing_rows)
    return client


def _parse_listing_rows(response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_: object) -> None:
    """Parse only keys, sizes and ETags of the listed objects, a third of the fields that botocore would parse."""
    try:
        with _gc_paused():
            rows, remainder = _split_listing(response_dict["body"])
    except ElementTree.ParseError:
        return  # botocore reports the error and retries
    if rows:
        response_dict["body"] = remainder
        customized_response_dict["Contents"] = rows


def _split_listing(body: bytes) -> tuple[list[dict[str, Any]], bytes]:
    """The rows of a listing, and the listing without them."""
    root = ElementTree.fromstring(body)  # noqa: S314  botocore parses the same bytes in the same way
    tag = f"{root.tag.removesuffix('ListBucketResult')}%s"
    elements = root.findall(tag % "Contents")
    rows = [
        {
            "Key": row.findtext(tag % "Key"),
            "Size": int(row.findtext(tag % "Size") or 0),
            "ETag": row.findtext(tag % "ETag") or "",
        }
        for row in elements
    ]
    for element in elements:
        root.remove(element)
    return rows, ElementTree.tostring(root)


@contextlib.contextmanager
def _gc_paused() -> Iterator[None]:
    """Disable garbage collection in this block, whose objects have no reference cycles and are freed at its end.

    Otherwise parts of a large reply are promoted while it is parsed, which leads to full collections.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _disable_checksum_mode(params: dict[str, Any], **_: object) -> None:
    # The setting applies to a whole client, and a second client takes a third of a second to create.
    if getattr(_thread_state, "hashes", False):
        params["headers"].pop("x-amz-checksum-mode", None)
        params["context"].get("checksum", {}).pop("response_algorithms", None)


@contextlib.contextmanager
def translate_boto_errors(store: str, action: str, endpoint: str, key: str = "") -> Iterator[None]:
    """Raise each error of boto3 as a `TiphysError`.

    ``action`` is what failed, such as ``read runs/a/run.json``.

    Raises:
        TiphysError: the block raised an error of boto3.
    """
    try:
        yield
    except ClientError as error:
        raise _error_from_response(error, store, action, endpoint, key) from error
    except FlexibleChecksumError as error:
        raise IntegrityError(f"{store}: {key} is not what was stored: {error}; read it again, or restore it") from error
    except (HTTPClientError, NoConnectionError, IncompleteReadError) as error:
        raise StoreError(
            f"{store}: cannot {action}: {endpoint} did not answer, or closed the connection ({error}); "
            "check the network and AWS_ENDPOINT_URL_S3, then try again"
        ) from error
    except BotoCoreError as error:
        kind = SettingsError if isinstance(error, _WRONG_SETTINGS) else StoreError
        raise kind(
            f"{store}: cannot {action}: {error}; check the credentials and settings of AWS: "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, and AWS_REGION"
        ) from error
    except ValueError as error:
        raise UsageError(f"{store}: cannot {action}: {error}; check AWS_ENDPOINT_URL_S3") from error


_WRONG_SETTINGS = (
    InvalidConfigError,
    InvalidRegionError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
    ProfileNotFound,
    SSOError,
)


def error_code(error: ClientError) -> str:
    """S3's error code, or the HTTP status if the reply has no body."""
    return str(error.response.get("Error", {}).get("Code", ""))


_FULL_CODES = ("QuotaExceeded", "XMinioAdminBucketQuotaExceeded", "XMinioStorageFull", "InsufficientStorage")
"""Ceph answers 403 QuotaExceeded, MinIO the other two (``cmd/api-errors.go``)."""


def _error_from_response(error: ClientError, store: str, action: str, endpoint: str, key: str) -> TiphysError:
    code = error_code(error)
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if code in ("PreconditionFailed", "412"):
        return ObjectExistsError(f"{store} already has an object {key}; objects are never overwritten")
    if code == "NoSuchBucket":
        return SettingsError(f"{store}: cannot {action}: {endpoint} has no such bucket; check the name, or create it")
    if code == "InvalidBucketName":
        return UsageError(
            f"{store}: {endpoint} takes no such name for a bucket; a bucket has 3 to 63 lower-case letters, digits, "
            "dots and hyphens"
        )
    if key and code in ("NoSuchKey", "404"):
        return ObjectMissingError(f"{store} has no object {key}")
    if (status == 403 and code not in _FULL_CODES) or code in ("ExpiredToken", "InvalidToken"):
        # Other codes mean that the credentials themselves are wrong or too old.
        kind = ForbiddenError if code == "AccessDenied" else SettingsError
        return kind(
            f"{store}: the credentials in use may not {action} ({code}); "
            "they need s3:GetObject, s3:PutObject, s3:DeleteObject, s3:AbortMultipartUpload and s3:ListBucket"
        )
    reason = error.response.get("Error", {}).get("Message", "no reason given")
    if status == 507 or code in _FULL_CODES:
        return StoreFullError(f"{store}: cannot {action}: it is full ({status} {code}: {reason}); free some space")
    return StoreError(f"{store}: cannot {action}: {endpoint} answered {status} {code}: {reason}; try again later")
