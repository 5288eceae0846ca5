"""What is in the key of a step, and how it knows an artifact.

| input artifact                                                    | known by      |
|-------------------------------------------------------------------|---------------|
| of a finished attempt, below ``data/runs/``                       | its hashes    |
| of the pod of a finished attempt, below ``data/workflows/``       | its hashes    |
| of an attempt or a pod that has no result, or of none             | its place     |
| in another bucket, of another kind, or without a place            | its place     |
"""

from typing import Any

import pytest
from support.builders.compiled_workflows import History
from support.fakes.argo_workflow import RUN, ArgoWorkflow, bare, claim_of, ungated
from support.fakes.counting_store import CountingStore
from support.fakes.memory_store import MemoryStore

from tiphys.protocol.step_spec import StepSpec
from tiphys.recording.step_key import (
    StepInputs,
    StepKey,
    compute_step_key,
    find_end_of_output,
    workflow_parameters_used,
)
from tiphys.records import AttemptEnd, AttemptEndOutcome, DataVersion
from tiphys.store import RunLayout, Store
from tiphys.store.workflow_layout import OutputOrigin, output_origin

PLAIN = bare("check")


def key_of(
    spec: StepSpec = PLAIN,
    store: Store | None = None,
    parameters: dict[str, str] | None = None,
    *artifacts: dict[str, Any],
    item: str = "",
) -> StepKey:
    return compute_step_key(store or MemoryStore(), spec, StepInputs(parameters or {}, artifacts, item))


def taken(store: Store, *keys: str, **fields: Any) -> StepKey:
    """The key of a step that takes the objects below ``keys``."""
    artifacts = [{"name": f"in-{index}", "s3": {"key": key}, **fields} for index, key in enumerate(keys)]
    return key_of(PLAIN, store, {}, *artifacts)


def finished_pod(store: MemoryStore, data: Any = b"1,2,3", uid: str = "uid-1") -> str:
    """Key of the artifact that a recorded pod has made."""
    flow = ArgoWorkflow(store, [ungated(parameters=())], uid=uid)
    flow.start()
    flow.finish(artifacts={"data": data})
    flow.record()
    return f"{flow.folder()}data"


CHANGES: dict[str, tuple[StepSpec, dict[str, str], str]] = {
    "nothing": (PLAIN, {}, ""),
    "program": (bare("check", template="t-other"), {}, ""),
    "value": (PLAIN, {"lr": "0.1"}, ""),
    "other value": (PLAIN, {"lr": "0.2"}, ""),
    "value of the workflow": (PLAIN, {"workflow.parameters.lr": "0.1"}, ""),
    "declared parameter": (bare("check", parameters=("rows",)), {}, ""),
    "declared artifact": (bare("check", artifacts=("rows",)), {}, ""),
    "item": (bare("check", fan_out=True), {}, "a"),
    "other item": (bare("check", fan_out=True), {}, "b"),
    "empty item": (bare("check", fan_out=True), {}, ""),
    "data": (bare("check", data=(DataVersion(name="x", algorithm="md5", digest="1"),)), {}, ""),
}


def test_the_key_changes_with_everything_that_determines_the_outputs():
    keys = [key_of(spec, None, parameters, item=item).key for spec, parameters, item in CHANGES.values()]
    assert len(set(keys)) == len(CHANGES)


@pytest.mark.parametrize(
    "spec",
    [
        bare("another", template=PLAIN.template),
        bare("check", cache=False, share=True),
        bare("check", grace_seconds=5),
        bare("check", gate=True),
        bare("check", suffixes={"report": ".html"}),
    ],
)
def test_settings_that_change_no_output_do_not_change_the_key(spec):
    assert key_of(spec) == key_of(PLAIN)


def test_order_and_spelling_do_not_change_the_key(store):
    assert key_of(PLAIN, None, {"a": "1", "b": "2"}) == key_of(PLAIN, None, {"b": "2", "a": "1"})
    fanned = bare("check", fan_out=True)
    assert key_of(fanned, item='{"b": 1.0, "a": 2}') == key_of(fanned, item='{"a":2,"b":1}')
    first, second = ({"name": name, "s3": {"key": f"raw/{name}"}} for name in "ab")
    assert key_of(PLAIN, store, {}, first, second) == key_of(PLAIN, store, {}, second, first)


def test_item_of_a_step_that_is_not_fanned_out_does_not_count():
    assert key_of(PLAIN, item="a") == key_of(PLAIN)


def test_hashes_of_parameters_and_data_are_apart(store):
    changed = key_of(PLAIN, store, {"lr": "0.1"})
    assert (changed.parameters != key_of().parameters, changed.dataset) == (True, "")
    moved = taken(store, "raw/1")
    assert (moved.parameters, bool(moved.dataset)) == (key_of().parameters, True)


def test_artifact_of_a_pod_is_known_by_its_content(store):
    elsewhere, changed = MemoryStore(), MemoryStore()
    one, same, other = finished_pod(store), finished_pod(elsewhere, uid="uid-2"), finished_pod(changed, b"4")
    assert one != same
    assert taken(store, one) == taken(elsewhere, same)
    assert one == other
    assert taken(store, one) != taken(changed, other)


def test_artifact_of_a_pod_and_of_an_attempt_with_the_same_bytes_are_the_same(store):
    in_pod = finished_pod(store)
    history = History(store, "other")
    history.done("prep", artifacts={"data": b"1,2,3"})
    of_attempt = RunLayout("other").outputs("prep", 1) + "artifacts/data"
    assert taken(store, in_pod) == taken(store, of_attempt)


@pytest.mark.parametrize("suffix", ["", "/"])
def test_folder_is_known_by_its_files_and_their_content(suffix):
    files = {"a.csv": b"1", "more/b.csv": b"2"}
    stores = [MemoryStore() for _ in range(4)]
    contents = [files, dict(reversed(files.items())), {**files, "more/b.csv": b"3"}, {"a.csv": b"1", "b.csv": b"2"}]
    keys = [
        taken(store, finished_pod(store, data, f"uid-{number}") + suffix).key
        for number, (store, data) in enumerate(zip(stores, contents, strict=True))
    ]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


def test_file_within_a_folder_is_known_by_its_content():
    first, second = MemoryStore(), MemoryStore()
    one = finished_pod(first, {"a": b"1", "b": b"2"})
    two = finished_pod(second, {"a": b"1", "b": b"3"}, "uid-2")
    assert taken(first, f"{one}/a") == taken(second, f"{two}/a")
    assert taken(first, f"{one}/b") != taken(second, f"{two}/b")
    assert taken(first, one[:-1]) != taken(second, two[:-1]), "no part of a name"


def test_object_that_no_record_lists_is_known_by_its_place(store):
    key = finished_pod(store)
    unlisted = f"{key}-2"
    store.create(unlisted, b"1,2,3")
    assert taken(store, unlisted) != taken(store, key)
    assert taken(store, unlisted) == taken(MemoryStore(), unlisted)


def test_artifact_of_a_pod_without_a_result_is_known_by_its_place(store):
    flow = ArgoWorkflow(store, [ungated(parameters=())])
    flow.start()
    flow.record()
    key = f"{flow.folder()}data"
    assert find_end_of_output(store, key) is None
    assert taken(store, key) == taken(MemoryStore(), key)
    flow.fail(exit_code=1)
    flow.record()
    store.create(output_origin("uid-1", OutputOrigin(flow.pod(), RUN, "prep", 1)), b"")
    end = find_end_of_output(store, key)
    assert end is not None
    assert end.outcome is AttemptEndOutcome.FAILED
    assert taken(store, key) == taken(MemoryStore(), key)


@pytest.mark.parametrize(
    "rest",
    [
        "digits/prep",
        "digits/prep/1",
        "digits/prep/000000001/more",
        "digits/prep/00000001x",
        "other/prep/000000001",
    ],
)
def test_origin_that_names_no_attempt_is_none(store, rest):
    store.create(f"control/workflows/uid-1/pod-1/{rest}", b"")
    assert find_end_of_output(store, "data/workflows/uid-1/pod-1/data") is None
    assert taken(store, "data/workflows/uid-1/pod-1/data").dataset


def test_pod_whose_name_begins_like_another_is_another(store):
    key = finished_pod(store)
    pod = key.split("/")[3]
    assert find_end_of_output(store, f"data/workflows/uid-1/{pod[:-1]}/data") is None
    assert find_end_of_output(store, f"data/workflows/uid-1/{pod}0/data") is None
    assert find_end_of_output(store, f"data/workflows/uid-11/{pod}/data") is None
    assert find_end_of_output(store, key) is not None


@pytest.mark.parametrize(
    "kind", [{"s3": ("bucket", "key")}, {"gcs": ("bucket", "key")}, {"azure": ("container", "blob")}]
)
def test_same_key_in_another_bucket_is_another_artifact(store, kind):
    key = finished_pod(store)
    ((name, (bucket, place)),) = kind.items()
    own = key_of(PLAIN, store, {}, {"name": "in", name: {place: key}})
    elsewhere = key_of(PLAIN, store, {}, {"name": "in", name: {bucket: "elsewhere", place: key}})
    assert own == key_of(PLAIN, store, {}, {"name": "in", "s3": {"key": key}})
    assert elsewhere != own
    assert elsewhere == key_of(PLAIN, MemoryStore(), {}, {"name": "in", name: {bucket: "elsewhere", place: key}})


@pytest.mark.parametrize("location", [{}, {"raw": {"data": "1"}}, {"git": {"repo": "r", "revision": "v1"}}, {"s3": {}}])
def test_artifact_in_no_bucket_is_known_by_its_place(store, location):
    first = key_of(PLAIN, store, {}, {"name": "in", "path": "/a", **location})
    assert first == key_of(PLAIN, store, {}, {"name": "in", "path": "/b", "mode": 420, "optional": True, **location})
    assert first != key_of(PLAIN, store, {}, {"name": "in", "http": {"url": "https://example.org"}})


def test_place_outside_the_store_is_a_place(store):
    store.from_artifact_key = lambda key: None
    assert taken(store, "elsewhere/x").dataset


def test_artifact_costs_two_reads_at_most(store):
    key = finished_pod(store)
    counting = CountingStore(store)
    taken(counting, key)
    assert dict(counting.requests) == {"list": 1, "read": 1}
    counting.requests.clear()
    taken(counting, "raw/1")
    assert not counting.requests


def test_recorded_key_is_that_of_its_inputs(store):
    flow = ArgoWorkflow(store, [bare("sweep", fan_out=True)], parameters={"lr": "0.1", "unused": "x"})
    flow.templates = {"sweep": {"container": {"image": "python:3.12", "args": ["{{workflow.parameters.lr}}"]}}}
    flow.start_item("sweep", 0, "a", parameters={"rows": "3"})
    flow.record()
    (key,) = [info.key for info in store.list(RunLayout(RUN).items(1))]
    step = key.rpartition("/")[2].removesuffix(".json")
    inputs = {"rows": "3", "workflow.parameters.lr": "0.1"}
    expected = key_of(bare("sweep", fan_out=True), store, inputs, item="a")
    claim = claim_of(flow, step)
    assert (claim.step_key, claim.parameters, claim.dataset) == tuple(expected)


def test_run_and_submission_are_no_inputs_of_a_program():
    part = {
        "args": ["{{workflow.parameters.lr}}", "{{workflow.parameters.tiphys-run}}", "{{inputs.parameters.x}}"],
        "env": [{"name": "A", "value": "{{ workflow.parameters.a }}-{{workflow.parameters.lr}}"}],
        "script": "{{=workflow.parameters.b}} {{workflow.name}} {{workflow.parameters.tiphys-submission}}",
    }
    assert workflow_parameters_used(part) == ["a", "b", "lr"]


def test_end_of_an_output_is_that_of_its_attempt(store):
    key = finished_pod(store)
    end = find_end_of_output(store, key)
    assert isinstance(end, AttemptEnd)
    assert (end.run, end.step, end.attempt) == (RUN, "prep", 1)
    for other in ("", "control/runs/digits/run.json", "data/workflows/uid-1", "data/workflows/uid-1/pod", "data/x"):
        assert find_end_of_output(store, other) is None
