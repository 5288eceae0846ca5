"""Threads that neither delay the exit of a program nor hang when they start.

The interpreter waits at exit for the threads of `concurrent.futures`. A program
that must exit before its grace period ends cannot wait for an upload to
unresponsive storage, so it does not wait for a `BackgroundThread`.

`threading.Thread.start` waits for a signal from the new thread. A thread that
finds no memory for its first call never sends it (CPython, gh-140746), and the
program hangs. `BackgroundThread` uses ``_thread`` directly and detects a thread
that died before its start. If no thread can be started, for lack of memory or
because of a thread limit, `start_background_thread` and `map_parallel` continue
without it.
"""

import _thread
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

_START_POLL_SECONDS = 0.05
"""Interval of the check whether a thread that has not started is still alive."""


class BackgroundThread:
    """Runs ``work`` on a new thread, which starts with the constructor.

    Raises:
        RuntimeError: the limit of threads is reached.
        MemoryError: there is no memory for another thread.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        started, self._running_lock = _thread.allocate_lock(), _thread.allocate_lock()
        started.acquire()
        self._running_lock.acquire()
        body = _ThreadBody(work, started, self._running_lock)
        body_ref = weakref.ref(body)  # the thread holds the only other reference
        _thread.start_new_thread(body, ())
        del body
        if not _wait_until_started(started, body_ref):
            raise MemoryError("a thread did not start, because it found no memory")

    def is_alive(self) -> bool:
        """Whether ``work`` still runs."""
        return self._running_lock.locked()

    def join(self, timeout_seconds: float | None = None) -> bool:
        """Wait until ``work`` has ended or the timeout expires; return whether it has ended."""
        ended = self._running_lock.acquire(timeout=-1 if timeout_seconds is None else timeout_seconds)
        if ended:
            self._running_lock.release()
        return ended


def _wait_until_started(started: _thread.LockType, thread_body: Callable[[], object | None]) -> bool:
    """Wait until a thread has started; False if it died before."""
    while not started.acquire(timeout=_START_POLL_SECONDS):
        if thread_body() is None:
            return started.acquire(blocking=False)  # it may have started and ended since the timeout
    return True


class _ThreadBody:
    def __init__(self, work: Callable[[], object], started: _thread.LockType, running_lock: _thread.LockType) -> None:
        self._work = work
        self._started = started
        self._running_lock = running_lock

    def __call__(self) -> None:
        self._started.release()
        try:
            self._work()
        finally:
            self._running_lock.release()


def start_background_thread(work: Callable[[], object]) -> BackgroundThread | None:
    """Run ``work`` on a new thread; None if no thread can be started."""
    try:
        return BackgroundThread(work)
    except (RuntimeError, MemoryError):
        return None


def map_parallel(work: Callable[[int, ItemT], ResultT], items: Sequence[ItemT], threads: int) -> list[ResultT]:
    """Call ``work(index, item)`` for each item, at most ``threads`` at a time.

    The caller's thread takes part, and does all the work if no other thread can
    be started. After an error no further item is started.

    Returns:
        The results, in the order of ``items``.

    Raises:
        BaseException: the first error that ``work`` raised.
        MemoryError: a thread had no memory to record its error.
    """
    pending = iter(enumerate(items))
    lock = _thread.allocate_lock()
    results: dict[int, ResultT] = {}
    errors: list[BaseException] = []

    def run_tasks() -> None:
        try:
            while not errors:
                with lock:
                    task = next(pending, None)
                if task is None:
                    return
                results[task[0]] = work(*task)
        except BaseException as error:  # noqa: BLE001  raised again by the thread that waits
            errors.append(error)

    workers = [start_background_thread(run_tasks) for _ in range(min(threads, len(items)) - 1)]
    try:
        run_tasks()
    finally:
        # Join even after an error: the workers write into memory that belongs to the caller.
        for thread in filter(None, workers):
            thread.join()
    if errors:
        raise errors.pop(0)
    if len(results) < len(items):
        raise MemoryError("a thread ended without a result, and had no memory to record its error")
    return [results[index] for index in range(len(items))]
