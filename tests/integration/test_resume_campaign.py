"""Controllers that die at every named point of claim, create and record, alone and in company.

Whatever is asked for, whoever dies first and whoever goes on: in the end there
is one Workflow for each submission, it is the bound one, and it does what was
asked. A point counts only if somebody really died there.
"""

import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from support.memory import MemoryStore
from support.resume_stories import RUN, STORIES, Story, check, failed_run
from support.submitter import FakeSubmitter
from tiphys_controller.submit import idempotency, resume, start, submission

from tiphys.errors import ConflictError
from tiphys.faults import InjectedFaultError

CASES = [(name, point, count) for name, story in STORIES.items() for point in story.points for count in (1, 2, 3)]


class Death:
    """The first controller that comes to ``point`` dies there."""

    def __init__(self, point: str) -> None:
        self.point = point
        self.happened = 0
        self._lock = threading.Lock()

    def __call__(self, name: str) -> None:
        with self._lock:
            if name != self.point or self.happened:
                return
            self.happened += 1
        raise InjectedFaultError(name)


@contextmanager
def dying_first_at(point: str) -> Iterator[Death]:
    death = Death(point)
    with ExitStack() as patches:
        for module in (idempotency, resume, submission, start):
            patches.enter_context(patch.object(module, "failpoint", death))
        yield death


def asked_by(story: Story, count: int, store: MemoryStore, submitter: FakeSubmitter) -> Counter[str]:
    """What each of several controllers came to that were asked for the same at the same moment."""
    told: Counter[str] = Counter()
    together = threading.Barrier(count)

    def ask() -> None:
        together.wait(timeout=60)
        try:
            story.ask(store, submitter)
            told["done"] += 1
        except InjectedFaultError:
            told["died"] += 1
        except ConflictError:
            told["refused"] += 1

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return told


def history(folder: Path) -> tuple[MemoryStore, FakeSubmitter]:
    """A run whose report failed."""
    store, submitter = MemoryStore(), FakeSubmitter(folder)
    failed_run(store, submitter)
    submitter.end(RUN)
    return store, submitter


def campaign(folder: Path, seed: int, rounds: int) -> int:
    """Tell every story with every death; how many deaths there were."""
    deaths = 0
    order = CASES * rounds
    random.Random(seed).shuffle(order)
    for number, (name, point, count) in enumerate(order):
        story = STORIES[name]
        store, submitter = history(folder / str(number))
        with dying_first_at(f"{story.verb}.{point}") as death:
            told = asked_by(story, count, store, submitter)
        assert death.happened == told["died"] == 1, (name, point, count, told)
        assert told.total() == count
        deaths += death.happened
        try:
            story.go_on(store, submitter)
        except ConflictError as error:
            assert "is still running" in str(error), (name, point, count)
        check(name, story, store, submitter)
    return deaths


def test_every_death_is_survived_once(tmp_path: Path) -> None:
    assert campaign(tmp_path, seed=1, rounds=1) == len(CASES)


@pytest.mark.heavy
def test_hundreds_of_deaths_are_survived(tmp_path: Path) -> None:
    assert campaign(tmp_path, seed=2, rounds=5) >= 300
