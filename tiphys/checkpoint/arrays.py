"""The exact form of a NumPy array: type, shape, memory order and bytes.

Memory order is part of it: BLAS sums a transposed matrix in another order, and
a run that resumed with one would round differently from the run that did not.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiphys.errors import UsageError

Array = NDArray[Any]
Bytes = NDArray[np.uint8]

_KINDS = "biufcmMSU"
_WIDEST = {"f": 8, "c": 16}
"""Wider floats have other sizes and formats on other machines."""


def check_dtype(array: Array, path: str) -> None:
    """Refuse what cannot be restored exactly, such as objects and long doubles."""
    dtype = array.dtype
    if dtype.kind not in _KINDS or dtype.itemsize == 0 or dtype.itemsize > _WIDEST.get(dtype.kind, dtype.itemsize):
        raise UsageError(
            f"{path}: an array of dtype {dtype} cannot be saved exactly; "
            "use whole numbers, floats of at most 64 bits, booleans, dates or text, one array for each field"
        )


def describe(array: Array) -> dict[str, Any]:
    """The form of ``array`` as JSON; `allocate` is its inverse but for the numbers."""
    return {"dtype": array.dtype.str, "shape": list(array.shape), "order": "F" if array.flags.fnc else "C"}


def allocate(form: dict[str, Any]) -> Array:
    """An array of this form, whose numbers are still to be filled in through `flat_bytes`."""
    return np.empty(form["shape"], dtype=np.dtype(form["dtype"]), order=form["order"])


def contiguous(array: Array) -> Array:
    """``array`` itself if its numbers lie together, in either order; else a copy in C order."""
    return array if array.flags.forc else np.ascontiguousarray(array)


def flat(array: Array) -> Array:
    """The numbers of a contiguous array in their memory order, without a copy."""
    return (array.T if array.flags.fnc else array).reshape(-1)


def flat_bytes(array: Array) -> Bytes:
    """The bytes of a contiguous array in their memory order, without a copy."""
    return flat(array).view(np.uint8)
