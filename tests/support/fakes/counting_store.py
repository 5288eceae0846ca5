"""A store that counts its requests, for promises about their number."""

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tiphys.store import ObjectInfo, Store


class CountingStore:
    """Passes everything on to ``store``; ``requests`` counts calls by the name of the method."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.requests: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def namespace(self) -> str:
        return self._store.namespace

    def create(self, key: str, data: bytes | bytearray, *, sha256: str | None = None) -> None:
        self._count("create")
        self._store.create(key, data, sha256=sha256)

    def create_from_file(self, key: str, path: Path) -> None:
        self._count("create")
        self._store.create_from_file(key, path)

    def read(self, key: str) -> bytes:
        self._count("read")
        return self._store.read(key)

    def chunks(self, key: str, size_bytes: int = 8 << 20) -> Iterator[bytes]:
        self._count("read")
        return self._store.chunks(key, size_bytes)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._count("list")
        return self._store.list(prefix)

    def prefixes(self, prefix: str) -> Iterator[str]:
        self._count("list")
        return self._store.prefixes(prefix)

    def delete(self, key: str) -> None:
        self._count("delete")
        self._store.delete(key)

    def artifact_key(self, key: str) -> str:
        return self._store.artifact_key(key)

    def from_artifact_key(self, key: str) -> str | None:
        return self._store.from_artifact_key(key)

    def _count(self, method: str) -> None:
        with self._lock:  # threads share it
            self.requests[method] += 1
