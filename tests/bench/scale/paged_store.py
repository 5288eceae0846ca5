"""A bucket in memory that counts requests: one for each object, and one for each page of a listing."""

import time
from bisect import bisect_left
from collections.abc import Iterator

from support.fakes.memory_store import MemoryStore

from tiphys.store import ObjectInfo

PAGE = 1000
"""Keys of a page of S3, of folders as of objects."""


class PagedStore(MemoryStore):
    """``latency`` is what each request waits, in seconds."""

    def __init__(self, latency: float = 0.0) -> None:
        super().__init__()
        self.latency = latency
        self.requests = 0
        self._keys: list[str] = []

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for number, key in enumerate(self._from(prefix, prefix)):
            if not number % PAGE:
                self._count()
            yield ObjectInfo(key, len(self.objects[key]), str(len(self.objects[key])))
        if not any(True for _ in self._from(prefix, prefix)):
            self._count()

    def prefixes(self, prefix: str) -> Iterator[str]:
        found, after = 0, prefix
        while (key := next(self._from(prefix, after), None)) is not None:
            head, slash, _ = key.removeprefix(prefix).partition("/")
            after = f"{prefix}{head}{chr(ord('/') + 1) if slash else chr(0)}"
            if slash:
                if not found % PAGE:
                    self._count()
                found += 1
                yield f"{prefix}{head}/"
        if not found:
            self._count()

    def _from(self, prefix: str, first: str) -> Iterator[str]:
        """Keys with a prefix from ``first`` on, as they were when they were first asked for."""
        if len(self._keys) != len(self.objects):  # what is measured creates or deletes, and does not do both
            self._keys = sorted(self.objects)
        keys = self._keys
        for index in range(bisect_left(keys, first), len(keys)):
            if not keys[index].startswith(prefix):
                return
            yield keys[index]

    def _enter(self, operation: str, key: str) -> None:
        super()._enter(operation, key)
        self._count()

    def _count(self) -> None:
        self.requests += 1
        if self.latency:
            time.sleep(self.latency)
