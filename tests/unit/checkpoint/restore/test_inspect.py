"""What two checkpoints differ in, as the writer stored them."""

import json
import math
from collections import OrderedDict

import numpy as np
import pytest
from support.builders.lineage import ref
from support.fakes.memory_store import MemoryStore
from support.stories.sessions import open_session

from tiphys.checkpoint.restore import inspect
from tiphys.checkpoint.restore.inspect import (
    CheckpointContents,
    DifferenceKind,
    LeafDifference,
    StateLeaf,
    compare_checkpoints,
    compare_leaves,
    compare_values,
    compute_statistics,
)
from tiphys.checkpoint.state import shards
from tiphys.errors import IntegrityError, UsageError
from tiphys.lineage.validity import read_manifest


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 100)


def saved(*states, **facts) -> MemoryStore:
    """Checkpoints 1, 2, … of attempt 1."""
    store = MemoryStore()
    with open_session(store) as session:
        for step, state in enumerate(states, start=1):
            session.save(step, state, metrics={"loss": 1 / step}, epoch=step, **facts)
    return store


def of(store: MemoryStore, step: int) -> CheckpointContents:
    return CheckpointContents(store, read_manifest(store, ref(1, step)))


def compared(one, other, **options):
    store = saved(one, other)
    manifests = [(store, read_manifest(store, ref(1, step))) for step in (1, 2)]
    return compare_checkpoints(*manifests, **options)


def changes(one, other) -> list[tuple[str, str]]:
    return [(change.path, change.kind.value) for change in compared(one, other).changes]


def test_every_leaf_is_named_with_its_form():
    state = {
        "step": 3,
        "layers": [np.zeros((2, 3), dtype=np.float32), np.zeros(2, dtype=bool)],
        "pair": (1.5, "text"),
        "empty": {},
        "turned": np.asfortranarray(np.ones((2, 3))),
        "date": np.array(["2026-01-01"], dtype="datetime64[D]"),
        "scalar": np.float64(2.0),
    }
    leaves = {path: leaf.form for path, leaf in of(saved(state), 1).leaves.items()}
    assert leaves == {
        "state.step": "3",
        "state.layers.0": "float32[2, 3]",
        "state.layers.1": "bool[2]",
        "state.pair.0": "1.5",
        "state.pair.1": '"text"',
        "state.empty": '{"dict": []}',
        "state.turned": "float64[2, 3] in Fortran order",
        "state.date": "<M8[D][1]",
        "state.scalar": "float64 2.0",
    }


def test_shared_values_and_views_are_named_by_the_first_path():
    flat, history = np.arange(4, dtype=np.float32), [1]
    state = {
        "flat": flat,
        "bias": flat[3:],
        "every_second": np.arange(6.0)[::2],
        "history": history,
        "again": history,
        "named": OrderedDict([(None, 1)]),
    }
    found = of(saved(state), 1)
    assert {path: leaf.form for path, leaf in found.leaves.items()} == {
        "state.flat": "float32[4]",
        "state.bias": "float32[1] at byte 12 of state.flat",
        "state.every_second": "float64[3] with strides [16]",
        "state.history.0": "1",
        "state.again": "the same as state.history",
        "state.named.null": "1",
    }
    np.testing.assert_array_equal(found.read_array("state.every_second"), [0, 2, 4])


def test_numbers_come_back_as_they_were_saved_also_from_several_shards():
    arrays = {
        "large": np.arange(1000, dtype=np.float32).reshape(10, 100),
        "turned": np.asfortranarray(np.arange(60.0).reshape(6, 10)),
        "none": np.zeros((0, 3)),
    }
    found = of(saved(arrays), 1)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found.read_array(f"state.{name}"), array)


def test_an_array_that_is_in_two_places_is_a_leaf_of_both():
    shared = np.ones(3)
    leaves = of(saved({"a": shared, "b": shared}), 1).leaves
    assert leaves["state.a"].sha256 == leaves["state.b"].sha256


def test_equal_states_do_not_differ_however_they_are_cut(monkeypatch):
    store = MemoryStore()
    state = {"weights": np.arange(500.0), "step": 1}
    with open_session(store) as session:
        session.save(1, state)
        monkeypatch.setattr(shards, "SHARD_BYTES", 1000)
        session.save(2, state)
    one, other = of(store, 1), of(store, 2)
    assert one.leaves == other.leaves


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"a": np.ones(3)}, {"a": np.ones(3)}, []),
        ({"a": np.ones(3)}, {"a": np.zeros(3)}, [("state.a", "value")]),
        ({"a": np.ones(3)}, {"a": np.ones(4)}, [("state.a", "form")]),
        ({"a": np.ones(3)}, {"a": np.ones(3, dtype=np.float32)}, [("state.a", "form")]),
        ({"a": np.ones(3)}, {"a": 1.0}, [("state.a", "form")]),
        ({"a": 1}, {"a": 2}, [("state.a", "value")]),
        ({"a": 1}, {"a": 1, "b": np.ones(3)}, [("state.b", "added")]),
        ({"a": 1, "b": 2}, {"a": 1}, [("state.b", "removed")]),
        ({"a": [1, 2]}, {"a": [1]}, [("state.a.1", "removed")]),
    ],
)
def test_a_change_between_checkpoints_is_reported_by_path(one, other, expected):
    assert changes(one, other) == expected


def test_facts_metrics_and_sizes_are_compared():
    found = compared({"a": np.ones(3)}, {"a": np.ones(300)})
    assert {pair.name: (pair.before, pair.after) for pair in found.facts} == {"global_step": (1, 2), "epoch": (1, 2)}
    assert [(pair.name, pair.before, pair.after) for pair in found.metrics] == [("loss", 1.0, 0.5)]
    assert found.size_bytes.after > found.size_bytes.before
    assert found.same == 0


def test_metrics_that_json_has_no_number_for_are_text_in_the_comparison():
    store = MemoryStore()
    with open_session(store) as session:
        for step, loss in enumerate((math.inf, math.nan), start=1):
            session.save(step, {}, metrics={"loss": loss})
    found = compare_checkpoints(*[(store, read_manifest(store, ref(1, step))) for step in (1, 2)])
    (pair,) = json.loads(json.dumps(found.model_dump(mode="json"), allow_nan=False))["metrics"]
    assert pair == {"name": "loss", "before": "inf", "after": "nan"}


def test_statistics_of_a_change_are_computed_on_request():
    one, other = {"a": np.array([3.0, 4.0]), "step": 1}, {"a": np.array([3.0, 9.0]), "step": 2}
    assert all(change.statistics is None for change in compared(one, other).changes)
    found = {change.path: change.statistics for change in compared(one, other, values=True).changes}
    assert found["state.step"] is None
    apart = found["state.a"]
    assert apart is not None
    assert (apart.changed, apart.total, apart.largest, apart.mean, apart.relative) == (1, 2, 5.0, 2.5, 1.0)


@pytest.mark.parametrize(
    ("one", "other", "changed", "largest", "not_finite"),
    [
        ([1, 2], [1, 2], 0, 0.0, 0),
        ([1, math.nan], [1, math.nan], 0, 0.0, 1),
        ([1.0, 2.0], [1.0, math.nan], 1, 0.0, 1),
        ([math.inf, 1.0], [math.inf, 3.0], 1, 2.0, 1),
        ([True, False], [True, True], 1, 1.0, 0),
        ([1j, 2], [1j, 2 + 3j], 1, 3.0, 0),
    ],
)
def test_numbers_that_are_none_are_counted_and_left_out(one, other, changed, largest, not_finite):
    found = compute_statistics(np.array(one), np.array(other))
    assert found is not None
    assert (found.changed, found.largest, found.not_finite) == (changed, largest, not_finite)


def test_text_has_no_distance():
    assert compute_statistics(np.array(["a"]), np.array(["b"])) is None
    assert compute_statistics(np.zeros(0), np.zeros(0)) is None


def test_growth_from_zero_has_an_infinite_relative_change():
    found = compute_statistics(np.zeros(2), np.ones(2))
    assert found is not None and found.relative == math.inf


def test_damaged_bytes_are_never_compared():
    store = saved({"a": np.arange(100.0)})
    key = max(key for key in store.objects if "shards/" in key)
    store.objects[key] = store.objects[key][:-1] + b"?"
    with pytest.raises(IntegrityError, match="the manifest says"):
        of(store, 1)


def test_a_state_of_another_framework_is_refused_by_name_and_its_facts_are_compared():
    store = saved({"a": 1}, {"a": 2})
    manifests = [(store, read_manifest(store, ref(1, step)).model_copy(update={"framework": "dcp"})) for step in (1, 2)]
    with pytest.raises(UsageError, match="'dcp'"):
        CheckpointContents(*manifests[0])
    found = compare_checkpoints(*manifests)
    assert (found.changes, found.note) == ((), "the states were written by dcp")
    assert found.facts


def test_ranks_have_leaves_of_their_own():
    store = saved({"a": np.ones(3)})
    manifest = read_manifest(store, ref(1, 1))
    second = [shard.model_copy(update={"rank": 1}) for shard in manifest.shards]
    both = manifest.model_copy(update={"shards": (*manifest.shards, *second)})
    assert set(CheckpointContents(store, both).leaves) == {"state.a", "rank 1: state.a"}


def test_comparing_is_a_matter_of_paths():
    one, other = StateLeaf("p", "int64[2]", "s" * 64, 16), StateLeaf("p", "int64[2]", "t" * 64, 16)
    assert compare_leaves({"p": one}, {"p": one}) == []
    assert compare_leaves({"p": one}, {"p": other}) == [
        LeafDifference(path="p", kind=DifferenceKind.VALUE, before="int64[2]", after="int64[2]"),
    ]


def test_not_a_number_equals_itself_among_metrics():
    assert compare_values({"loss": math.nan}, {"loss": math.nan}) == ()
    assert [pair.name for pair in compare_values({"a": 1}, {"b": 1})] == ["a", "b"]


def test_the_form_that_is_read_is_the_one_that_is_written():
    assert shards.FRAMEWORK in inspect.READABLE_FRAMEWORKS
