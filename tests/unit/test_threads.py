"""Threads of which none may be had.

| starting one | answer |
|---|---|
| it runs | its work is done, and can be waited for |
| it begins late, and ends before anybody looks | the same |
| it dies before its first instruction, for want of memory | None, soon |
| there may be no more | None |
"""

import _thread
import threading

import pytest

from tiphys import threads
from tiphys.threads import map_parallel, start_background_thread

PATIENCE_SECONDS = 120


def dies_at_once(body, arguments):
    """What CPython does with a thread whose first call finds no memory: it lets go of it, and says nothing."""
    return 1


def refused(body, arguments):
    raise RuntimeError("can't start new thread")


class BegunLate:
    """A lock that is released after it was waited for in vain, by a thread that is gone when it is looked for."""

    def acquire(self, blocking=True, timeout=-1):
        return not blocking


def test_a_thread_that_ends_at_once_counts_as_started():
    assert threads._wait_until_started(BegunLate(), lambda: None)


def test_work_in_the_background_can_be_waited_for():
    gate, done = threading.Event(), []
    thread = start_background_thread(lambda: done.append(gate.wait(PATIENCE_SECONDS)))
    assert not thread.join(0.001)
    assert thread.is_alive()
    gate.set()
    assert thread.join(PATIENCE_SECONDS)
    assert thread.join()
    assert not thread.is_alive()
    assert done == [True]


def test_work_that_is_over_is_let_go_of():
    gone = threading.Event()

    class Work:
        def __call__(self):
            pass

        def __del__(self):
            gone.set()

    thread = start_background_thread(Work())
    assert thread.join(PATIENCE_SECONDS)
    assert gone.wait(PATIENCE_SECONDS)


@pytest.mark.parametrize("start", [dies_at_once, refused])
def test_a_thread_that_cannot_be_had_is_reported(monkeypatch, start):
    monkeypatch.setattr(threads._thread, "start_new_thread", start)
    done = []
    assert start_background_thread(lambda: done.append(1)) is None
    assert done == []


def test_a_thread_that_was_quick_is_not_taken_for_one_that_died(monkeypatch):
    """It was over before anybody looked whether it had begun."""

    def at_once(body, arguments):
        body()

    monkeypatch.setattr(threads._thread, "start_new_thread", at_once)
    done = []
    assert start_background_thread(lambda: done.append(1)).join(0)
    assert done == [1]


@pytest.mark.parametrize("start", [_thread.start_new_thread, dies_at_once, refused])
@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_items_are_handled_in_order_with_any_number_of_threads(monkeypatch, start, count):
    monkeypatch.setattr(threads._thread, "start_new_thread", start)
    items = [f"item {n}" for n in range(count)]
    assert map_parallel(lambda index, item: (index, item.upper()), items, 4) == [
        (index, item.upper()) for index, item in enumerate(items)
    ]


def test_work_goes_on_at_once_on_as_many_threads_as_were_asked_for():
    together = threading.Barrier(3)
    map_parallel(lambda index, item: together.wait(PATIENCE_SECONDS), range(3), 3)
    assert not together.broken


def test_after_an_error_nothing_more_is_begun():
    begun = []

    def work(index, item):
        begun.append(index)
        return 1 / (1 - index)

    with pytest.raises(ZeroDivisionError):
        map_parallel(work, range(10), 1)
    assert begun == [0, 1]


def test_an_error_arrives_when_nothing_goes_on_behind_it():
    """Others may write into memory of the caller's until then."""
    failed, over = threading.Event(), []

    def work(index, item):
        if index == 1:
            failed.set()
            raise ZeroDivisionError
        assert failed.wait(PATIENCE_SECONDS)
        over.append(index)

    with pytest.raises(ZeroDivisionError):
        map_parallel(work, range(2), 2)
    assert over == [0]
