"""Which errors of S3 stay until a person changes something, and which may pass.

| error | becomes | exit code |
|---|---|---|
| no credentials, half of them, an unknown profile, a bad region | SettingsError | 78 |
| 403: a wrong key or signature, an expired token | SettingsError | 78 |
| 403: AccessDenied | ForbiddenError | 78 |
| no such bucket | SettingsError | 78 |
| a name that no bucket can have | UsageError | 2 |
| no answer, a closed connection, 500, 503 | StoreError | 75 |
"""

import pytest
from botocore import exceptions
from botocore.exceptions import ClientError
from botocore.loaders import JSONFileLoader

from tiphys.errors import ForbiddenError, SettingsError, StoreError, StoreFullError, TiphysError, UsageError
from tiphys.store.buckets.s3_client import make_client, translate_boto_errors

URL, ENDPOINT = "s3://ml-runs/tiphys", "https://s3.example.com"


def answer(status: int, code: str) -> ClientError:
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject")  # type: ignore[arg-type, typeddict-item]


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (exceptions.NoCredentialsError(), SettingsError, "AWS_ACCESS_KEY_ID"),
        (exceptions.PartialCredentialsError(provider="env", cred_var="AWS_SECRET_ACCESS_KEY"), SettingsError, "AWS_"),
        (exceptions.ProfileNotFound(profile="lab"), SettingsError, "lab"),
        (exceptions.InvalidRegionError(region_name="no where"), SettingsError, "no where"),
        (answer(403, "InvalidAccessKeyId"), SettingsError, "InvalidAccessKeyId"),
        (answer(403, "SignatureDoesNotMatch"), SettingsError, "s3:PutObject"),
        (answer(400, "ExpiredToken"), SettingsError, "ExpiredToken"),
        (answer(403, "AccessDenied"), ForbiddenError, "s3:PutObject"),
        (answer(404, "NoSuchBucket"), SettingsError, "check the name, or create it"),
        (answer(400, "InvalidBucketName"), UsageError, "3 to 63"),
        (exceptions.EndpointConnectionError(endpoint_url=ENDPOINT), StoreError, "try again"),
        (exceptions.ReadTimeoutError(endpoint_url=ENDPOINT), StoreError, "try again"),
        (answer(503, "SlowDown"), StoreError, "try again later"),
        (answer(507, "XMinioStorageFull"), StoreFullError, "it is full (507 XMinioStorageFull"),
        (answer(400, "XMinioAdminBucketQuotaExceeded"), StoreFullError, "free some space"),
        (answer(403, "QuotaExceeded"), StoreFullError, "free some space"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_a_permanent_error_is_distinguished_from_a_temporary_one(
    error: Exception, kind: type[TiphysError], says: str
) -> None:
    with pytest.raises(TiphysError) as caught, translate_boto_errors(URL, "create a", ENDPOINT):
        raise error
    assert type(caught.value) is kind
    assert says in str(caught.value)
    assert str(caught.value).startswith(URL)


def test_a_further_client_reads_no_description_of_the_api(monkeypatch: pytest.MonkeyPatch) -> None:
    make_client()
    monkeypatch.setattr(JSONFileLoader, "load_file", lambda *_: pytest.fail("read again"))
    assert make_client().meta.service_model.service_name == "s3"
