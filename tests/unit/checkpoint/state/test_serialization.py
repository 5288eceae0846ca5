"""What a state may hold, and what is refused by its path."""

import dataclasses
import json
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from enum import Flag, IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.builders.shards import packed, unpack

from tiphys.checkpoint.state.serialization import flatten_state
from tiphys.errors import IntegrityError, UsageError


class Color(IntEnum):
    RED = 1


class Mode(Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: float
    weights: Any


class LabelledPoint(Point):
    labels: list[str]


@dataclasses.dataclass
class Closing:
    handle: int

    def __del__(self):
        pass


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


def test_a_class_of_an_imported_module_is_found_without_a_default():
    found = round_trip({"history": [Optimizer(np.ones(3), 2)]})["history"][0]
    assert type(found) is Optimizer
    assert found.count == 2


def local_record(value):
    @dataclasses.dataclass
    class Local:
        value: Any

    return Local(value)


def test_a_class_without_a_name_in_its_module_is_refused_at_the_save_unless_the_default_holds_it():
    record = local_record(1)
    with pytest.raises(UsageError, match=r"state\.r: the class local_record\.<locals>\.Local cannot be found"):
        flatten_state({"r": record}, known={})
    assert flatten_state({"r": record}, known=flatten_state(record).classes)
    assert round_trip({"r": record}, like=record)["r"].value == 1


def test_classes_of_the_same_name_are_refused():
    with pytest.raises(UsageError, match=r"state\.1: the state holds two classes .*Local"):
        flatten_state([local_record(1), local_record(2)])


def test_classes_of_one_name_in_two_modules_come_back_as_they_were(monkeypatch):
    state = {}
    for name in ("first_module", "second_module"):
        module = ModuleType(name)
        exec("import dataclasses\n@dataclasses.dataclass\nclass State:\n    step: int\n", vars(module))
        monkeypatch.setitem(sys.modules, name, module)
        state[name] = module.State(len(state))
    found = round_trip(state)
    assert {name: type(record).__module__ for name, record in found.items()} == {name: name for name in state}


def test_a_class_whose_module_is_not_imported_is_named_and_nothing_is_imported(monkeypatch):
    saved = packed(Optimizer(1))
    saved[0] = bytearray(bytes(saved[0]).replace(__name__.encode(), b"antigravity"))
    with pytest.raises(UsageError, match="Optimizer of the module antigravity"):
        unpack(saved)
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("name", ["OrderedDict.fromkeys", "abc", "namedtuple", "UserDict"])
def test_only_classes_whose_instances_run_no_code_are_made(name):
    saved = packed(OrderedDict(a=1))
    saved[0] = bytearray(bytes(saved[0]).replace(b'"OrderedDict"', f'"{name}"'.encode()))
    with pytest.raises(UsageError, match="import it before restore"):
        unpack(saved)


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


class Momentum:
    __slots__ = ("__hidden", "unset", "velocity")
    default = 0.0

    def __init__(self):
        self.velocity, self.__hidden = 1.5, "hidden"


@dataclasses.dataclass
class Adam(Momentum):
    lr: float
    scale: dataclasses.InitVar[int]
    moments: Any = dataclasses.field(init=False)

    def __post_init__(self, scale):
        Momentum.__init__(self)
        self.scaled = self.lr * scale


class PlainAdam(Adam):
    def __init__(self):
        super().__init__(0.1, 3)
        self.default = 2.0


class Names(dict):
    pass


@dataclasses.dataclass
class Registry(dict):
    name: str


class Pair(NamedTuple("Pair", [("x", int)])):
    pass


def test_every_attribute_of_a_dataclass_comes_back_also_those_that_are_no_fields():
    saved = PlainAdam()
    found = round_trip(saved)
    assert vars(found) == {"lr": 0.1, "scaled": 0.1 * 3, "default": 2.0}
    assert (found.velocity, found._Momentum__hidden) == (1.5, "hidden")
    assert not hasattr(found, "unset")
    assert not hasattr(found, "moments")


def test_an_attribute_that_cannot_be_saved_is_refused_by_its_path():
    saved: Any = PlainAdam()
    saved.hook = print
    with pytest.raises(UsageError, match=r"state\.hook: builtin_function_or_method"):
        flatten_state(saved)


def state_dict_of_a_module():
    state: Any = OrderedDict(weight=1.0)
    state._metadata = OrderedDict({"": {"version": 1}})
    return state


def registry():
    filled = Registry("n")
    filled["w"] = 2
    return filled


KEPT = [
    b"bytes\0",
    bytes(range(256)) * 100,
    bytearray(b"bytes"),
    1 - 0.0j,
    Color.RED,
    {None: 1, True: 2, 2.5: 3, (1, ("a", None)): 4, b"k": 5, Color.RED: 6, np.int64(3): 7, "": 8},
    OrderedDict(b=1, a=2),
    state_dict_of_a_module(),
    defaultdict(list, a=[1]),
    defaultdict(None, a=1),
    Counter("aab"),
    deque([1, 2], maxlen=2),
    Names(a=1),
    registry(),
    Pair(1),
    np.str_("ab\0"),
    np.bytes_(b"ab\0"),
    np.longlong(3),
    np.datetime64("2026-01-01", "D"),
    np.void(b"abc"),
    (),
]


@pytest.mark.parametrize("value", KEPT, ids=lambda value: type(value).__name__)
def test_values_that_libraries_hand_out_come_back_as_they_were(value):
    found = round_trip([value])[0]
    assert type(found) is type(value)
    assert repr(found) == repr(value)
    assert getattr(found, "__dict__", None) == getattr(value, "__dict__", None)
    if isinstance(value, dict):
        assert [type(key) for key in found] == [type(key) for key in value]


def test_containers_that_are_shared_come_back_shared():
    weights, record, log, raw = {"w": np.zeros(1)}, Optimizer(1), [1], bytearray(b"ab")
    pair = (log,)
    state = {"a": [weights, record, log, raw, pair], "b": (weights, record, log, raw, pair)}
    found = round_trip(state)
    assert all(first is second for first, second in zip(found["a"][:4], found["b"][:4], strict=True))
    assert found["a"][4][0] is found["b"][4][0] is found["a"][2]


def test_equal_containers_that_are_two_stay_two():
    found = round_trip([[1], [1], {"a": 1}, {"a": 1}])
    assert found[0] is not found[1]
    assert found[2] is not found[3]


def views_of_one_buffer():
    flat = np.arange(24.0)
    matrix = flat.reshape(4, 6)
    return {
        "last": flat[-1:],
        "flat": flat,
        "transposed": matrix.T,
        "reversed": flat[::-1],
        "strided": matrix[::2, 1:3],
        "bits": flat.view(np.int64)[2:4],
        "same": flat[:],
        "scalar": flat[5:6].reshape(()),
        "broadcast": np.broadcast_to(flat[:1], (3, 1)),
        "again": flat,
    }


def test_views_of_one_buffer_are_stored_once_and_see_what_is_written_through_another():
    state = views_of_one_buffer()
    assert flatten_state(state).nbytes == state["flat"].nbytes
    found = round_trip(state)
    for arrays in (state, found):
        arrays["flat"] *= 2.5
        arrays["reversed"][0] = 7
        arrays["bits"][1] = 1
    assert found["again"] is found["flat"]
    for name, array in state.items():
        assert (found[name].strides, found[name].shape, found[name].dtype) == (array.strides, array.shape, array.dtype)
        assert found[name].tobytes() == array.tobytes(), name
        assert found[name].flags.writeable == array.flags.writeable


def test_views_without_their_base_are_stored_as_the_memory_that_they_cover():
    base = np.arange(1000.0)
    state = [base[10:20], base[15:30], base[16:18]]
    assert flatten_state(state).nbytes == 20 * 8
    found = round_trip(state)
    found[0][5] = -1
    assert found[1][0] == -1
    np.testing.assert_array_equal(found[2], [16, 17])


def test_a_small_view_is_stored_without_its_base():
    dataset = np.zeros((10_000, 100))
    assert flatten_state({"batch": dataset[5:7], "rest": dataset[7:9]}).nbytes == 2 * 2 * 100 * 8
    assert flatten_state({"column": dataset[:, 3], "other": dataset[:, 4]}).nbytes == 2 * 10_000 * 8
    found = round_trip({"column": dataset[::-1, 3]})["column"]
    assert found.strides == (-8,)


def test_parts_of_a_much_larger_array_that_share_memory_are_refused():
    dataset = np.zeros((1000, 1000))
    with pytest.raises(UsageError, match=r"state\.a and state\.b share a small part of one array"):
        flatten_state({"a": dataset[:, 0], "b": dataset[::2, 0]})


def test_an_array_without_axes_is_shared_with_what_it_is_a_base_of():
    count = np.array(3)
    found = round_trip({"count": count, "alone": np.array(4), "as_vector": count.reshape(1), "twice": [count]})
    found["as_vector"][0] = 9
    assert (found["count"], found["alone"]) == (9, 4)
    assert found["twice"][0] is found["count"]


def test_a_view_of_a_bytearray_of_the_state_is_refused():
    raw = bytearray(8)
    with pytest.raises(UsageError, match=r"state\.1 is a view of state\.0, a bytearray"):
        flatten_state([raw, np.frombuffer(raw, dtype=np.uint8)])


def test_arrays_over_foreign_memory_come_back_read_only_if_they_were():
    found = round_trip([np.frombuffer(bytes(range(16)), dtype=np.uint16), np.frombuffer(bytearray(8), dtype=np.uint8)])
    assert [array.flags.writeable for array in found] == [False, True]


def test_dtypes_of_other_packages_are_found_among_the_imported_modules():
    wide = np.array([1, 2], dtype=np.longlong)
    assert round_trip([wide])[0].dtype.type is np.longlong


def test_many_numpy_scalars_fit_into_the_document():
    state = {"losses": list(np.arange(1000.0)), "counts": [np.array(number) for number in range(1000)]}
    assert len(packed(state)) == 1
    found = round_trip(state)
    assert found["losses"] == state["losses"]
    assert all(type(loss) is np.float64 for loss in found["losses"])
    assert all(count.flags.writeable and count.shape == () for count in found["counts"])


def test_timedeltas_keep_the_unit_that_is_no_part_of_their_type():
    waits = [np.timedelta64(1, "s"), np.timedelta64(1, "D"), np.timedelta64("NaT", "ms")]
    assert [(wait.dtype, str(wait)) for wait in round_trip(waits)] == [(wait.dtype, str(wait)) for wait in waits]


@pytest.mark.parametrize("text", ["\ud83d\ude00", "\udcff", "ä\ud83d", "😀"])
def test_text_with_lone_surrogates_comes_back_exactly(text):
    assert round_trip({text: text}) == {text: text}


def test_class_with_a_finalizer_is_refused_since_a_checkpoint_could_run_it():
    with pytest.raises(UsageError, match=r"state\.file: .*Closing cannot be saved"):
        flatten_state({"file": Closing(3)})


def test_tuples_with_attributes_come_back_shared():
    point = LabelledPoint(0.5, [1])
    point.labels = ["a"]
    first, second = round_trip([point, point])
    assert first is second
    assert (first, first.labels) == (point, ["a"])


class Tensor:
    def detach(self):
        raise AssertionError("not called")


def circle():
    around: list[Any] = []
    around.append({"inner": around})
    return around


def nested(levels):
    state: list[Any] = []
    for _ in range(levels):
        state = [state]
    return state


REFUSED = [
    ({"fn": print}, r"state\.fn: builtin_function_or_method cannot be saved"),
    ({"a": [1, {"b": {2}}]}, r"state\.a\.1\.b: set cannot be saved"),
    ({"t": Tensor()}, r"state\.t: .*Tensor cannot be saved.*detach"),
    ({"rng": np.random.default_rng(1)}, r"state\.rng: .*bit_generator\.state"),
    ({"e": Mode.READ | Mode.WRITE}, r"state\.e: .*Mode cannot be saved"),
    ({"p": Path("a")}, r"state\.p: .*Path cannot be saved.*str"),
    ({"f": defaultdict(lambda: 0)}, r"state\.f: a defaultdict with the factory"),
    ({"f": np.array([1.0], dtype=np.dtype("f8", metadata={"a": 1}))}, r"state\.f: an array of dtype"),
    ({"t": type("Text", (str,), {})("a")}, r"state\.t: .*Text cannot be saved"),
    ({"d": nested(2000)}, r"a state of more than 100 levels"),
    ({"m": np.ma.masked_array([1, 2])}, r"state\.m: .*MaskedArray cannot be saved"),
    ({"o": np.array([None])}, r"state\.o: an array of dtype object"),
    ({"v": np.zeros(2, dtype=[("x", "f4")])}, r"state\.v: an array of dtype"),
    ({"l": np.zeros(2, dtype=np.longdouble)}, r"state\.l: an array of dtype"),
    ({"l": np.clongdouble(1)}, r"state\.l: an array of dtype"),
    ({float("nan"): 3}, r"state: key nan cannot be saved"),
    ({frozenset({1}): 3}, r"state: key frozenset\(\{1\}\) cannot be saved"),
    ({"c": circle()}, r"state\.c\.0\.inner contains itself"),
    (Optimizer, r"state: type cannot be saved"),
]


@pytest.mark.parametrize(("state", "words"), REFUSED)
def test_a_value_that_cannot_be_kept_exactly_is_refused_by_its_path(state, words):
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
