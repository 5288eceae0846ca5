"""Background work of a plugin process: hashing of outputs, and tasks that repeat periodically.

Argo gives a call 30 seconds and then repeats it, but hashing a model of 100 GB
takes longer. So `OutputHasher` hashes in the background, and repeated calls get
its progress. A restart loses nothing but time.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import ClassVar, NamedTuple, Self

import structlog

from tiphys.errors import TiphysError
from tiphys.store import ObjectInfo, Store
from tiphys.store.outputs import hash_object

_log = structlog.get_logger()


class PeriodicTask(ABC):
    """Calls `run_once` every ``every_seconds`` between ``__enter__`` and ``__exit__``.

    A failed round is logged, and the next round starts without its state.
    """

    name: ClassVar[str]
    """Name of the thread, and first part of the event ids of failed rounds in the log."""
    join_timeout_seconds: ClassVar[float] = 0.0
    """How long ``__exit__`` waits for a round that is in progress."""
    starts_at_once: ClassVar[bool] = False
    every_seconds: float
    """Pause between two rounds, and before the first unless it `starts_at_once`."""

    def __enter__(self) -> Self:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"tiphys-{self.name}", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join(self.join_timeout_seconds)

    @abstractmethod
    def run_once(self) -> None:
        """Run one round.

        Raises:
            TiphysError: storage, ledger or cluster did not answer.
        """

    def _run(self) -> None:
        pause = 0.0 if self.starts_at_once else self.every_seconds
        while not self._stop.wait(pause):
            pause = self.every_seconds
            try:
                self.run_once()
            except TiphysError as error:
                _log.warning(f"{self.name}.unreachable", error=str(error))
            except Exception:  # noqa: BLE001  the worker loop: a bug in one round must not end the task
                if not self._stop.is_set():
                    _log.exception(f"{self.name}.crashed")


class HashingProgress(NamedTuple):
    """``done`` of ``total`` objects are hashed."""

    done: int
    total: int


class OutputHasher:
    """SHA-256 of objects, computed by a few worker threads."""

    def __init__(self, store: Store, workers: int) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="tiphys-verify")
        self._jobs: dict[str, dict[ObjectInfo, Future[str]]] = {}
        self._lock = threading.Lock()

    def hash_objects(
        self, job_key: str, objects: Sequence[ObjectInfo], timeout_seconds: float
    ) -> Mapping[str, str] | HashingProgress:
        """Hash objects in the background; returns SHA-256 in hex by key, or the progress after ``timeout_seconds``.

        ``job_key`` identifies the job between calls; a call with other objects starts a new job.

        Raises:
            ObjectMissingError: an object vanished.
            StoreError: storage did not answer; the next call tries again.
        """
        futures = self._start(job_key, objects)
        wait(futures.values(), timeout=timeout_seconds)
        done = sum(future.done() for future in futures.values())
        if done < len(futures):
            return HashingProgress(done, len(futures))
        with self._lock:
            self._jobs.pop(job_key, None)
        return {info.key: future.result() for info, future in futures.items()}

    def close(self) -> None:
        """Wait for the objects that are being hashed, and cancel the rest."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _start(self, job_key: str, objects: Sequence[ObjectInfo]) -> dict[ObjectInfo, Future[str]]:
        with self._lock:
            running = self._jobs.get(job_key)
            if running is None or running.keys() != set(objects):
                running = {info: self._pool.submit(hash_object, self._store, info.key) for info in objects}
                self._jobs[job_key] = running
            return running
