"""Those who ask the same at the same time share one look, and nobody gets an answer older than its question."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count

import pytest
from support.processes.polling import until
from tiphys_plugin.runtime import concurrency
from tiphys_plugin.runtime.concurrency import LockTimeoutError, SingleFlight

PATIENCE = 60.0
CALLERS = 6


class Look:
    """Answers its own number; the first one does not end before it is told to."""

    def __init__(self) -> None:
        self.begun = 0
        self.first_may_end = threading.Event()

    def __call__(self) -> int:
        self.begun += 1
        number = self.begun
        if number == 1:
            assert self.first_may_end.wait(PATIENCE)
        return number


class Waiting:
    """How many callers wait for an answer of another one, or have it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.callers = 0
        seen, lock = self, threading.Lock()

        class Watched(Future[int]):
            def result(self, timeout: float | None = None) -> int:
                with lock:
                    seen.callers += not self.done()
                return super().result(timeout)

        monkeypatch.setattr(concurrency, "Future", Watched)


def test_callers_during_a_lookup_share_the_next_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    together, look, waiting = SingleFlight(), Look(), Waiting(monkeypatch)
    with ThreadPoolExecutor(CALLERS + 1) as pool:
        first = pool.submit(together.lookup, "newest?", look, PATIENCE)
        until(lambda: look.begun == 1)
        later = [pool.submit(together.lookup, "newest?", look, PATIENCE) for _ in range(CALLERS)]
        until(lambda: waiting.callers == CALLERS - 1)  # all but the one who will look
        look.first_may_end.set()
        assert first.result(PATIENCE) == 1
        assert [one.result(PATIENCE) for one in later] == [2] * CALLERS


def test_an_answer_is_never_older_than_its_question() -> None:
    together, numbers, begun = SingleFlight(), count(1), [0]

    def look() -> int:
        begun[0] = next(numbers)
        return begun[0]

    def ask(_: int) -> tuple[int, int]:
        before = begun[0]
        return before, together.lookup("newest?", look, PATIENCE)

    with ThreadPoolExecutor(CALLERS) as pool:
        assert all(before < answer for before, answer in pool.map(ask, range(300)))


def test_a_lookup_of_another_key_does_not_wait() -> None:
    together, look = SingleFlight(), Look()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(together.lookup, "newest?", look, PATIENCE)
        until(lambda: look.begun == 1)
        assert together.lookup("oldest?", lambda: 7, PATIENCE) == 7
        look.first_may_end.set()
        assert first.result(PATIENCE) == 1


def test_a_failed_lookup_fails_for_all_that_share_it_and_for_no_later_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    together, look, waiting = SingleFlight(), Look(), Waiting(monkeypatch)

    def fails() -> int:
        raise OSError("no answer")

    with ThreadPoolExecutor(CALLERS + 1) as pool:
        first = pool.submit(together.lookup, "newest?", look, PATIENCE)
        until(lambda: look.begun == 1)
        later = [pool.submit(together.lookup, "newest?", fails, PATIENCE) for _ in range(CALLERS)]
        until(lambda: waiting.callers == CALLERS - 1)
        look.first_may_end.set()
        assert first.result(PATIENCE) == 1
        assert [type(one.exception(PATIENCE)) for one in later] == [OSError] * CALLERS
    assert together.lookup("newest?", look, PATIENCE) == 2


def test_a_look_that_takes_too_long_is_not_waited_for() -> None:
    together, look = SingleFlight(), Look()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(together.lookup, "newest?", look, PATIENCE)
        until(lambda: look.begun == 1)
        with pytest.raises(LockTimeoutError):
            together.lookup("newest?", look, 0.01)
        look.first_may_end.set()
        assert first.result(PATIENCE) == 1
    assert together.lookup("newest?", look, PATIENCE) == 2
