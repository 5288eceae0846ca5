"""Shards several at a time, on threads that never keep a program from ending.

The interpreter waits at its exit for the threads of `concurrent.futures`. A
program that has to be gone before it is killed cannot wait for an upload that
storage does not answer, so these threads are daemons.
"""

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


def in_parallel(work: Callable[[int, ItemT], ResultT], items: Sequence[ItemT], threads: int) -> list[ResultT]:
    """``work(index, item)`` of each item by at most ``threads`` threads; the results in the order of the items.

    After an error no further item is begun, and the first error is raised.
    With one thread, or one item, the caller's own does the work.
    """
    if threads == 1 or len(items) < 2:
        return [work(index, item) for index, item in enumerate(items)]
    todo = iter(enumerate(items))
    results: dict[int, ResultT] = {}
    errors: list[BaseException] = []
    lock = threading.Lock()

    def labour() -> None:
        while True:
            with lock:
                task = None if errors else next(todo, None)
            if task is None:
                return
            try:
                result = work(*task)
            except BaseException as error:  # noqa: BLE001  raised again by the thread that waits
                with lock:
                    errors.append(error)
            else:
                with lock:
                    results[task[0]] = result

    crew = [threading.Thread(target=labour, name="tiphys-shard", daemon=True) for _ in range(min(threads, len(items)))]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    if errors:
        raise errors[0]
    return [results[index] for index in sorted(results)]
