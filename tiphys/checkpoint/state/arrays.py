"""How arrays lie in memory: their form as JSON, and which of them share memory.

BLAS sums a transposed matrix in another order, so a restored array has the
memory order of the saved one. And an optimizer that updates one buffer in place
must move the views of it that a model reads. So arrays whose addresses overlap
are stored once: one of them, or a copy of the bytes that they cover, and for
each other array its place in there. An array that shares memory with no other
array of the state is stored without its base, such as a batch of a dataset.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from tiphys.checkpoint.state.classes import find_class
from tiphys.errors import UsageError

Array = NDArray[Any]
Bytes = NDArray[np.uint8]
Form = dict[str, Any]
"""JSON that describes an array or a view."""

_MAX_ITEM_BYTES = {"f": 8, "c": 16}
"""Largest item size by kind: wider floats have other sizes and formats on other machines."""
_MAX_SPAN, _MIN_SPAN_BYTES = 4, 1 << 20
"""Memory from the first to the last element of what is stored or restored as one: as a multiple of the size of the
elements, and what is never too much."""
_MAX_COMPARED = 64
"""Arrays with interleaved addresses that are compared pair by pair; more are taken to share memory."""
_MAX_WORK: Any = 10_000
"""Bound of one such comparison, as in `numpy.shares_memory`; about a millisecond."""
_ALIGNMENT = 16
"""Of the memory that NumPy allocates."""


class NamedArray(NamedTuple):
    """An array and the first path that leads to it, such as ``state.optimizer.0``."""

    path: str
    array: Array


def describe_dtype(dtype: "np.dtype[Any]", path: str) -> str | list[str]:
    """Return a dtype as JSON: its code, or module and name of its class, as for bfloat16.

    Raises:
        UsageError: it cannot be restored exactly, such as objects, records and long doubles.
    """
    is_exact = not dtype.hasobject and dtype.metadata is None and dtype.itemsize
    if is_exact and dtype.itemsize <= _MAX_ITEM_BYTES.get(dtype.kind, dtype.itemsize):
        for form in (dtype.str, [dtype.type.__module__, dtype.type.__qualname__]):
            with contextlib.suppress(TypeError, UsageError):
                if (found := find_dtype(form)) == dtype and found.type is dtype.type:
                    return form
    raise UsageError(
        f"{path}: an array of dtype {dtype} cannot be saved exactly; "
        "use whole numbers, floats of at most 64 bits, booleans, dates or text, one array for each field"
    )


def find_dtype(form: str | list[str]) -> "np.dtype[Any]":
    """Return the dtype that `describe_dtype` described; raises `UsageError` if its module is not imported."""
    if isinstance(form, str):
        return np.dtype(form)
    module, name = form
    if not issubclass(scalar := find_class((module, name)) or object, np.generic):
        raise UsageError(f"the state has arrays of dtype {module}.{name}; import {module} before restore()")
    return np.dtype(scalar)


def describe_array(array: Array, dtype: str | list[str]) -> Form:
    """Return the form of an array that shares no memory, from which `allocate_array` makes an empty one."""
    form: Form = {"dtype": dtype, "shape": list(array.shape), "order": "F" if array.flags.fnc else "C"}
    if not array.flags.forc:
        form |= {"shape": list(_stored_elements(array).shape), "layout": [list(array.shape), _kept_strides(array)]}
    return form if array.flags.writeable else form | {"readonly": True}


def allocate_array(form: Form) -> Array:
    """Allocate the elements of an array as they are stored; their content is undefined."""
    return np.empty(form["shape"], dtype=find_dtype(form["dtype"]), order=form["order"])


def lay_out(array: Array, form: Form) -> Array:
    """Return the stored elements in the memory order of the saved array; writable."""
    if "layout" not in form:
        return array
    shape, strides = form["layout"]
    ends = [stride * (length - 1) for length, stride in zip(shape, strides, strict=True)]
    first = -sum(end for end in ends if end < 0)
    buffer = np.zeros(first + sum(end for end in ends if end > 0) + array.itemsize, dtype=np.uint8)
    laid_out: Array = np.ndarray(shape, array.dtype, buffer, first, strides)
    laid_out[...] = array
    return laid_out


def to_contiguous(array: Array) -> Array:
    """Return what is stored of ``array``: itself if it is contiguous, in C or Fortran order; else a copy in C order."""
    return array if array.flags.forc else np.ascontiguousarray(_stored_elements(array))


def flat_view(array: Array) -> Array:
    """Return the elements of a contiguous array in memory order, without a copy."""
    return (array.T if array.flags.fnc else array).reshape(-1)


def flat_bytes(array: Array) -> Bytes:
    """Return the bytes of a contiguous array in memory order, without a copy."""
    return flat_view(array).view(np.uint8)


def view_of(base: Array, form: Form) -> Array:
    """Return the view of a contiguous array that ``form`` describes."""
    return np.ndarray(form["shape"], find_dtype(form["dtype"]), flat_bytes(base), form["offset"], form["strides"])


def find_owner(array: Array) -> Any:
    """Return the object in whose memory ``array`` lies, such as another array or a bytearray."""
    owner: Any = array
    while isinstance(owner, np.ndarray | memoryview):
        base = owner.obj if isinstance(owner, memoryview) else owner.base
        if base is None:
            break
        owner = base
    return owner


class FrozenMemory:
    """Owner of an array's memory that nothing changes while this object lives, so that a save may copy it later."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self.__array_interface__ = array.__array_interface__


def freeze(array: Array) -> Array:
    """Return a view of ``array``, which nothing changes from now on, that says so by its `FrozenMemory`."""
    return np.asarray(FrozenMemory(array)).view(array.dtype)


class SharedMemory(NamedTuple):
    """Memory of several arrays: ``base`` holds it all, ``views`` are the forms of the arrays in it by their index."""

    base: NamedArray
    views: dict[int, Form]


def find_shared_memory(arrays: Sequence[NamedArray]) -> Iterator[SharedMemory]:
    """Yield the memory that several of ``arrays`` share.

    The base is the first array that holds it all, which then has no view; else a copy.

    Raises:
        UsageError: the arrays are small parts of that memory.
    """
    for group in _overlapping(arrays):
        bounds = {index: byte_bounds(arrays[index].array) for index in group}
        low, high = min(low for low, _ in bounds.values()), max(high for _, high in bounds.values())
        for index in group:
            if bounds[index] == (low, high) and arrays[index].array.flags.forc:
                yield SharedMemory(
                    arrays[index], {other: _view_form(arrays[other], low) for other in group if other != index}
                )
                break
        else:
            low -= low % _ALIGNMENT
            if not _is_dense(high - low, sum(arrays[index].array.nbytes for index in group)):
                raise UsageError(
                    f"{' and '.join(arrays[index].path for index in group[:2])} share a small part of one array, so "
                    "they cannot be saved; put that array into the state as well, or copies of its parts"
                )
            views = {index: _view_form(arrays[index], low) for index in group}
            base: Array = np.zeros(high - low, dtype=np.uint8)  # what no view covers may differ between equal states
            for index, form in views.items():
                view_of(base, form)[...] = arrays[index].array
            yield SharedMemory(NamedArray(arrays[group[0]].path, base), views)


def _overlapping(arrays: Sequence[NamedArray]) -> Iterator[list[int]]:
    """Yield the indices of arrays that share memory with each other."""
    if all(named.array.base is None for named in arrays):
        return  # each owns its memory, as in most states
    group: list[int] = []
    group_end = 0
    bounds = sorted((*byte_bounds(named.array), index) for index, named in enumerate(arrays) if named.array.size)
    for start, end, index in bounds:
        if start >= group_end:
            yield from _split_interleaved(arrays, sorted(group))
            group = []
        group.append(index)
        group_end = max(group_end, end)
    yield from _split_interleaved(arrays, sorted(group))


def _split_interleaved(arrays: Sequence[NamedArray], group: list[int]) -> Iterator[list[int]]:
    """Split a group of arrays with overlapping addresses, such as two columns of a matrix, which share no element."""
    parts: list[list[int]] = [group]
    if len(group) <= _MAX_COMPARED:
        parts = []
        for index in group:
            sharing = [part for part in parts if any(_share_elements(arrays[other], arrays[index]) for other in part)]
            parts = [part for part in parts if part not in sharing] + [sorted(sum(sharing, [index]))]
    yield from sorted(part for part in parts if len(part) > 1)


def _share_elements(first: NamedArray, second: NamedArray) -> bool:
    try:
        return np.shares_memory(first.array, second.array, max_work=_MAX_WORK)
    except np.exceptions.TooHardError:
        return True


def _is_dense(span_bytes: int, size_bytes: int) -> bool:
    return span_bytes <= max(_MAX_SPAN * size_bytes, _MIN_SPAN_BYTES)


def _view_form(named: NamedArray, low: int) -> Form:
    array = named.array
    form: Form = {
        "dtype": describe_dtype(array.dtype, named.path),
        "offset": array.__array_interface__["data"][0] - low,
        "shape": list(array.shape),
        "strides": list(array.strides),
    }
    return form if array.flags.writeable else form | {"readonly": True}


def _stored_elements(array: Array) -> Array:
    """Return ``array`` without the axes along which it repeats the same memory."""
    return array[tuple(slice(None if stride else 1) for stride in array.strides)]


def _kept_strides(array: Array) -> list[int]:
    """Return the strides of ``array``, with smaller gaps if it is a small part of its memory, such as one column."""
    low, high = byte_bounds(array)
    if _is_dense(high - low, array.nbytes):
        return list(array.strides)
    strides, dense = [0] * array.ndim, array.itemsize
    for axis in sorted(range(array.ndim), key=lambda axis: abs(array.strides[axis])):
        if array.strides[axis]:
            strides[axis] = int(math.copysign(dense, array.strides[axis]))
            dense *= array.shape[axis]
    return strides
