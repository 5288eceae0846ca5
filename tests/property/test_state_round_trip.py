"""Any state that can be saved comes back bit for bit; compared by bytes, so that NaN equals itself.

What shares memory or is one object shares it afterwards: what is written through one name is seen through the others.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.builders.shards import packed, unpack

DTYPES = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    hnp.complex_number_dtypes(endianness="?", sizes=(64, 128)),
    hnp.datetime64_dtypes(endianness="?"),
    hnp.timedelta64_dtypes(endianness="?"),
    hnp.unicode_string_dtypes(endianness="?", min_len=1, max_len=4),
    hnp.byte_string_dtypes(min_len=1, max_len=4),
)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)


def views(array: Any) -> Any:
    """Views of an array as programs hold them: transposed, strided, reversed, repeated, other axes, read-only."""
    read_only = array.view()
    read_only.flags.writeable = False
    found = [array, array.T, read_only, array[None], array[...]]
    if array.ndim:
        found += [array[::-1], array[..., ::2], array[1:], array[:-1], np.broadcast_to(array, (2, *array.shape))]
    return st.sampled_from(found)


ARRAYS = hnp.arrays(DTYPES, SHAPES)
LAYOUTS = ARRAYS.flatmap(views)


@dataclass
class Record:
    value: Any


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(2**63, 2**200),
    st.floats(allow_nan=True),
    st.text(),
    st.binary(),
    st.complex_numbers(),
    st.builds(np.float32, st.floats(width=32)),
    st.builds(np.int64, st.integers(-(2**63), 2**63 - 1)),
    st.builds(np.str_, st.text()),
)
KEYS = st.recursive(
    st.one_of(st.none(), st.booleans(), st.text(max_size=4), st.integers(), st.floats(allow_nan=False), st.binary()),
    lambda inner: st.lists(inner, max_size=2).map(tuple),
    max_leaves=3,
)
STATES = st.recursive(
    st.one_of(LAYOUTS, SCALARS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.lists(inner, max_size=4).map(deque),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict),
        st.builds(Record, inner),
    ),
    max_leaves=12,
)


def fingerprint(value: Any) -> Any:
    """A form that is equal only for values of the same types, order and bits."""
    if isinstance(value, np.ndarray):
        strides = [stride for stride, length in zip(value.strides, value.shape, strict=True) if length > 1]
        layout = (value.flags.writeable, strides if value.size else None)
        return type(value), value.dtype.str, value.shape, layout, value.tobytes()
    if isinstance(value, np.str_):
        return np.str_, list(value)
    if isinstance(value, np.generic):
        return type(value), value.dtype.str, value.tobytes()
    if isinstance(value, dict):
        return type(value), [(fingerprint(k), fingerprint(v)) for k, v in value.items()]
    if isinstance(value, list | tuple | deque):
        return type(value), [fingerprint(item) for item in value]
    if isinstance(value, Record):
        return Record, fingerprint(vars(value))
    if isinstance(value, float | complex):
        return type(value), np.asarray(value).tobytes()
    return type(value), value


@settings(max_examples=100)
@given(STATES, st.sampled_from([1, 16, 1 << 20]))
def test_a_state_survives_bit_for_bit_whatever_the_size_of_shards(state, shard_bytes):
    assert fingerprint(unpack(packed(state, shard_bytes))) == fingerprint(state)


@settings(max_examples=100)
@given(STATES)
def test_the_same_state_gives_the_same_bytes(state):
    """So that saving a step again meets its own shards."""
    assert packed(state) == packed(state)


@settings(max_examples=100)
@given(STATES)
def test_a_restored_state_gives_the_bytes_of_the_saved_one(state):
    """So that a state that was restored and not changed is the same state."""
    assert packed(unpack(packed(state))) == packed(state)


BUFFERS = hnp.arrays(st.sampled_from(["i4", "f8", "u1"]), hnp.array_shapes(min_dims=1, max_dims=3, max_side=5))


@st.composite
def aliased(draw: st.DrawFn) -> list[Any]:
    """Arrays of which several share memory, also only in parts, in containers of which several are one."""
    buffers = draw(st.lists(BUFFERS, min_size=1, max_size=2))
    pool = [*buffers]
    for _ in range(draw(st.integers(1, 5))):
        chosen = draw(st.sampled_from(pool))
        pool.append(draw(views(chosen.reshape(-1).view("u1") if chosen.flags.c_contiguous else chosen)))
        pool.append(draw(views(draw(st.sampled_from(pool)))))
    arrays = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=8))
    containers = [[array] for array in arrays]
    return draw(st.lists(st.sampled_from(containers), min_size=1, max_size=8))


@settings(max_examples=100)
@given(aliased(), st.data())
def test_a_write_through_one_name_is_seen_through_all_names_that_share_it(state, data):
    restored = unpack(packed(state))
    for number in range(3):
        index = data.draw(st.integers(0, len(state) - 1))
        for lists in (state, restored):
            array = lists[index][0]
            if array.flags.writeable and array.size:
                array[(0,) * array.ndim] = number + 1
    assert [fingerprint(item) for item in restored] == [fingerprint(item) for item in state]
    for container, found in zip(state, restored, strict=True):
        assert [container is other for other in state] == [found is other for other in restored]
        assert [container[0] is other[0] for other in state] == [found[0] is other[0] for other in restored]
