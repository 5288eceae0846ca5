"""How boto3 speaks to a bucket: its patience, its checksums, and what it need not spend on each request.

A small request costs this process about a millisecond, most of it boto3's own
work, and a plugin that serves a cluster sends thousands.

What went wrong between boto3 and the bucket, in words a person can act on.
"""

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from botocore.exceptions import BotoCoreError, ClientError, FlexibleChecksumError, HTTPClientError, IncompleteReadError
from botocore.exceptions import ConnectionError as NoConnectionError

from tiphys.errors import IntegrityError, ObjectExistsError, ObjectMissingError, StoreError, TiphysError, UsageError

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client


_caller = threading.local()


@contextlib.contextmanager
def caller_hashes() -> Iterator[None]:
    """Do not compare what is asked for in this block with its stored checksum: the caller has a hash of its own."""
    _caller.hashes = True
    try:
        yield
    finally:
        _caller.hashes = False


def make_client() -> "S3Client":
    """A client of its own session, since making clients from the shared one is not thread-safe."""
    # Imported here, because loading them takes longer than all that a folder needs.
    import boto3
    import botocore.session
    from botocore.config import Config

    core = botocore.session.get_session()
    # Nobody here asks when an object was changed, and parsing that is more than half of what a row of a listing costs.
    # As text, a time still serves whoever looks for credentials: the AWS CLI reads them so, too.
    core.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=lambda text: text)
    config = Config(
        # A dead address shows at once; the third retry may find another one.
        connect_timeout=5,
        # Of one wait for bytes, not of a whole part or object.
        read_timeout=30,
        # Standard mode also retries a write whose reply was lost: see `tiphys.store.claims`.
        retries={"mode": "standard", "total_max_attempts": 5},
        # Several shards at a time, each with several parts.
        max_pool_connections=32,
        # Idle connections survive NAT gateways between two saves.
        tcp_keepalive=True,
        # Uploads carry a SHA-256 of ours in a header; the default would add a trailer that many servers refuse.
        request_checksum_calculation="when_required",
        # Downloads are compared with the checksum that was stored.
        response_checksum_validation="when_supported",
        # The signed header with the SHA-256 already protects the bytes of an upload.
        s3={"payload_signing_enabled": False},
        # The default is put together anew for each request, a tenth of what that costs.
        user_agent=f"tiphys Boto3/{boto3.__version__} Botocore/{botocore.__version__}",
    )
    client: S3Client = boto3.session.Session(botocore_session=core).client("s3", config=config)
    client.meta.events.register("before-call.s3.GetObject", _leave_hashing_to_caller)
    # By this name it comes before botocore's own hook for S3, which parses each reply to see whether it is an error.
    client.meta.events.register("before-parse.*.ListObjectsV2", _take_rows)
    return client


def _take_rows(response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_: object) -> None:
    """Read the rows of a listing: keys and sizes are a quarter of what botocore would make of each of a thousand."""
    try:
        with _uncollected():
            found, rest = _rows_of(response_dict["body"])
    except ElementTree.ParseError:
        return  # botocore says it better, and asks again
    if found:
        response_dict["body"] = rest
        customized_response_dict["Contents"] = found


def _rows_of(body: bytes) -> tuple[list[dict[str, Any]], bytes]:
    """The rows of a listing, and the listing without them."""
    # What botocore does, too, a moment later.
    root = ElementTree.fromstring(body)  # noqa: S314
    tag = f"{root.tag.removesuffix('ListBucketResult')}%s"
    rows = root.findall(tag % "Contents")
    found = [{"Key": row.findtext(tag % "Key"), "Size": int(row.findtext(tag % "Size") or 0)} for row in rows]
    for row in rows:
        root.remove(row)
    return found, ElementTree.tostring(root)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Do not look for garbage in this block: what it makes is freed at its end, and nothing in it hangs in a circle.

    Parts of a reply that are promoted while they are read bring on collections of everything that lives.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _leave_hashing_to_caller(params: dict[str, Any], **_: object) -> None:
    # The setting is one of the whole client, and a second client takes a third of a second to make.
    if getattr(_caller, "hashes", False):
        params["headers"].pop("x-amz-checksum-mode", None)
        params["context"].get("checksum", {}).pop("response_algorithms", None)


@contextlib.contextmanager
def explained(store: str, action: str, endpoint: str, key: str = "") -> Iterator[None]:
    """Raise every error of boto3 as one of ours.

    Args:
        store: URL of the store.
        action: What was tried, such as ``read runs/a/run.json``.
        endpoint: Where it was sent.
        key: The object concerned.
    """
    try:
        yield
    except ClientError as error:
        raise _refused(error, store, action, endpoint, key) from error
    except FlexibleChecksumError as error:
        raise IntegrityError(f"{store}: {key} is not what was stored: {error}; read it again, or restore it") from error
    except (HTTPClientError, NoConnectionError, IncompleteReadError) as error:
        raise StoreError(
            f"{store}: cannot {action}: {endpoint} did not answer, or broke off ({error}); "
            "check the network and AWS_ENDPOINT_URL_S3, then try again"
        ) from error
    except BotoCoreError as error:
        raise StoreError(
            f"{store}: cannot {action}: {error}; check the credentials and settings of AWS, such as AWS_PROFILE"
        ) from error
    except ValueError as error:
        raise UsageError(f"{store}: cannot {action}: {error}; check AWS_ENDPOINT_URL_S3") from error


def code_of(error: ClientError) -> str:
    """S3's name for what went wrong, or the HTTP status where the reply has no body."""
    return str(error.response.get("Error", {}).get("Code", ""))


def _refused(error: ClientError, store: str, action: str, endpoint: str, key: str) -> TiphysError:
    code = code_of(error)
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if code in ("PreconditionFailed", "412"):
        return ObjectExistsError(f"{store} already has an object {key}; objects are never overwritten")
    if code == "NoSuchBucket":
        return StoreError(f"{store}: cannot {action}: {endpoint} has no such bucket; check the name, or create it")
    if key and code in ("NoSuchKey", "404"):
        return ObjectMissingError(f"{store} has no object {key}")
    if status == 403 or code in ("ExpiredToken", "InvalidToken"):
        return StoreError(
            f"{store}: the credentials in use may not {action} ({code}); "
            "they need s3:GetObject, s3:PutObject, s3:DeleteObject, s3:AbortMultipartUpload and s3:ListBucket"
        )
    reason = error.response.get("Error", {}).get("Message", "no reason given")
    return StoreError(f"{store}: cannot {action}: {endpoint} answered {status} {code}: {reason}; try again later")
