"""What went wrong between boto3 and the bucket, in words a person can act on."""

import contextlib
from collections.abc import Iterator

from botocore.exceptions import BotoCoreError, ClientError, FlexibleChecksumError, HTTPClientError, IncompleteReadError
from botocore.exceptions import ConnectionError as NoConnectionError

from tiphys.errors import IntegrityError, ObjectExistsError, ObjectMissingError, StoreError, TiphysError, UsageError


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
