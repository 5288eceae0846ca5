"""Stores that only read; one of them remembers small objects for a minute.

Records are never overwritten, and a page that follows a run reads the same ones
every few seconds. A minute is the longest time for which a run that was deleted
and begun again under its name, or a record that was damaged meanwhile, is shown
as it was.
"""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from cachetools import TTLCache

from tiphys.errors import UsageError
from tiphys.store import ObjectInfo, Store

_KEEP_SECONDS = 60.0
_MAX_OBJECT_BYTES = 64 << 10
_MAX_BYTES = 128 << 20


class ReadOnlyStore:
    """`Store` over ``store`` that writes and deletes nothing."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def namespace(self) -> str:
        return self._store.namespace

    def read(self, key: str) -> bytes:
        return self._store.read(key)

    def chunks(self, key: str, size_bytes: int = 8 << 20) -> Iterator[bytes]:
        return self._store.chunks(key, size_bytes)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._store.list(prefix)

    def prefixes(self, prefix: str) -> Iterator[str]:
        return self._store.prefixes(prefix)

    def artifact_key(self, key: str) -> str:
        return self._store.artifact_key(key)

    def from_artifact_key(self, key: str) -> str | None:
        return self._store.from_artifact_key(key)

    def create(self, key: str, data: bytes | bytearray, *, sha256: str | None = None) -> NoReturn:  # noqa: ARG002
        raise UsageError(f"{key} is not written: the pages only read")

    def create_from_file(self, key: str, path: Path) -> NoReturn:  # noqa: ARG002
        raise UsageError(f"{key} is not written: the pages only read")

    def delete(self, key: str) -> NoReturn:
        raise UsageError(f"{key} is not deleted: the pages only read")


class RecordCache(ReadOnlyStore):
    """Remembers what it read, for one process, up to ``max_bytes`` of all objects together. Thread-safe."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic, max_bytes: int = _MAX_BYTES) -> None:
        super().__init__(store)
        self._objects: TTLCache[str, bytes] = TTLCache(max_bytes, _KEEP_SECONDS, timer=clock, getsizeof=len)
        self._lock = threading.Lock()

    def read(self, key: str) -> bytes:
        with self._lock:
            known = self._objects.get(key)
        if known is not None:
            return known
        data = self._store.read(key)
        if len(data) <= _MAX_OBJECT_BYTES:
            with self._lock:
                self._objects[key] = data
        return data
