"""What follows from the end of a finished attempt, and is written again after a crash in between."""

import pytest
from support.fakes.argo_workflow import RUN, ArgoWorkflow, bare, claim_of, end_of, ungated
from support.fakes.counting_store import CountingStore
from support.fakes.memory_store import MemoryStore
from support.processes.failpoints import dying_at

from tiphys.recording.derived_records import write_derived_records
from tiphys.records import MemoRecord
from tiphys.store import RunLayout, memo_key, read_record
from tiphys.store.layout import parse_listed_key

DONE = RunLayout(RUN).done_markers


def finished(store: MemoryStore, **fields: object) -> ArgoWorkflow:
    """A step that has succeeded and is not recorded."""
    flow = ArgoWorkflow(store, [ungated(**fields)])
    flow.start()
    flow.finish(parameters={"rows": "3"}, artifacts={"data": {"a": b"1", "b": b"2"}})
    return flow


def markers(store: MemoryStore) -> list[str]:
    return [info.key for info in store.list(DONE)]


def test_projection_names_the_listing_of_the_outputs(store):
    flow = finished(store)
    flow.record()
    (marker,) = markers(store)
    listed = parse_listed_key(marker)
    assert listed is not None
    assert listed[:2] == ("prep", 1)
    first, *others = [finished(MemoryStore()) for _ in range(3)]
    first.record()
    assert markers(first.store) == [marker], "it depends on nothing else"
    for other in others:
        other.store.objects[f"{other.folder()}data/a"] = b"3"
        other.record()
        assert markers(other.store) != [marker]


def test_projection_is_written_once(store):
    flow = finished(store)
    flow.record()
    before = dict(store.objects)
    write_derived_records(store, flow.specs[0], end_of(flow))
    assert store.objects == before
    counting = CountingStore(store)
    write_derived_records(counting, flow.specs[0], end_of(flow))
    assert dict(counting.requests) == {"list": 1}


def test_result_whose_object_has_vanished_gets_no_projection(store):
    flow = finished(store)
    with dying_at("record.after_end"):
        flow.record()
    store.delete(f"{flow.folder()}data/a")
    flow.record()
    assert markers(store) == []
    assert end_of(flow).outcome == "done", "the end decides"


@pytest.mark.parametrize(
    ("point", "left"),
    [
        ("record.before_claim", (False, False, 0)),
        ("record.after_claim", (True, False, 0)),
        ("record.before_end", (True, False, 0)),
        ("record.after_end", (True, True, 0)),
        ("conclude.after_projection", (True, True, 1)),
    ],
)
def test_recorder_that_dies_leaves_the_rest_to_the_next(store, point, left):
    flow = finished(store, share=True)
    with dying_at(point):
        flow.record()
    assert (flow.claim() is not None, flow.end() is not None, len(markers(store))) == left
    claimed = flow.claim()
    flow.record()
    assert end_of(flow).outcome == "done"
    assert claimed in (None, flow.claim())
    assert flow.claim(attempt=2) is None
    assert len(markers(store)) == 1
    memo = read_record(store, memo_key(claim_of(flow).step_key), MemoRecord)
    assert (memo.run, memo.step, memo.attempt) == (RUN, "prep", 1)


@pytest.mark.parametrize("point", ["record.after_end", "conclude.after_projection"])
def test_recorder_that_lives_on_after_an_error_writes_the_rest_itself(store, point):
    flow = finished(store, share=True)
    recorder = flow.recorder()
    with dying_at(point):
        flow.record(recorder)
    flow.record(recorder)
    assert len(markers(store)) == 1
    assert list(store.list("control/memo/"))


def test_result_is_shared_only_if_the_author_says_so(store):
    finished(store).record()
    assert list(store.list("control/memo/")) == []


def test_first_shared_result_of_a_key_stands(store):
    flow = ArgoWorkflow(store, [bare("one", template="t", share=True), bare("two", template="t", share=True)])
    for step in ("one", "two"):
        flow.finish(flow.start(step))
        flow.record()
    (memo,) = store.list("control/memo/")
    assert read_record(store, memo.key, MemoRecord).step == "one"


def test_step_that_failed_shares_nothing_and_has_no_projection(store):
    flow = ArgoWorkflow(store, [bare(share=True)])
    flow.start()
    flow.fail(exit_code=1)
    flow.record()
    flow.record()
    assert markers(store) == list(store.list("control/memo/")) == []
