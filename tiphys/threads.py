"""Threads that never keep a program from ending, and whose start always comes to an end.

The interpreter waits at its exit for the threads of `concurrent.futures`. A
program that has to be gone before it is killed cannot wait for an upload that
storage does not answer, so nobody waits for these.

`threading.Thread.start` waits until the new thread says that it runs, which one
that finds no memory for its first call never does (CPython, gh-140746): instead
of ending, a program without memory stands still. So these are started one level
below, where a thread that died is seen by what it leaves hold of. Where none can
be started, for want of memory or beyond a limit of threads, whoever wanted it
goes on without.
"""

import _thread
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

_LOOK_SECONDS = 0.05
"""How often it is looked whether a thread that does not begin is still there."""


class Background:
    """``work`` on a thread of its own, which runs once this is made.

    Raises:
        RuntimeError: there may be no more threads.
        MemoryError: there is no memory for another thread.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        begun, self._over = _thread.allocate_lock(), _thread.allocate_lock()
        begun.acquire()
        self._over.acquire()
        body = _Body(work, begun, self._over)
        alive = weakref.ref(body)  # the thread holds the only other reference
        _thread.start_new_thread(body, ())
        del body
        if not _begins(begun, alive):
            raise MemoryError("a thread found no memory to begin with")

    def is_alive(self) -> bool:
        """Whether its work is not over yet."""
        return self._over.locked()

    def join(self, timeout_seconds: float | None = None) -> bool:
        """Wait until its work is over, or time runs out; whether it is over."""
        over = self._over.acquire(timeout=-1 if timeout_seconds is None else timeout_seconds)
        if over:
            self._over.release()
        return over


def _begins(begun: _thread.LockType, alive: Callable[[], object | None]) -> bool:
    """Wait until a thread has said that it begins; False if it is gone and never did."""
    while not begun.acquire(timeout=_LOOK_SECONDS):
        if alive() is None:
            return begun.acquire(blocking=False)  # it may have begun, and even ended, in between
    return True


class _Body:
    def __init__(self, work: Callable[[], object], begun: _thread.LockType, over: _thread.LockType) -> None:
        self._work = work
        self._begun = begun
        self._over = over

    def __call__(self) -> None:
        self._begun.release()
        try:
            self._work()
        finally:
            self._over.release()


def in_background(work: Callable[[], object]) -> Background | None:
    """Begin ``work`` on a thread of its own; None if none can be started."""
    try:
        return Background(work)
    except (RuntimeError, MemoryError):
        return None


def in_parallel(work: Callable[[int, ItemT], ResultT], items: Sequence[ItemT], threads: int) -> list[ResultT]:
    """``work(index, item)`` of each item, at most ``threads`` at a time; the results in the order of the items.

    The caller's thread does its share, and all where no other can be started.
    After an error no further item is begun, and the first error is raised.
    """
    todo = iter(enumerate(items))
    lock = _thread.allocate_lock()
    results: dict[int, ResultT] = {}
    errors: list[BaseException] = []

    def labour() -> None:
        try:
            while not errors:
                with lock:
                    task = next(todo, None)
                if task is None:
                    return
                results[task[0]] = work(*task)
        except BaseException as error:  # noqa: BLE001  raised again by the thread that waits
            errors.append(error)

    crew = [in_background(labour) for _ in range(min(threads, len(items)) - 1)]
    try:
        labour()
    finally:
        # Whatever happens: the others write into memory that is the caller's.
        for thread in filter(None, crew):
            thread.join()
    if errors:
        raise errors.pop(0)
    if len(results) < len(items):
        raise MemoryError("a thread found no memory to say what went wrong")
    return [results[index] for index in range(len(items))]
