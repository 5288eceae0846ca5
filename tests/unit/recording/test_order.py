"""The key of a step holds the hashes of what it takes, so the step that made it is recorded first.

That holds whether the nodes of both are seen one after the other or at once, while outputs are being hashed, and where
tasks that nobody records lie between the two.
"""

import itertools
from collections.abc import Mapping, Sequence

import pytest
from support.fakes.argo_workflow import ArgoWorkflow, bare, claim_of, end_of, ungated
from support.fakes.memory_store import MemoryStore

from tiphys.records import AttemptEndOutcome
from tiphys.store import ObjectInfo
from tiphys.store.outputs import hash_object


def take(flow: ArgoWorkflow, place: str, step: str = "check") -> None:
    """Start ``step``, which takes the artifact of a pod."""
    flow.start(step, artifacts=[{"name": "data", "path": "/in", "s3": {"key": f"{flow.folder(place)}data"}}])


def finished(flow: ArgoWorkflow, data: bytes = b"1,2,3", place: str = "prep") -> None:
    flow.finish(flow.start(place), parameters={}, artifacts={"data": data})


def pair(uid: str = "uid-1", **changes: Sequence[object]) -> ArgoWorkflow:
    """Two steps, the second of which takes what the first made."""
    specs = [ungated(parameters=()), *changes.pop("between", ()), bare("check")]
    depends = {"check": "prep.Succeeded && (plain || prep)"}
    return ArgoWorkflow(MemoryStore(), specs, **{"depends": depends, "uid": uid, **changes})


def key_when_seen_in_turn() -> str:
    flow = pair()
    recorder = flow.recorder()
    flow.start()
    flow.record(recorder)
    flow.finish(artifacts={"data": b"1,2,3"})
    flow.record(recorder)
    take(flow, "prep")
    flow.record(recorder)
    return claim_of(flow, "check").step_key


def test_consumer_and_producer_that_are_seen_at_once_have_the_keys_of_those_seen_in_turn():
    flow = pair()
    finished(flow)
    take(flow, "prep")
    flow.finish("check")
    flow.record()
    assert claim_of(flow, "check").step_key == key_when_seen_in_turn()


def test_key_holds_the_content_and_not_the_place():
    flow = pair("uid-9")
    finished(flow)
    take(flow, "prep")
    flow.record()
    assert claim_of(flow, "check").step_key == key_when_seen_in_turn(), "another pod of another Workflow"
    other = pair()
    finished(other, b"4,5,6")
    take(other, "prep")
    other.record()
    assert claim_of(other, "check").step_key != key_when_seen_in_turn()
    assert claim_of(other, "check").dataset != claim_of(flow, "check").dataset


class SlowHasher:
    """Hashes in the background, as the plugin does: the first calls for a job have no answer."""

    def __init__(self, store: MemoryStore, calls: int) -> None:
        self.store, self.calls, self.jobs = store, calls, list[str]()

    def __call__(self, job: str, objects: Sequence[ObjectInfo]) -> Mapping[str, str] | None:
        self.jobs.append(job)
        if self.jobs.count(job) <= self.calls:
            return None
        return {info.key: hash_object(self.store, info.key) for info in objects}


@pytest.mark.parametrize("between", [False, True])
def test_consumer_is_not_claimed_while_what_it_takes_is_being_hashed(between):
    gated = bare("plain", gate=True)
    flow = pair(between=[gated], depends={"plain": "prep", "check": "plain"}) if between else pair()
    flow.specs = [*flow.specs, ungated("other", parameters=())]
    recorder, hasher = flow.recorder(), SlowHasher(flow.store, 2)
    finished(flow)
    take(flow, "prep")
    flow.finish("check")
    flow.start("other")
    for _ in range(2):
        recorded = flow.record(recorder, hasher)
        assert (recorded.waiting, recorded.ends) == (("prep", "check"), {})
        assert flow.claim("check") is None
        assert flow.claim("other") is not None, "it takes nothing from the others"
    recorded = flow.record(recorder, hasher)
    assert (recorded.waiting, set(recorded.ends)) == ((), {"prep", "check"})
    assert claim_of(flow, "check").step_key == key_when_seen_in_turn()
    assert hasher.jobs == [flow.folder()] * 3


def test_consumer_that_was_claimed_before_is_ended_while_others_are_being_hashed():
    flow = pair()
    flow.specs = [*flow.specs, ungated("sweep", parameters=(), fan_out=True)]
    flow.depends = {"check": "sweep.AnySucceeded"}
    recorder, hasher = flow.recorder(), SlowHasher(flow.store, 1)
    flow.finish(flow.start_item("sweep", 0, "a"), artifacts={"data": b"a"})
    flow.record(recorder)
    flow.start("check")
    flow.record(recorder)
    flow.finish(flow.start_item("sweep", 1, "b"), artifacts={"data": b"b"})
    flow.finish("check")
    recorded = flow.record(recorder, hasher)
    assert recorded.waiting == ("sweep(1:b)",)
    assert recorded.ends["check"].outcome is AttemptEndOutcome.DONE


def test_long_chain_that_is_seen_at_once_is_recorded_in_one_call():
    names = [f"step-{number}" for number in range(12)]
    specs = [ungated(name, parameters=()) for name in reversed(names)]
    depends = {after: f"{before}.Succeeded || {before}.Failed" for before, after in itertools.pairwise(names)}
    flow = ArgoWorkflow(MemoryStore(), specs, depends)
    flow.start(names[0])
    flow.finish(names[0], artifacts={"data": b"0"})
    for before, after in itertools.pairwise(names):
        take(flow, before, after)
        flow.finish(after, artifacts={"data": b"0"})
    flow.nodes = dict(reversed(flow.nodes.items()))
    recorded = flow.record()
    assert set(recorded.ends) == set(names)
    assert len({claim_of(flow, name).dataset for name in names[1:]}) == 1, "each takes the same bytes"


def test_steps_with_dependencies_of_the_older_kind_are_in_order_too():
    flow = pair(depends={})
    recorder = flow.recorder()
    (entry, *_) = recorder.binding.pipeline.manifest["spec"]["templates"]
    next(task for task in entry["dag"]["tasks"] if task["name"] == "check")["dependencies"] = ["prep"]
    finished(flow)
    take(flow, "prep")
    flow.record(recorder)
    assert claim_of(flow, "check").step_key == key_when_seen_in_turn()


def test_circle_of_tasks_that_argo_never_runs_stops_no_recorder():
    flow = pair(depends={"prep": "check", "check": "prep"})
    finished(flow)
    assert flow.record().ends["prep"].outcome is AttemptEndOutcome.DONE


def test_producer_without_a_result_leaves_the_place_in_the_key():
    flow = pair()
    finished(flow)
    flow.store.delete(f"{flow.folder()}data")
    take(flow, "prep")
    flow.record()
    assert end_of(flow).outcome is AttemptEndOutcome.FAILED
    assert claim_of(flow, "check").step_key != key_when_seen_in_turn()


def test_producer_that_cannot_be_recorded_does_not_hold_its_consumer():
    flow = pair()
    finished(flow)
    take(flow, "prep")
    flow.store.create("control/runs/digits/attempts/prep/000000001.json", b"{}")
    recorded = flow.record()
    assert (set(recorded.faults), recorded.waiting) == ({"prep"}, ())
    assert flow.claim("check") is not None
