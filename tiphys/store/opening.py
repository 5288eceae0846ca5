"""From the URL a person writes to the store it means."""

import re
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from tiphys.errors import UsageError
from tiphys.store.base import Store
from tiphys.store.directory import DirectoryStore
from tiphys.store.s3 import S3Store

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_WORKS = "use s3://bucket/prefix, file:///absolute/folder or a path such as ./store"


def open_store(url: str, must_exist: bool = False) -> Store:
    """Open the store that ``url`` names: ``s3://bucket/prefix``, ``file:///folder`` or a path.

    Args:
        url: Where the store is. Credentials, region and endpoint of S3 come
            from where the AWS SDKs look for them, never from the URL.
        must_exist: Fail if the folder or bucket is missing. A missing folder is
            made otherwise.

    Raises:
        UsageError: no store can have this URL.
        NotFoundError: ``must_exist``, and there is no such folder or bucket.
        StoreError: storage is out of reach or refuses.
    """
    if not url:
        raise UsageError(f"the store's URL is empty; {_WORKS}")
    if not _SCHEME.match(url):
        return DirectoryStore(url, create=not must_exist)
    parts = urlsplit(url)
    match parts.scheme:
        case "s3":
            return _open_s3(parts, must_exist)
        case "file":
            return DirectoryStore(_file_path(parts), create=not must_exist)
        case "gs":
            raise UsageError(
                "gs:// is not built: Google Cloud Storage makes creation conditional by its own generation "
                f"preconditions, which Tiphys does not speak yet; {_WORKS}"
            )
    raise UsageError(f"no store has the scheme {parts.scheme}://; {_WORKS}")


def _open_s3(parts: SplitResult, must_exist: bool) -> S3Store:
    if "@" in parts.netloc:
        raise UsageError(
            "credentials do not belong in a store's URL, which is recorded and shown; use a profile or role"
        )
    if not parts.netloc or parts.query or parts.fragment:
        raise UsageError(f"{parts.geturl()!r} names no bucket and prefix; {_WORKS}")
    store = S3Store(parts.netloc, parts.path.strip("/"))
    if must_exist:
        store.check_bucket()
    return store


def _file_path(parts: SplitResult) -> Path:
    if parts.netloc or not parts.path.startswith("/") or parts.query or parts.fragment:
        raise UsageError(f"{parts.geturl()!r} names no absolute folder: three slashes, then the path; {_WORKS}")
    return Path(unquote(parts.path))
