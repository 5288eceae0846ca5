"""Controllers that die at every named point of claim, create and record, alone and in company.

Whatever is asked for, whoever dies first and whoever goes on: in the end there
is one Workflow for each submission, it is the bound one, and it does what was
asked. A point counts only if somebody really died there.
"""

import copy
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
from support.compiled import History, gated, pipeline_of
from support.memory import MemoryStore
from support.submitter import FakeSubmitter
from tiphys_controller import Change, fork, once, resume, resuming, sending, start, start_once, starting

from tiphys.errors import ConflictError
from tiphys.faults import InjectedFaultError
from tiphys.store import list_runs, read_run, submissions

RUN = "digits-1"
PIPELINE = pipeline_of(gated("prep"), gated("fit", depends="prep"), gated("report", depends="fit"))
REPAIRED = copy.deepcopy(PIPELINE)
next(one for one in REPAIRED["spec"]["templates"] if one["name"] == "fit-run")["container"]["image"] = "python:3.13"
CHANGE = Change(REPAIRED)
SENT = ("after_claim", "after_create", "after_bind")


class Story(NamedTuple):
    """Something that is asked for, the points at which it can die, and how a person goes on after that."""

    verb: str
    points: tuple[str, ...]
    ask: Callable[[MemoryStore, FakeSubmitter], Any]
    go_on: Callable[[MemoryStore, FakeSubmitter], Any]
    new: str
    """The Workflow that there is one of in the end."""


def _resume(**given: Any) -> Callable[[MemoryStore, FakeSubmitter], Any]:
    return lambda store, submitter: resume(store, submitter, RUN, **given)


def _start(store: MemoryStore, submitter: FakeSubmitter) -> Any:
    return start_once(store, submitter, PIPELINE, "nightly", run="new")


def _fork(store: MemoryStore, submitter: FakeSubmitter) -> Any:
    return fork(store, submitter, RUN, "new", again=["fit"], change=CHANGE)


def _fork_once(store: MemoryStore, submitter: FakeSubmitter) -> Any:
    return fork(store, submitter, RUN, "new", again=["fit"], change=CHANGE, key="hot")


STORIES = {
    "resume": Story("resume", ("after_fence", *SENT), _resume(), _resume(), f"{RUN}-2"),
    "from": Story("resume", ("after_fence", *SENT), _resume(again=["fit"]), _resume(again=["fit"]), f"{RUN}-2"),
    "change": Story(
        "resume", ("after_fence", "after_workflow", *SENT), _resume(change=CHANGE), _resume(change=CHANGE), f"{RUN}-2"
    ),
    "key": Story("resume", ("after_fence", *SENT), _resume(key="alert"), _resume(key="alert"), f"{RUN}-2"),
    "start": Story("start", ("after_key", "after_record", *SENT), _start, _start, "new"),
    "fork": Story(
        "start", ("after_record", *SENT), _fork, lambda store, submitter: resume(store, submitter, "new"), "new"
    ),
    "fork-key": Story("start", ("after_key", "after_record", *SENT), _fork_once, _fork_once, "new"),
}
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
        for module in (once, resuming, sending, starting):
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
    start(store, submitter, PIPELINE, RUN)
    done = History(store, RUN)
    done.done("prep")
    done.done("fit")
    done.opened("report")
    submitter.end(RUN)
    return store, submitter


def check(name: str, story: Story, store: MemoryStore, submitter: FakeSubmitter) -> None:
    """One Workflow more than before, bound, and doing what was asked."""
    assert submitter.names() == sorted([RUN, story.new])
    assert set(list_runs(store)) == {RUN} | ({"new"} if story.new == "new" else set())
    last = submissions(store, "new" if story.new == "new" else RUN)[-1]
    assert last.bound is not None
    assert (last.bound.workflow_name, last.bound.uid) == (story.new, f"uid-of-{story.new}")
    manifest = submitter.manifest(story.new)
    tasks = [task["name"] for task in manifest["spec"]["templates"][0]["dag"]["tasks"]]
    images = {one["container"]["image"] for one in manifest["spec"]["templates"] if one["name"] == "fit-run"}
    expected = {"resume": ["report"], "key": ["report"], "from": ["fit", "report"]}.get(name)
    assert tasks == (expected or (["report"] if name == "change" else ["prep", "fit", "report"]))
    if name == "from":
        assert last.claim.fresh_since == {"fit": 2, "report": 2}
    if name == "change":
        assert store.objects.keys() >= {f"runs/{RUN}/workflows/{last.claim.workflow}.json"}
    if name.startswith("fork"):
        assert (read_run(store, "new").parent, images) == (RUN, {"python:3.13"})
        assert last.claim.fresh_since == {"fit": 1, "report": 1}


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
