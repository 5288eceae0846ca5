"""Long hashing goes on behind Pending answers, and ends in the same record."""

import threading
from dataclasses import replace

import pytest
from support.builders.irregular_samples import Irregular
from support.stories.plugin import QUICK, Flow, outputs, phase, prep, records, said, world
from tiphys_plugin import core

from tiphys.errors import StoreError
from tiphys.store import DirectoryStore


class Slow(DirectoryStore):
    """Gives the bytes of ``b`` only once it is told to; ``fail`` makes that an error."""

    def __init__(self, path) -> None:
        super().__init__(path)
        self.go = threading.Event()
        self.fail = False
        self.hashed: list[str] = []

    def chunks(self, key: str, size_bytes: int = 8 << 20):
        if key.endswith("b"):
            assert self.go.wait(120)
        if self.fail:
            raise StoreError("storage went away")
        if "/artifacts/" in key:
            self.hashed.append(key)
        return super().chunks(key, size_bytes)


@pytest.fixture
def flow(tmp_path):
    store = Slow(tmp_path / "store")
    here = world(tmp_path, settings=replace(QUICK, verify_inline_seconds=0.05), store=store)
    flow = here.submit(prep(parameters=()))
    reply = flow.admit("prep")
    flow.write_output(reply, "0/artifacts/data/a", b"1")
    flow.write_output(reply, "0/artifacts/data/b", b"2")
    yield flow
    store.go.set()
    here.core.close()


def until_decided(flow):
    for _ in range(200):
        reply = flow.conclude("prep")
        if phase(reply) != "Pending":
            return reply
    return pytest.fail("still pending")


def test_progress_is_said_and_nothing_is_recorded_before_the_end(flow):
    waiting = flow.conclude("prep")
    while said(waiting) == "Verifying outputs: 0 of 2 objects":  # on a busy machine the first one takes a while, too
        waiting = flow.conclude("prep")
    assert (phase(waiting), said(waiting)) == ("Pending", "Verifying outputs: 1 of 2 objects")
    assert waiting.requeue is not None
    assert len(records(flow.world.store, "control/runs/digits-abc12/attempts/prep/")) == 1
    flow.world.store.go.set()
    assert phase(until_decided(flow)) == "Succeeded"
    assert len(flow.world.store.hashed) == 2, "repeated calls hash nothing twice"


def test_restarted_plugin_hashes_again_and_answers_the_same(flow):
    flow.conclude("prep")
    flow.world.core = flow.world.restart()
    flow.world.store.go.set()
    assert phase(until_decided(flow)) == "Succeeded"
    flow.world.core.close()


def test_storage_that_fails_while_hashing_is_asked_again(flow):
    flow.world.store.fail = True
    flow.world.store.go.set()
    with pytest.raises(StoreError, match="storage went away"):
        until_decided(flow)
    flow.world.store.fail = False
    assert phase(until_decided(flow)) == "Succeeded"


def test_call_about_a_step_that_is_being_answered_is_asked_again_later(tmp_path):
    here = world(tmp_path, settings=replace(QUICK, lock_timeout_seconds=0.01))
    flow = here.submit(prep())
    with here.core._locks.hold("digits-abc12/prep/", 1):
        waiting = flow.admit("prep")
    assert phase(waiting) == "Pending"
    assert outputs(flow.admit("prep"))["run"] == "true"


def test_call_waits_for_no_other_item_step_or_run_that_is_being_answered(tmp_path, monkeypatch):
    step, other_step, item, other_item = Irregular().step_names(4)
    run, other_run = Irregular().run_names(2)
    here = world(tmp_path, settings=replace(QUICK, lock_timeout_seconds=0.01))
    specs = [prep(name=name, parameters=(), artifacts=()) for name in (step, other_step)]
    first, second = (here.submit(*specs, name=name, uid=f"uid-of-{name}") for name in (run, other_run))
    first.admit(other_step)  # each Workflow is known before: to read one takes a lock of its own
    second.admit(other_step)
    answers = []
    dispatch = core._dispatch

    def dispatch_beside_others(*call):
        monkeypatch.setattr(core, "_dispatch", dispatch)
        others: list[tuple[Flow, str, str]] = [
            (first, step, f"0:{item}"),
            (first, step, f"1:{other_item}"),
            (first, other_step, f"0:{item}"),
            (second, step, f"0:{item}"),
        ]
        answers.extend(phase(flow.admit(name, item=value)) for flow, name, value in others)
        return dispatch(*call)

    monkeypatch.setattr(core, "_dispatch", dispatch_beside_others)
    assert phase(first.admit(step, item=f"0:{item}")) == "Succeeded"
    assert answers == ["Pending", "Succeeded", "Succeeded", "Succeeded"]
