"""Credentials of a store in a bucket: the policy that each holder gets, and a probe of given credentials.

What Tiphys acts on and what programs write lie below two prefixes, so one ordinary
policy keeps a program from both the records of its tenant and the stores of other
tenants. Policies are written by people and change later, so `probe_program_credentials`
tries them out.
"""

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tiphys.errors import ForbiddenError, NotFoundError, UsageError
from tiphys.store.buckets.s3 import S3Store
from tiphys.store.layout import CONTROL, DATA, FORMAT_MARKER, StoreHalf, probe_folder
from tiphys.store.open import PLACEHOLDER
from tiphys_controller.doctor.check import Finding, check, failed, passed, warning

_READ, _LIST, _CREATE, _DELETE = "s3:GetObject", "s3:ListBucket", "s3:PutObject", "s3:DeleteObject"
_ABORT, _LIST_UPLOADS = "s3:AbortMultipartUpload", "s3:ListBucketMultipartUploads"
# They have a meaning in the resources and conditions of a policy.
_POLICY_CHARACTERS = frozenset("*?$")


class CredentialsHolder(StrEnum):
    """The holder of credentials of a store."""

    PROGRAM = "program"
    """The pods of one workflow namespace: Secret ``tiphys-store``."""
    SERVICES = "services"
    """Plugin service, agent and controller, and people at a desk."""


class _BucketPlace(NamedTuple):
    bucket: str
    prefix: str
    """Empty, or with a final slash."""


def bucket_policy(url: str, holder: CredentialsHolder, principals: Sequence[str] = ()) -> dict[str, Any]:
    """The smallest policy with which these credentials suffice.

    Args:
        url: URL of the store, ``s3://bucket/prefix``. For the services ``{namespace}`` stands for every tenant.
        holder: The holder of the credentials.
        principals: Users to name in each statement, for a policy of the bucket. None for a policy of a user or role.

    Raises:
        UsageError: the URL names no bucket, or a program would get the stores of all tenants.
    """
    is_program = holder is CredentialsHolder.PROGRAM
    if is_program and PLACEHOLDER in url:
        raise UsageError(f"{url} stands for every tenant, and a program gets the store of one: name it by --namespace")
    place = _parse_url(url)
    bucket, prefix = (part.replace(PLACEHOLDER, "*") for part in place)
    objects = f"arn:aws:s3:::{bucket}/{prefix}"
    halves = [f"{objects}{CONTROL}*", f"{objects}{DATA}*"]
    named = {"Principal": {"AWS": [*principals]}} if principals else {}

    def allow(actions: list[str], resources: list[str], **condition: Any) -> dict[str, Any]:
        return {"Effect": "Allow", **named, "Action": actions, "Resource": resources, **condition}

    statements = [
        allow([_READ], halves),
        allow([_CREATE, _DELETE, _ABORT], halves[1:] if is_program else halves),
        allow([_LIST], [f"arn:aws:s3:::{bucket}"], Condition={"StringLike": {"s3:prefix": [f"{prefix}*"]}}),
    ]
    if not is_program:  # the janitor looks for unfinished uploads
        statements.append(allow([_LIST_UPLOADS], [f"arn:aws:s3:::{bucket}"]))
    return {"Version": "2012-10-17", "Statement": statements}


def probe_program_credentials(
    url: str,
    namespace: str = "",
    other_namespaces: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> list[Finding]:
    """Try out whether credentials allow what a training program does, and nothing else.

    Objects below ``probe/`` in both halves of the stores are created where that is
    allowed, and removed.

    Args:
        url: URL of the store; may contain ``{namespace}``.
        namespace: The tenant to which the credentials belong.
        other_namespaces: Other tenants, whose stores must be out of reach. A tenant that does not exist is
            always tried.
        variables: ``AWS_…`` variables with the credentials; None for the settings of this process.

    Raises:
        UsageError: the store is a folder, which knows no users, or the URL needs a namespace.
        StoreError: storage did not answer, or the credentials are not valid.
    """
    if PLACEHOLDER in url and not namespace:
        raise UsageError(f"{url} stands for every tenant: name the tenant of these credentials by --namespace")
    nonce = secrets.token_hex(8)
    own = _open_without_check(url, namespace, variables)
    allowed = _allowed_actions(own, CONTROL, nonce, FORMAT_MARKER)
    remedy = f"give the credentials the policy of tiphys doctor {own.url} --policy program, and no other"
    findings = [
        *_check_data(_allowed_actions(own, DATA, nonce), remedy),
        *_check_control_read(own, allowed, remedy),
        *_check_control_write(own, allowed, nonce, remedy),
    ]
    for other in _other_stores(url, namespace, other_namespaces, nonce):
        findings += _check_other_store(_open_without_check(*other, variables), nonce, remedy)
    return findings


@check("data")
def _check_data(allowed: frozenset[str], remedy: str) -> Iterator[Finding]:
    needed = {_CREATE, _LIST, _READ, _DELETE} | ({_ABORT} if _CREATE in allowed else set())
    if lacking := sorted(needed - allowed):
        actions = _format_actions(lacking)
        yield failed(f"may not {actions} below {DATA}: trainings cannot save, restore or clean up", remedy)
    else:
        yield passed(f"may read, write and delete below {DATA}")


@check("control-read")
def _check_control_read(store: S3Store, allowed: frozenset[str], remedy: str) -> Iterator[Finding]:
    lacking = sorted({_LIST, _READ} - allowed)
    if lacking == [_READ] and not any(store.list(FORMAT_MARKER)):
        yield warning(
            f"may list {CONTROL}; whether it may also read there cannot be tried before the first run, because a "
            "server may answer alike for a forbidden and for a missing object",
            "run this again after the first run",
        )
    elif lacking:
        yield failed(
            f"may not {_format_actions(lacking)} below {CONTROL}: a training cannot read its claim, and stops before "
            "its first step",
            remedy,
        )
    else:
        yield passed(f"may read and list {CONTROL}")


@check("control-write")
def _check_control_write(store: S3Store, allowed: frozenset[str], nonce: str, remedy: str) -> Iterator[Finding]:
    if excess := sorted(allowed - {_LIST, _READ}):
        yield failed(
            f"may {_format_actions(excess)} below {CONTROL}: any program of the namespace can have Workflows created "
            f"and stopped{_left_behind(allowed, store, CONTROL, nonce)}",
            remedy,
        )
    else:
        yield passed(f"may not write {CONTROL}")


@check("other-tenants")
def _check_other_store(store: S3Store, nonce: str, remedy: str) -> Iterator[Finding]:
    for half in (CONTROL, DATA):
        if allowed := _allowed_actions(store, half, nonce, FORMAT_MARKER if half == CONTROL else ""):
            yield failed(
                f"may {_format_actions(sorted(allowed))} below {store.url}/{half}, which belongs to another tenant"
                f"{_left_behind(allowed, store, half, nonce)}",
                remedy,
            )
            return
    yield passed(f"{store.url} is out of reach")


def _allowed_actions(store: S3Store, half: StoreHalf, nonce: str, readable: str = "") -> frozenset[str]:
    """The S3 actions that are allowed below one half of a store, each tried once.

    A server may answer 403 for a missing object, so ``readable`` names one that a store with runs has.
    """
    key = f"{probe_folder(half, nonce)}object"
    attempts: dict[str, Callable[[], object]] = {
        _CREATE: lambda: store.create(key, b""),
        _ABORT: lambda: _abort_an_upload(store, key),
        _LIST: lambda: any(store.list(key)),
        _READ: lambda: _read(store, readable or key),
        _DELETE: lambda: store.delete(key),
    }
    return frozenset(action for action, attempt in attempts.items() if _is_allowed(attempt))


def _read(store: S3Store, key: str) -> None:
    """Read once, as the server answers it: `S3Store.read` may look for the object in a listing."""
    with store.translate_errors("read", key):
        store.client.get_object(Bucket=store.bucket, Key=store.artifact_key(key))["Body"].close()


def _abort_an_upload(store: S3Store, key: str) -> None:
    place = store.artifact_key(key)
    with store.translate_errors("abort an upload to", key):
        upload = store.client.create_multipart_upload(Bucket=store.bucket, Key=place)["UploadId"]
        store.client.abort_multipart_upload(Bucket=store.bucket, Key=place, UploadId=upload)


def _is_allowed(attempt: Callable[[], object]) -> bool:
    try:
        with contextlib.suppress(NotFoundError):
            attempt()
    except ForbiddenError:
        return False
    return True


def _left_behind(allowed: frozenset[str], store: S3Store, half: StoreHalf, nonce: str) -> str:
    is_left = _CREATE in allowed and _DELETE not in allowed
    return f"; {store.url}/{probe_folder(half, nonce)}object of this probe is left" if is_left else ""


def _other_stores(url: str, namespace: str, others: Sequence[str], nonce: str) -> Iterator[tuple[str, str]]:
    """URL and namespace of stores that must be out of reach."""
    yield from ((url, other) for other in others if other != namespace and PLACEHOLDER in url)
    made_up = f"tiphys-doctor-{nonce}"
    place = _parse_url(url)
    if PLACEHOLDER in place.prefix:
        yield url, made_up
    elif place.prefix:
        yield f"s3://{place.bucket.replace(PLACEHOLDER, namespace)}/{made_up}", ""


def _open_without_check(url: str, namespace: str, variables: Mapping[str, str] | None) -> S3Store:
    """The store without a look at its format, which the credentials need not be allowed to read."""
    place = _parse_url(url.replace(PLACEHOLDER, namespace))
    return S3Store(place.bucket, place.prefix.rstrip("/"), namespace=namespace, variables=variables)


def _parse_url(url: str) -> _BucketPlace:
    parts = urlsplit(url)
    if parts.scheme in ("gs", "az"):
        raise UsageError(
            f"{url}: policies and trials of the credentials of programs are for S3 only; give the identity of the "
            "programs the roles of 'Google Cloud Storage and Azure' in docs/install.md"
        )
    if parts.scheme != "s3" or not parts.netloc or _POLICY_CHARACTERS.intersection(url):
        raise UsageError(
            f"{url or 'the URL'} names no bucket of S3, and a folder knows no users: use s3://bucket/prefix, "
            "without * and $"
        )
    prefix = parts.path.strip("/")
    return _BucketPlace(parts.netloc, f"{prefix}/" if prefix else "")


def _format_actions(actions: Sequence[str]) -> str:
    return f"use {', '.join(actions)}"
