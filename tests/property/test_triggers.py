"""However notifications are repeated, reordered and lost, and wherever controllers die: one run for each content.

The model: an object's content, as long as a listing shows it, has one Workflow. Contents that were overwritten before
a controller looked may have none, and no content ever has two.
"""

import os
import shutil
import tempfile
import threading
from collections import Counter
from pathlib import Path
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st
from support.memory import MemoryStore
from support.triggers import TriggerWorld, template, version
from tiphys_controller.submit.triggers.notification import NotifiedObject

from tiphys import faults

POINTS = (
    *(f"start.after_{name}" for name in ("key", "record", "claim", "create", "bind")),
    "trigger.after_start",
    "trigger.after_ordered_record",
    "trigger.after_record",
)
KEYS = ("ml/a", "ml/b", "ml/a b")
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


@given(history=st.lists(actions, max_size=12))
@settings(max_examples=60)
def test_each_content_has_one_run(history: list[tuple[str, str, str]]) -> None:
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
