"""A store in memory, for tests that damage bytes or make storage fail; held to the contract of every store."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from tiphys.errors import ObjectExistsError, ObjectMissingError, StoreError, UsageError
from tiphys.store import ObjectInfo, check_key
from tiphys.store.base import check_read_size


class MemoryStore:
    """``objects`` may be changed behind its back, as broken storage would.

    ``refuses`` decides by operation (``create``, ``read``, ``list``, ``delete``)
    and key which calls raise `StoreError`.
    """

    def __init__(self, objects: dict[str, bytes] | None = None, url: str = "memory://", *, namespace: str = "") -> None:
        self._url = url
        self.namespace = namespace
        self.objects = dict(objects or {})
        self.refuses: Callable[[str, str], bool] = lambda operation, key: False
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return self._url

    def create(self, key: str, data: bytes | bytearray, *, sha256: str | None = None) -> None:
        self._enter("create", check_key(key))
        with self._lock:
            if key in self.objects:
                raise ObjectExistsError(f"{self.url} already has an object {key}; objects are never overwritten")
            self.objects[key] = bytes(data)

    def create_from_file(self, key: str, path: Path) -> None:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from error
        self.create(key, data)

    def read(self, key: str) -> bytes:
        data = self._find(key)
        check_read_size(self, key, len(data))
        return data

    def _find(self, key: str) -> bytes:
        self._enter("read", check_key(key))
        try:
            return self.objects[key]
        except KeyError:
            raise ObjectMissingError(f"{self.url} has no object {key}") from None

    def chunks(self, key: str, size_bytes: int = 8 << 20) -> Iterator[bytes]:
        data = self._find(key)
        for start in range(0, len(data), size_bytes):
            yield data[start : start + size_bytes]

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._enter("list", prefix)
        for key in sorted(self.objects, key=str.encode):
            if key.startswith(prefix) and key in self.objects:
                data = self.objects[key]
                yield ObjectInfo(key, len(data), hashlib.md5(data, usedforsecurity=False).hexdigest())

    def prefixes(self, prefix: str) -> Iterator[str]:
        found = (key[len(prefix) :].partition("/") for key in self.objects if key.startswith(prefix))
        yield from sorted({f"{prefix}{head}/" for head, slash, _ in found if slash}, key=str.encode)

    def delete(self, key: str) -> None:
        self._enter("delete", check_key(key))
        self.objects.pop(key, None)

    def artifact_key(self, key: str) -> str:
        return check_key(key)

    def from_artifact_key(self, key: str) -> str | None:
        try:
            return check_key(key)
        except UsageError:
            return None

    def _enter(self, operation: str, key: str) -> None:
        if self.refuses(operation, key):
            raise StoreError(f"{self.url}: {operation} of {key} failed: no space left; free some and try again")
