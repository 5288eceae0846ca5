"""However notifications are repeated, reordered and lost, and wherever controllers die: one run for each content.

The model: an object's content, as long as a listing shows it, has one Workflow. Contents that were overwritten before
a controller looked may have none, and no content ever has two.
"""

import os
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.fakes.memory_store import MemoryStore
from support.stories.triggers import TriggerWorld, template, version
from tiphys_controller.submit.triggers import start
from tiphys_controller.submit.triggers.notification import NotifiedObject
from tiphys_controller.submit.triggers.worker import TriggerWorker

from tiphys import faults
from tiphys.records import ObjectVersion

POINTS = (
    *(f"start.after_{name}" for name in ("key", "record", "claim", "create", "bind")),
    "trigger.after_start",
    "trigger.after_ordered_record",
    "trigger.after_record",
)
KEYS = ("ml/a", "ml/a b")
actions = st.one_of(
    st.tuples(st.just("put"), st.sampled_from(KEYS), st.sampled_from("12")),
    st.tuples(st.just("delete"), st.sampled_from(KEYS), st.just("")),
    st.tuples(st.just("deliver"), st.sampled_from(KEYS), st.just("")),
    st.tuples(st.just("die"), st.sampled_from(KEYS), st.sampled_from(POINTS)),
    st.tuples(st.just("list"), st.just(""), st.just("")),
    st.tuples(st.just("replace"), st.just(""), st.just("")),
)


def contents(world: TriggerWorld) -> Counter[str]:
    """Workflows by the etag of the object that they are for."""
    names = world.submitter.names()
    return Counter(world.parameters(name)["source"] for name in names)


histories = st.lists(actions, min_size=3, max_size=12)


def follow(history: list[tuple[str, str, str]]) -> None:
    folder = Path(tempfile.mkdtemp())
    store = MemoryStore(namespace="ml")
    world = TriggerWorld(folder, lambda _: store, template(objects="s3://raw/ml/", parameters={"source": "etag"}))
    worker = world.worker
    put: set[tuple[str, str]] = set()
    try:
        for clock, (action, key, detail) in enumerate(history):
            delivery = [NotifiedObject("raw", (key,))]
            match action:
                case "put":
                    one = version(key, f"{key}/{detail}", after_seconds=float(clock))
                    world.buckets.put(one)
                    put.add((key, one.etag))
                case "delete":
                    world.buckets.objects.pop(("raw", key), None)
                case "deliver":
                    worker.handle_notification(delivery)
                case "die":
                    armed = patch.dict(os.environ, {"TIPHYS_FAILPOINTS": f"{detail}=raise"})
                    with armed, patch.object(faults, "_calls", Counter()):
                        worker.handle_notification(delivery)
                    worker = world.new_worker()
                case "list":
                    worker.run_round(threading.Event())
                case "replace":
                    worker = world.new_worker()
            assert set(contents(world).values()) <= {1}
        present = {one.etag for one in world.buckets.objects.values()}
        worker.run_round(threading.Event())
        worker.run_round(threading.Event())

        assert set(contents(world).values()) <= {1}
        assert present <= contents(world).keys() <= {etag for _, etag in put}
    finally:
        shutil.rmtree(folder)


@given(history=histories)
@settings(max_examples=200)
def test_an_object_content_has_one_run(history: list[tuple[str, str, str]]) -> None:
    follow(history)


def the_content_is_not_looked_at(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(ObjectVersion, "digest", property(lambda self: str(abs(hash((self.bucket, self.key))))))


def who_goes_on_after_a_death_begins_anew(plant: pytest.MonkeyPatch) -> None:
    numbers, begin = count(), start.begin_run

    def begin_anew(store, submitter, new, request):  # type: ignore[no-untyped-def]
        return begin(store, submitter, new, request._replace(key=f"{request.key}/{next(numbers)}"))

    plant.setattr(start, "begin_run", begin_anew)


def nothing_is_listed(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(TriggerWorker, "run_round", lambda self, stop, begin=True: None)


BUGS = [the_content_is_not_looked_at, who_goes_on_after_a_death_begins_anew, nothing_is_listed]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_caught(bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    search = settings(max_examples=200, derandomize=True, phases=[Phase.generate])(given(history=histories)(follow))
    with pytest.raises(AssertionError):
        search()
