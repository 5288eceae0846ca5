"""Opens the store of a URL, and the store of each namespace.

An installation has one store URL for all namespaces. The placeholder
``{namespace}`` in it gives each namespace its own store.
"""

import contextlib
import re
import threading
from collections import defaultdict
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from tiphys.errors import IntegrityError, NotFoundError, StoreError, UsageError
from tiphys.store.base import Store
from tiphys.store.buckets.azure import AzureStore
from tiphys.store.buckets.bucket_store import BucketStore
from tiphys.store.buckets.gcs import GcsStore
from tiphys.store.buckets.s3 import S3Store
from tiphys.store.directory import DirectoryStore
from tiphys.store.format import check_format
from tiphys.threads import map_parallel

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_BUCKET_SCHEMES = frozenset({"s3", "gs", "az"})
_SUPPORTED_URLS = (
    "use s3://bucket/prefix, gs://bucket/prefix, az://account/container/prefix, file:///absolute/folder or a path such "
    "as ./store"
)


def open_store(url: str, must_exist: bool = False, *, namespace: str = "") -> Store:
    """Open the store that ``url`` names.

    Args:
        url: ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://account/container/prefix``,
            ``file:///folder`` or a path. Credentials, region and endpoint come from
            the standard settings of the cloud's own tools, never from the URL.
        must_exist: Fail if the folder or bucket is missing. Otherwise a missing
            folder is created.
        namespace: The namespace whose runs it holds; empty if unknown.

    Raises:
        UsageError: the URL is not valid.
        StoreFormatError: another version of Tiphys wrote the store.
        NotFoundError: ``must_exist`` is set, and the folder or bucket is missing.
        StoreError: storage is unavailable or refuses access.
    """
    store = _find_store(url, must_exist, namespace)
    check_format(store)
    return store


def is_bucket_url(url: str) -> bool:
    """Whether the URL of a store names a bucket or a container, not a folder; the rest of it may be wrong."""
    scheme, colon, _ = url.partition(":")
    return bool(colon) and scheme.lower() in _BUCKET_SCHEMES


def artifact_prefix(url: str) -> str:
    """What the store of ``url`` puts before its keys in the bucket of Argo's artifacts, as `Store.artifact_key` does.

    Empty for a folder, and for a URL that is unknown or wrong.
    """
    if not is_bucket_url(url):
        return ""
    parts = urlsplit(url)
    prefix = parts.path.strip("/")
    if parts.scheme == "az":
        prefix = prefix.partition("/")[2]
    return f"{prefix}/" if prefix else ""


def _find_store(url: str, must_exist: bool, namespace: str) -> Store:
    if not url:
        raise UsageError(f"the store's URL is empty; {_SUPPORTED_URLS}")
    if not _SCHEME.match(url):
        return DirectoryStore(url, create=not must_exist, namespace=namespace)
    parts = urlsplit(url)
    if parts.scheme == "file":
        return DirectoryStore(_file_path(parts), create=not must_exist, namespace=namespace)
    if is_bucket_url(url):
        store = _open_bucket(parts, namespace)
        if must_exist:
            store.check_bucket()
        return store
    raise UsageError(f"no store has the scheme {parts.scheme}://; {_SUPPORTED_URLS}")


def _open_bucket(parts: SplitResult, namespace: str) -> BucketStore:
    if "@" in parts.netloc:
        raise UsageError(
            "credentials do not belong in a store's URL, which is recorded and shown; use a profile, a role or "
            "workload identity"
        )
    if not parts.netloc or parts.query or parts.fragment:
        raise UsageError(f"{parts.geturl()!r} names no bucket and prefix; {_SUPPORTED_URLS}")
    prefix = parts.path.strip("/")
    match parts.scheme:
        case "gs":
            return GcsStore(parts.netloc, prefix, namespace=namespace)
        case "az":
            container, _, prefix = prefix.partition("/")
            if not container:
                raise UsageError(f"{parts.geturl()!r} names an account without a container; {_SUPPORTED_URLS}")
            return AzureStore(parts.netloc, container, prefix, namespace=namespace)
    return S3Store(parts.netloc, prefix, namespace=namespace)


def _file_path(parts: SplitResult) -> Path:
    if parts.netloc or not parts.path.startswith("/") or parts.query or parts.fragment:
        raise UsageError(
            f"{parts.geturl()!r} names no absolute folder: three slashes, then the path; {_SUPPORTED_URLS}"
        )
    return Path(unquote(parts.path))


PLACEHOLDER = "{namespace}"
_PARALLEL_CHECKS = 16


class TenantStores:
    """The stores of the served namespaces, each opened at its first use. Thread-safe.

    Args:
        url: URL of the store; must contain ``{namespace}`` if more than one namespace is served.
        namespaces: The served namespaces; None for all namespaces of the cluster.

    Raises:
        UsageError: two namespaces would share a store, no namespace is served, or the URL has another placeholder.
    """

    def __init__(self, url: str, namespaces: tuple[str, ...] | None) -> None:
        is_shared = namespaces is None or len(namespaces) > 1
        if is_shared and PLACEHOLDER not in url:
            raise UsageError(
                f"more than one namespace would keep its runs in {url}, where each could read and fence the runs of "
                f"the others; put {PLACEHOLDER} into the URL, such as {url.rstrip('/')}/{PLACEHOLDER}"
            )
        if "{" in url.replace(PLACEHOLDER, ""):
            raise UsageError(f"{url} holds a placeholder other than {PLACEHOLDER}, which is the only one there is")
        if namespaces is not None and not namespaces:
            raise UsageError("no namespace is served; name at least one with --namespace, or give --all-namespaces")
        self._url = url
        self.namespaces = namespaces
        self._open: dict[str, Store] = {}
        self._opening: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._lock = threading.Lock()

    def serves(self, namespace: str) -> bool:
        return self.namespaces is None or namespace in self.namespaces

    def url(self, namespace: str) -> str:
        return self._url.replace(PLACEHOLDER, namespace)

    def check_formats(self) -> None:
        """Look at the stores of the named namespaces, so that a service does not start on those of another version.

        A store that is not there, or does not answer, is looked at when it is first used.

        Raises:
            UsageError: the URL is not valid.
            StoreFormatError: another version of Tiphys wrote a store.
        """

        def check(_: int, namespace: str) -> None:
            with contextlib.suppress(StoreError, NotFoundError, IntegrityError):
                open_store(self.url(namespace), must_exist=True)

        map_parallel(check, self.namespaces or (), _PARALLEL_CHECKS)

    def store(self, namespace: str) -> Store:
        """The store of a namespace.

        Raises:
            NotFoundError: the namespace is not served.
            UsageError: the URL is not valid.
            StoreFormatError: another version of Tiphys wrote the store.
            StoreError: the store cannot be opened.
        """
        if not self.serves(namespace):
            raise NotFoundError(
                f"namespace {namespace} is not served by this installation of Tiphys; "
                "have the administrator add it to its namespaces"
            )
        with self._lock:
            opening = self._opening[namespace]
        with opening:  # a store that answers slowly holds up its own namespace only
            if namespace not in self._open:
                self._open[namespace] = open_store(self.url(namespace), namespace=namespace)
            return self._open[namespace]
