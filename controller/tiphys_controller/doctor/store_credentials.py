"""Tries out whether credentials of a store allow what a training program does, and nothing else.

Their policy (`tiphys.store.credentials`) is written by people and changes later.
"""

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence

from tiphys.errors import ForbiddenError, NotFoundError, UsageError
from tiphys.store.buckets.s3 import S3Store
from tiphys.store.credentials import ABORT, CREATE, DELETE, LIST, READ, parse_bucket_url
from tiphys.store.layout import CONTROL, DATA, FORMAT_MARKER, StoreHalf, probe_folder
from tiphys.store.open import PLACEHOLDER
from tiphys_controller.doctor.check import Finding, check, failed, passed, warning


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
    remedy = f"give the credentials no other policy than that of tiphys doctor {own.url} --policy program"
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
    needed = {CREATE, LIST, READ, DELETE} | ({ABORT} if CREATE in allowed else set())
    if lacking := sorted(needed - allowed):
        actions = _format_actions(lacking)
        yield failed(f"may not {actions} below {DATA}: trainings cannot save, restore or clean up", remedy)
    else:
        yield passed(f"may read, write and delete below {DATA}")


@check("control-read")
def _check_control_read(store: S3Store, allowed: frozenset[str], remedy: str) -> Iterator[Finding]:
    lacking = sorted({LIST, READ} - allowed)
    if lacking == [READ] and not any(store.list(FORMAT_MARKER)):
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
    if excess := sorted(allowed - {LIST, READ}):
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
        CREATE: lambda: store.create(key, b""),
        ABORT: lambda: _abort_an_upload(store, key),
        LIST: lambda: any(store.list(key)),
        READ: lambda: _read(store, readable or key),
        DELETE: lambda: store.delete(key),
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
    is_left = CREATE in allowed and DELETE not in allowed
    return f"; {store.url}/{probe_folder(half, nonce)}object of this probe is left" if is_left else ""


def _other_stores(url: str, namespace: str, others: Sequence[str], nonce: str) -> Iterator[tuple[str, str]]:
    """URL and namespace of stores that must be out of reach."""
    yield from ((url, other) for other in others if other != namespace and PLACEHOLDER in url)
    made_up = f"tiphys-doctor-{nonce}"
    place = parse_bucket_url(url)
    if PLACEHOLDER in place.prefix:
        yield url, made_up
    elif place.prefix:
        yield f"s3://{place.bucket.replace(PLACEHOLDER, namespace)}/{made_up}", ""


def _open_without_check(url: str, namespace: str, variables: Mapping[str, str] | None) -> S3Store:
    """The store without a look at its format, which the credentials need not be allowed to read."""
    place = parse_bucket_url(url.replace(PLACEHOLDER, namespace))
    return S3Store(place.bucket, place.prefix.rstrip("/"), namespace=namespace, variables=variables)


def _format_actions(actions: Sequence[str]) -> str:
    return f"use {', '.join(actions)}"
