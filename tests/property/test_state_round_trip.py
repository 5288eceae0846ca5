"""Any state that can be saved comes back bit for bit; compared by bytes, so that NaN equals itself."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.shards import packed, unpack

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


@st.composite
def layouts(draw: st.DrawFn) -> Any:
    """An array as programs hold it: as made, transposed, or a view with steps."""
    array = draw(hnp.arrays(DTYPES, SHAPES))
    return draw(st.sampled_from([array, array.T, array[::-1], array[..., ::2]])) if array.ndim else array


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(2**63, 2**200),
    st.floats(allow_nan=True),
    st.text(),
    st.builds(np.float32, st.floats(width=32)),
    st.builds(np.int64, st.integers(-(2**63), 2**63 - 1)),
)
KEYS = st.one_of(st.text(max_size=4), st.integers())
STATES = st.recursive(
    st.one_of(layouts(), SCALARS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
    ),
    max_leaves=12,
)


def fingerprint(value: Any) -> Any:
    """A form that is equal only for values of the same types, order and bits."""
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        order = "F" if array.flags.fnc else "C"
        return type(value), array.dtype.str, array.shape, order, array.tobytes()
    if isinstance(value, dict):
        return dict, [(type(k), k, fingerprint(v)) for k, v in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [fingerprint(item) for item in value]
    if isinstance(value, float):
        return float, np.float64(value).tobytes()
    return type(value), value


@settings(max_examples=300)
@given(STATES, st.sampled_from([1, 16, 1 << 20]))
def test_a_state_survives_bit_for_bit_whatever_the_size_of_shards(state, shard_bytes):
    assert fingerprint(unpack(packed(state, shard_bytes))) == fingerprint(state)


@settings(max_examples=100)
@given(STATES)
def test_the_same_state_gives_the_same_bytes(state):
    """So that saving a step again meets its own shards."""
    assert packed(state) == packed(state)
