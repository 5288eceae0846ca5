"""Hash outputs without keeping Argo waiting.

Argo gives a call 30 seconds and then repeats it; a model of 100 GB takes
longer. So the hashing goes on in the background, and repeated calls ask how far
it is. Nothing is lost by a restart but time.
"""

import hashlib
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from tiphys.store import ObjectInfo, Store


class Progress(NamedTuple):
    """``done`` of ``total`` objects are hashed."""

    done: int
    total: int


class OutputHasher:
    """SHA-256 of objects, computed by a few worker threads."""

    def __init__(self, store: Store, workers: int) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="tiphys-verify")
        self._jobs: dict[str, dict[str, Future[str]]] = {}
        self._lock = threading.Lock()

    def hashes(self, job: str, objects: Sequence[ObjectInfo], patience_seconds: float) -> Mapping[str, str] | Progress:
        """SHA-256 in hex by key, or how far it is after ``patience_seconds``.

        ``job`` names the work between calls; a call with other objects starts it anew.

        Raises:
            ObjectMissingError: an object vanished.
            StoreError: storage did not answer; the next call tries again.
        """
        futures = self._start(job, objects)
        wait(futures.values(), timeout=patience_seconds)
        done = sum(future.done() for future in futures.values())
        if done < len(futures):
            return Progress(done, len(futures))
        with self._lock:
            self._jobs.pop(job, None)
        return {key: future.result() for key, future in futures.items()}

    def close(self) -> None:
        """Stop; what has not begun is given up."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _start(self, job: str, objects: Sequence[ObjectInfo]) -> dict[str, Future[str]]:
        with self._lock:
            running = self._jobs.get(job)
            if running is None or running.keys() != {info.key for info in objects}:
                running = {info.key: self._pool.submit(self._hash, info.key) for info in objects}
                self._jobs[job] = running
            return running

    def _hash(self, key: str) -> str:
        sha256 = hashlib.sha256()
        for chunk in self._store.chunks(key):
            sha256.update(chunk)
        return sha256.hexdigest()
