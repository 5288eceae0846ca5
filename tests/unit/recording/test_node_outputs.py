"""Which outputs of a node that succeeded make a result, and the fault of those that make none.

A tenant may write the nodes of a Workflow. Only what lies below the uid of the same Workflow can be its output.
"""

import hashlib

import pytest
from support.fakes.argo_workflow import ArgoWorkflow, bare, end_of, ungated
from support.fakes.counting_store import CountingStore
from support.fakes.memory_store import MemoryStore

from tiphys.errors import ObjectMissingError, StoreError
from tiphys.recording import node_outputs
from tiphys.records import AttemptEnd, AttemptEndOutcome, Cause
from tiphys.store import find_output_fault, list_outputs

ROWS = {"rows": "3"}


@pytest.fixture
def flow() -> ArgoWorkflow:
    return ArgoWorkflow(MemoryStore(), [ungated()])


def missing(flow: ArgoWorkflow) -> str:
    """Record; the message of a result that is missing."""
    recorded = flow.record()
    end = end_of(flow)
    assert recorded.refuted == {"prep"}
    assert (end.outcome, end.cause, end.exit_code, end.outputs) == (
        *(AttemptEndOutcome.FAILED, Cause.OUTPUT_MISSING, 0),
        (),
    )
    assert not list(flow.store.list("control/workflows/")), "no attempt has these outputs"
    assert not list(flow.store.list("control/runs/digits/done/"))
    return end.message


def reported(flow: ArgoWorkflow, **artifact: object) -> None:
    """The pod succeeded and reported this artifact."""
    flow.start()
    values = [{"name": "rows", "value": "3"}]
    flow.succeed("prep", {"parameters": values, "artifacts": [{"name": "data", **artifact}], "exitCode": "0"})


def intact(flow: ArgoWorkflow, end: AttemptEnd) -> bool:
    return find_output_fault(end, list_outputs(flow.store, end)) is None


def test_artifact_has_the_hashes_of_its_objects(flow):
    flow.start()
    flow.finish(parameters=ROWS, artifacts={"data": b"1,2,3"})
    flow.record()
    (_, data) = end_of(flow).outputs
    (stored,) = data.objects
    assert (stored.key, stored.size) == (f"{flow.folder()}data", 5)
    assert stored.sha256 == hashlib.sha256(b"1,2,3").hexdigest()
    assert stored.version
    assert intact(flow, end_of(flow))
    listed = {key: info._replace(version="") for key, info in list_outputs(flow.store, end_of(flow)).items()}
    assert find_output_fault(end_of(flow), listed) is None, "another store may keep nothing about the bytes"


def test_folder_is_an_artifact_with_all_its_files_and_no_others(flow):
    flow.start()
    flow.finish(parameters=ROWS, artifacts={"data": {"a.csv": b"1", "more/b.csv": b"2"}})
    for other in ("data-2", "data.log", "other/c.csv"):
        flow.store.create(f"{flow.folder()}{other}", b"3")
    flow.record()
    (_, data) = end_of(flow).outputs
    assert data.directory
    assert [one.key.removeprefix(data.key) for one in data.objects] == ["/a.csv", "/more/b.csv"]
    assert intact(flow, end_of(flow))


def test_final_slash_of_a_folder_makes_no_other_key(flow):
    flow.start()
    flow.store.create(f"{flow.folder()}data/a.csv", b"1")
    reported(flow, s3={"key": f"{flow.folder()}data/"})
    flow.record()
    assert end_of(flow).outputs[1].key == f"{flow.folder()}data"


def test_empty_file_is_an_output(flow):
    flow.start()
    flow.finish(parameters={"rows": ""}, artifacts={"data": b""})
    flow.record()
    assert [one.value for one in end_of(flow).outputs] == ["", None]


def test_step_without_artifacts_lists_and_reads_no_objects():
    store = MemoryStore()
    counting = CountingStore(store)
    flow = ArgoWorkflow(store, [ungated(artifacts=())])
    recorder = flow.recorder(counting)
    flow.start()
    flow.record(recorder)
    flow.finish(parameters=ROWS)
    counting.requests.clear()
    flow.record(recorder)
    assert end_of(flow).outputs_prefix == ""
    assert intact(flow, end_of(flow))
    assert dict(counting.requests) == {"create": 2, "list": 1}, "the end, and its projection if there is none"


def test_output_that_was_not_declared_is_no_result(flow):
    flow.start()
    flow.finish(parameters={**ROWS, "more": "1"}, artifacts={"data": b"x", "other": b"y"})
    flow.record()
    assert [one.name for one in end_of(flow).outputs] == ["rows", "data"]


def test_parameter_that_argo_does_not_report_is_missing(flow):
    flow.start()
    flow.finish(artifacts={"data": b"x"})
    assert missing(flow) == "declared output parameter 'rows' is missing in Argo's node"


def test_artifact_that_argo_does_not_report_is_missing(flow):
    flow.start()
    flow.finish(parameters=ROWS)
    assert missing(flow) == "declared output artifact 'data' is missing in Argo's node"


def test_artifact_whose_object_is_gone_is_missing(flow):
    flow.start()
    flow.finish(parameters=ROWS, artifacts={"data": b"x"})
    flow.store.delete(f"{flow.folder()}data")
    assert missing(flow).startswith("declared output artifact 'data' is missing: the program ended well")


def test_artifact_that_vanishes_while_it_is_hashed_is_missing(flow):
    def hash_objects(_, objects):
        raise ObjectMissingError(f"memory:// has no object {objects[0].key}")

    flow.start()
    flow.finish(parameters=ROWS, artifacts={"data": b"x"})
    flow.record(hash_objects=hash_objects)
    assert end_of(flow).cause is Cause.OUTPUT_MISSING


OWN = "data/workflows/uid-1/pod-1"


@pytest.mark.parametrize(
    "location",
    [
        {"s3": {"key": "data/runs/digits/outputs/prep/000000001/data"}},
        {"s3": {"key": "data/workflows/uid-2/pod-1/data"}},
        {"s3": {"key": "data/workflows/uid-11/pod-1/data"}},
        {"s3": {"key": "control/runs/digits/run.json"}},
        {"s3": {"key": f"{OWN}"}},
        {"s3": {"key": f"{OWN}/"}},
        {"s3": {"key": f"{OWN}/../../../../control/runs/digits/run.json"}},
        {"s3": {"key": f"{OWN}//data"}},
        {"s3": {"key": f"/{OWN}/data"}},
        {"s3": {"key": f"{OWN}/{'x' * 2000}"}},
        {"s3": {"key": f"{OWN}/\0"}},
        {"s3": {"key": ""}},
        {"s3": {"key": f"{OWN}/data", "bucket": "elsewhere"}},
        {"gcs": {"key": f"{OWN}/data", "bucket": "elsewhere"}},
        {"azure": {"blob": f"{OWN}/data", "container": "elsewhere"}},
        {"s3": {}},
        {"s3": f"{OWN}/data"},
        {"s3": [f"{OWN}/data"]},
        {"raw": {"data": "1,2,3"}},
        {"http": {"url": f"https://example.org/{OWN}/data"}},
        {},
    ],
)
def test_artifact_elsewhere_is_no_output_of_this_workflow(flow, location):
    for key in (f"{OWN}/data", "data/workflows/uid-2/pod-1/data", "data/runs/digits/outputs/prep/000000001/data"):
        flow.store.create(key, b"1,2,3")
    reported(flow, **location)
    recorded = flow.record()
    assert (recorded.faults, recorded.refuted) == ({}, {"prep"})
    assert end_of(flow).cause is Cause.OUTPUT_MISSING
    assert not list(flow.store.list("control/workflows/"))


def test_place_of_another_store_names_what_to_do(flow):
    reported(flow, s3={"key": f"other/{OWN}/data"})
    flow.store.from_artifact_key = lambda key: None  # a store with a prefix that the key does not have
    flow.record()
    assert end_of(flow).message == (
        f"output artifact 'data' is at other/{OWN}/data, which is no place for outputs of this Workflow in memory://; "
        "compile the pipeline with --store memory://"
    )


def test_artifacts_of_two_pods_are_no_result_of_one():
    flow = ArgoWorkflow(MemoryStore(), [bare(artifacts=("a", "b"))])
    flow.start()
    keys = {name: f"data/workflows/uid-1/pod-{name}/out" for name in "ab"}
    for key in keys.values():
        flow.store.create(key, b"x")
    artifacts = [{"name": name, "s3": {"key": key}} for name, key in keys.items()]
    flow.succeed("prep", {"artifacts": artifacts})
    flow.record()
    assert end_of(flow).message == "output artifact 'b' is of another pod than the others"


def test_try_that_failed_gives_no_outputs():
    """A program may write its outputs and then fail: the retry writes its own, below another pod."""
    flow = ArgoWorkflow(MemoryStore(), [ungated()])
    flow.start(attempt=0)
    flow.store.create(f"{flow.folder('prep(0)')}data", b"half")
    flow.fail("prep(0)", exit_code=1)
    flow.finish(flow.start(attempt=1), parameters=ROWS, artifacts={"data": b"whole"})
    flow.record()
    (stored,) = end_of(flow).outputs[1].objects
    assert flow.store.read(stored.key) == b"whole"


@pytest.mark.parametrize(("characters", "is_kept"), [(64 << 10, True), ((64 << 10) + 1, False)])
def test_value_is_kept_up_to_what_a_workflow_holds(characters, is_kept):
    flow = ArgoWorkflow(MemoryStore(), [ungated(artifacts=())])
    flow.start()
    flow.finish(parameters={"rows": "x" * characters})
    flow.record()
    end = end_of(flow)
    assert (end.outcome is AttemptEndOutcome.DONE) is is_kept
    if not is_kept:
        assert end.cause is Cause.USER_ERROR
        assert end.message.startswith("output parameter 'rows' has 65537 bytes, at most 65536 fit in a Workflow")


def test_size_of_a_value_is_that_of_its_bytes():
    flow = ArgoWorkflow(MemoryStore(), [ungated(artifacts=())])
    flow.start()
    flow.finish(parameters={"rows": "ééé"})
    flow.record(flow.recorder(parameter_max_bytes=5))
    assert "has 6 bytes, at most 5" in end_of(flow).message


def test_result_of_more_files_than_a_record_lists_is_refused(flow, monkeypatch):
    monkeypatch.setattr(node_outputs, "_MAX_RECORDED_BYTES", 700)
    monkeypatch.setattr(node_outputs, "_MAX_LISTED_OBJECTS", 3)
    flow.start()
    flow.finish(parameters=ROWS, artifacts={"data": {str(number): b"x" for number in range(50)}})
    flow.record()
    end = end_of(flow)
    assert (end.cause, end.outputs) == (Cause.USER_ERROR, ())
    assert end.message.startswith("its outputs have 3 files, more than the record of a result can list")


def test_program_that_wrote_millions_of_files_costs_no_memory_for_each(flow):
    most = node_outputs._MAX_LISTED_OBJECTS
    assert most * node_outputs._RECORDED_OBJECT_BYTES <= node_outputs._MAX_RECORDED_BYTES
    assert (most + 1) * node_outputs._RECORDED_OBJECT_BYTES > node_outputs._MAX_RECORDED_BYTES
    flow.start()
    flow.finish(parameters=ROWS, artifacts={"data": b"x"})
    seen = 0
    listing = flow.store.list

    def list_many(prefix):
        nonlocal seen
        (row,) = listing(prefix)
        for number in range(10**9):
            seen += 1
            yield row._replace(key=f"{row.key}/{number:09d}")

    flow.store.list = lambda prefix: list_many(prefix) if prefix == flow.folder() else listing(prefix)
    flow.record()
    assert end_of(flow).cause is Cause.USER_ERROR
    assert seen <= most


def test_storage_that_does_not_answer_ends_nothing(flow):
    flow.start()
    flow.finish(parameters=ROWS, artifacts={"data": b"x"})
    recorder = flow.recorder()
    flow.store.refuses = lambda operation, key: operation == "read" and key.startswith("data/")
    with pytest.raises(StoreError, match="read of data/workflows/uid-1"):
        flow.record(recorder)
    assert flow.end() is None
    flow.store.refuses = lambda operation, key: False
    flow.record(recorder)
    assert end_of(flow).outcome == "done"


def test_pod_of_a_result_names_its_attempt(flow):
    flow.start()
    flow.finish(parameters=ROWS, artifacts={"data": b"x"})
    flow.record()
    origin = f"control/workflows/uid-1/{flow.pod()}/digits/prep/000000001"
    assert [info.key for info in flow.store.list("control/workflows/")] == [origin]
    assert flow.store.read(origin) == b""
