"""Controllers that die at every named point of claim, create and record, alone and in company.

Whatever is asked for, whoever dies first and whoever goes on: in the end there
is one Workflow for each submission, it is the bound one, and it does what was
asked. A point counts only if somebody really died there.
"""

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from support.fakes.memory_store import MemoryStore
from support.fakes.submitter import FakeSubmitter
from support.stories.controller_crashes import RUN, STORIES, Story, check, failed_run
from tiphys_controller.submit import resume, start, submission
from tiphys_controller.submit.submission import NextSubmission

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
        for module in (resume, submission, start):
            patches.enter_context(patch.object(module, "failpoint", death))
        yield death


def asked_by(story: Story, count: int, store: MemoryStore, submitter: FakeSubmitter) -> Counter[str]:
    """What each of several controllers came to that were asked for the same at the same moment."""
    told: list[str] = []
    together = threading.Barrier(count)

    def ask() -> None:
        together.wait(timeout=60)
        try:
            story.ask(store, submitter)
            told.append("done")
        except InjectedFaultError:
            told.append("died")
        except ConflictError:
            told.append("refused")

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return Counter(told)


def history(folder: Path) -> tuple[MemoryStore, FakeSubmitter]:
    """A run whose report failed."""
    store, submitter = MemoryStore(), FakeSubmitter(folder)
    failed_run(store, submitter)
    submitter.end(RUN)
    return store, submitter


def campaign(folder: Path, seed: int, rounds: int) -> None:
    """Tell every story with every death."""
    order = CASES * rounds
    random.Random(seed).shuffle(order)
    for number, (name, point, count) in enumerate(order):
        story, where = STORIES[name], (name, point, count)
        store, submitter = history(folder / str(number))
        with dying_first_at(f"{story.verb}.{point}") as death:
            told = asked_by(story, count, store, submitter)
        assert death.happened == told["died"] == 1, (where, told)
        assert told.total() == count
        try:
            story.go_on(store, submitter)
        except ConflictError as error:
            assert "is still running" in str(error), where
        check(name, story, store, submitter)


def test_every_death_is_survived_once(tmp_path: Path) -> None:
    campaign(tmp_path, seed=1, rounds=1)


def what_was_claimed_is_not_sent(plant: pytest.MonkeyPatch) -> None:
    choose = resume.choose_next_submission
    plant.setattr(
        resume,
        "choose_next_submission",
        lambda last, *others: NextSubmission(last.claim.submission + 1, "default") if last else choose(last, *others),
    )


def a_workflow_that_was_created_is_not_bound(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(submission, "bind_submission", lambda *_: None)


BUGS = [what_was_claimed_is_not_sent, a_workflow_that_was_created_is_not_bound]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_caught(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        campaign(tmp_path, seed=1, rounds=1)


@pytest.mark.heavy
def test_hundreds_of_deaths_are_survived(tmp_path: Path) -> None:
    campaign(tmp_path, seed=2, rounds=5)
