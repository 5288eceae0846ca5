"""Hash outputs without keeping Argo waiting.

Argo gives a call 30 seconds and then repeats it; a model of 100 GB takes
longer. So the hashing goes on in the background, and repeated calls ask how far
it is. Nothing is lost by a restart but time.

Work that a service repeats in the background for as long as it runs.
"""

import hashlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import NamedTuple

import structlog

from tiphys.errors import TiphysError
from tiphys.store import ObjectInfo, Store

_log = structlog.get_logger()


class Rounds(ABC):
    """Looks every ``every_seconds`` between ``__enter__`` and ``__exit__``.

    Args:
        what: Names the thread, and what the log says of a round that failed; the next one begins anew.
        every_seconds: Between two rounds, and before the first.
        end_seconds: How long ``__exit__`` waits for a round that is under way.
    """

    def __init__(self, what: str, every_seconds: float, end_seconds: float = 0.0) -> None:
        self._what = what
        self._every = every_seconds
        self._end_seconds = end_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"tiphys-{what}", daemon=True)

    def __enter__(self) -> "Rounds":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(self._end_seconds)

    @abstractmethod
    def look(self) -> None:
        """One round.

        Raises:
            TiphysError: somebody who is needed did not answer.
        """

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            try:
                self.look()
            except TiphysError as error:
                _log.warning(f"{self._what}.unreachable", error=str(error))
            except Exception:  # noqa: BLE001  the worker loop: the next round begins anew
                _log.exception(f"{self._what}.crashed")


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
