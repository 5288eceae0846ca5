"""What a state may hold, and what is refused by its path."""

import dataclasses
import json
from collections import OrderedDict
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.shards import packed, unpack

from tiphys.checkpoint.state.serialization import flatten_state
from tiphys.errors import IntegrityError, UsageError


class Color(IntEnum):
    RED = 1


class Point(NamedTuple):
    x: float
    weights: Any


@dataclasses.dataclass
class Optimizer:
    momentum: Any
    count: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    optimizer: Optimizer
    point: Point


@dataclasses.dataclass
class Derived:
    given: int
    made: int = dataclasses.field(init=False, default=0)

    def __post_init__(self):
        raise AssertionError("a restored state is not computed anew")


def round_trip(state, like=None, shard_bytes=1 << 20):
    return unpack(packed(state, shard_bytes), like)


def test_dataclasses_and_named_tuples_come_back_as_what_the_default_holds():
    saved = Frozen(Optimizer(np.ones(3), 5), Point(0.5, np.zeros(2)))
    default = Frozen(Optimizer(np.zeros(3)), Point(0.0, np.zeros(2)))
    found = round_trip([saved], like=[default])[0]
    assert isinstance(found, Frozen)
    assert isinstance(found.point, Point)
    assert (found.optimizer.count, found.point.x) == (5, 0.5)
    np.testing.assert_array_equal(found.optimizer.momentum, np.ones(3))


def test_a_restored_dataclass_is_not_initialised_again():
    saved = object.__new__(Derived)
    saved.given, saved.made = 1, 7
    assert round_trip({"a": saved}, like={"a": saved}).get("a").made == 7


def test_a_class_that_the_default_does_not_hold_is_named():
    with pytest.raises(UsageError, match="contains a Optimizer"):
        round_trip(Optimizer(np.ones(3)))


def test_fields_that_the_program_has_no_more_are_named():
    @dataclasses.dataclass
    class Optimizer:
        velocity: Any

    Optimizer.__qualname__ = "Optimizer"
    saved = globals()["Optimizer"](np.ones(3))
    with pytest.raises(UsageError, match=r"\['count', 'momentum'\].*\['velocity'\]"):
        round_trip(saved, like=Optimizer(None))


def test_an_array_used_twice_is_one_array_afterwards():
    """Tied weights stay tied."""
    weights = np.arange(4.0)
    found = round_trip({"encoder": weights, "decoder": [weights]})
    assert found["encoder"] is found["decoder"][0]


def test_equal_arrays_that_are_two_stay_two():
    found = round_trip({"a": np.zeros(2), "b": np.zeros(2)})
    assert found["a"] is not found["b"]


def test_restored_arrays_own_their_memory_and_may_be_changed():
    found = round_trip({"a": np.arange(3), "b": np.asfortranarray(np.ones((2, 3)))})
    assert all(array.flags.writeable and array.flags.owndata for array in found.values())
    assert found["b"].flags.f_contiguous


def test_the_state_of_a_random_generator_continues_its_sequence():
    generator = np.random.default_rng(3)
    generator.random(10)
    state = round_trip({"rng": generator.bit_generator.state})["rng"]
    expected = generator.random(5)
    again = np.random.default_rng()
    again.bit_generator.state = state
    np.testing.assert_array_equal(again.random(5), expected)


def test_large_arrays_are_cut_so_that_no_shard_is_much_larger_than_asked():
    state = {"large": np.arange(10_000, dtype=np.float64), "small": np.ones(3)}
    shards = packed(state, shard_bytes=8_000)
    assert len(shards) == 1 + 10 + 1
    assert max(len(shard) for shard in shards) < 8_000 + 500
    np.testing.assert_array_equal(unpack(shards)["large"], state["large"])


def test_small_arrays_can_be_opened_by_any_tool():
    from safetensors.numpy import load

    _, shard = packed({"model": {"weight": np.arange(6.0).reshape(2, 3)}})
    ((name, array),) = load(bytes(shard)).items()
    assert name.startswith("state.model.weight@")
    np.testing.assert_array_equal(array, np.arange(6.0).reshape(2, 3))


def test_a_missing_shard_is_noticed_even_where_no_hash_is_compared():
    shards = packed({"a": np.arange(100.0)}, shard_bytes=200)
    with pytest.raises(IntegrityError, match="do not hold every number"):
        unpack(shards[:-1])


def test_a_state_of_a_later_format_is_refused_rather_than_called_corrupt():
    document, *rest = packed({"a": 1})
    later = json.dumps({**json.loads(document), "format": 2}).encode()
    with pytest.raises(UsageError, match="format 2"):
        unpack([later, *rest])


class Tensor:
    def detach(self):
        raise AssertionError("not called")


def circle():
    around: list[Any] = []
    around.append({"inner": around})
    return around


REFUSED = [
    ({"fn": print}, r"state\.fn: builtin_function_or_method cannot be saved"),
    ({"a": [1, {"b": {2}}]}, r"state\.a\.1\.b: set cannot be saved"),
    ({"t": Tensor()}, r"state\.t: .*Tensor cannot be saved.*detach"),
    ({"rng": np.random.default_rng(1)}, r"state\.rng: .*bit_generator\.state"),
    ({"b": b"bytes"}, r"state\.b: bytes cannot be saved"),
    ({"e": Color.RED}, r"state\.e: .*Color cannot be saved"),
    (OrderedDict(a=1), r"state: collections\.OrderedDict cannot be saved"),
    ({"m": np.ma.masked_array([1, 2])}, r"state\.m: .*MaskedArray cannot be saved"),
    ({"o": np.array([None])}, r"state\.o: an array of dtype object"),
    ({"v": np.zeros(2, dtype=[("x", "f4")])}, r"state\.v: an array of dtype"),
    ({"l": np.zeros(2, dtype=np.longdouble)}, r"state\.l: an array of dtype"),
    ({"l": np.clongdouble(1)}, r"state\.l: an array of dtype"),
    ({(1, 2): 3}, r"state: key \(1, 2\) cannot be saved"),
    ({True: 3}, r"state: key True cannot be saved"),
    ({"c": circle()}, r"state\.c\.0\.inner contains itself"),
    (Optimizer, r"state: type cannot be saved"),
]


@pytest.mark.parametrize(("state", "words"), REFUSED)
def test_what_cannot_be_kept_exactly_is_refused_by_its_path(state, words):
    with pytest.raises(UsageError, match=words):
        flatten_state(state)


def test_the_same_container_at_two_places_is_no_circle():
    shared = {"a": 1}
    assert round_trip([shared, shared]) == [shared, shared]


def test_text_that_is_not_unicode_survives_as_key_and_value():
    state = {"\ud800": ["\udfff", np.ones(1)]}
    found = round_trip(state)
    assert list(found) == ["\ud800"]
    assert found["\ud800"][0] == "\udfff"


def test_floats_survive_to_the_last_bit():
    import struct

    payload = struct.unpack(">d", bytes.fromhex("7ff8000000000123"))[0]
    values = [0.1, -0.0, 5e-324, float("inf"), -float("inf"), payload]
    assert [struct.pack(">d", v) for v in round_trip(values)] == [struct.pack(">d", v) for v in values]
