"""Converts the state of a training to a JSON document and a list of arrays, bit for bit, and back.

A resumed run equals an uninterrupted one only if storage changes nothing: not
the sign of a NaN, the 128 bits of a random generator, or whether two layers
share one weight. Nor the memory order of an array: BLAS sums a transposed
matrix in another order, so its results would be rounded differently. A value
that cannot be kept exactly is refused with its path in the state, at the start
of the program rather than at the first save.
"""

import dataclasses
import json
import math
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiphys.errors import UsageError

Array = NDArray[Any]
Bytes = NDArray[np.uint8]

_EXACT_KINDS = "biufcmMSU"
_MAX_ITEM_BYTES = {"f": 8, "c": 16}
"""Largest item size by kind: wider floats have other sizes and formats on other machines."""


def check_dtype(array: Array, path: str) -> None:
    """Raise `UsageError` for a dtype that cannot be restored exactly, such as objects and long doubles."""
    dtype = array.dtype
    if (
        dtype.kind not in _EXACT_KINDS
        or dtype.itemsize == 0
        or dtype.itemsize > _MAX_ITEM_BYTES.get(dtype.kind, dtype.itemsize)
    ):
        raise UsageError(
            f"{path}: an array of dtype {dtype} cannot be saved exactly; "
            "use whole numbers, floats of at most 64 bits, booleans, dates or text, one array for each field"
        )


def describe_array(array: Array) -> dict[str, Any]:
    """Return dtype, shape and memory order of ``array`` as JSON, from which `allocate_array` makes an empty one."""
    return {"dtype": array.dtype.str, "shape": list(array.shape), "order": "F" if array.flags.fnc else "C"}


def allocate_array(form: dict[str, Any]) -> Array:
    """Allocate an array of this form; its content is undefined until it is written through `flat_bytes`."""
    return np.empty(form["shape"], dtype=np.dtype(form["dtype"]), order=form["order"])


def to_contiguous(array: Array) -> Array:
    """Return ``array`` itself if it is contiguous, in C or Fortran order; else a copy in C order."""
    return array if array.flags.forc else np.ascontiguousarray(array)


def flat_view(array: Array) -> Array:
    """Return the elements of a contiguous array in memory order, without a copy."""
    return (array.T if array.flags.fnc else array).reshape(-1)


def flat_bytes(array: Array) -> Bytes:
    """Return the bytes of a contiguous array in memory order, without a copy."""
    return flat_view(array).view(np.uint8)


TreeNode = Any
"""JSON: scalars and lists represent themselves; every other value is an object with one tag such as ``dict``."""

_MAX_JSON_INTEGER = 1 << 63


class NamedArray(NamedTuple):
    """An array and the first path that leads to it, such as ``state.optimizer.0``."""

    path: str
    array: Array


class FlatState(NamedTuple):
    """A flattened state: ``tree`` refers to ``arrays`` by their index."""

    tree: TreeNode
    arrays: list[NamedArray]

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes."""
        return sum(named.array.nbytes for named in self.arrays)

    def encode_document(self) -> bytes:
        """Encode everything except the content of the arrays as JSON."""
        arrays = [describe_array(named.array) for named in self.arrays]
        return json.dumps({"format": 1, "state": self.tree, "arrays": arrays}, allow_nan=False).encode()


def flatten_state(state: Any) -> FlatState:
    """Flatten ``state`` without copying arrays.

    Raises:
        UsageError: a part of it cannot be saved exactly; the message names its path.
    """
    return _Flattener().run(state)


def read_document(document: bytes) -> tuple[TreeNode, list[Array]]:
    """Read the document of `FlatState.encode_document`.

    Returns:
        The tree, and allocated arrays of the right form without content.

    Raises:
        UsageError: another version of Tiphys wrote the document in a newer format.
    """
    content = json.loads(document)
    if content.get("format") != 1:
        raise UsageError(
            f"the checkpoint's state has format {content.get('format')!r}, this version of Tiphys reads format 1; "
            "use an image with the version that wrote it"
        )
    return content["state"], [allocate_array(form) for form in content["arrays"]]


def unflatten_state(tree: TreeNode, arrays: list[Array], like: Any = None) -> Any:
    """Rebuild a state; the inverse of `flatten_state`.

    Args:
        tree: The tree of the document.
        arrays: The arrays with their content.
        like: A state of the same program. Dataclasses and named tuples are built
            from the classes in it, so that no class is imported by name.

    Raises:
        UsageError: ``like`` does not contain a class of the state, or its fields have changed.
    """
    return _Builder(arrays, {cls.__qualname__: cls for cls in _record_types(like)}).build(tree)


class _Flattener:
    def __init__(self) -> None:
        self._arrays: list[NamedArray] = []
        self._indices: dict[int, int] = {}
        self._open: set[int] = set()

    def run(self, state: Any) -> FlatState:
        return FlatState(self._node(state, "state"), self._arrays)

    def _node(self, value: Any, path: str) -> TreeNode:
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if abs(value) < _MAX_JSON_INTEGER else {"int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
        if kind is np.ndarray:
            return {"array": self._array(value, path)}
        if isinstance(value, np.generic):
            return {"scalar": self._array(np.asarray(value), path)}
        return self._container(value, path)

    def _container(self, value: Any, path: str) -> TreeNode:
        if id(value) in self._open:
            raise UsageError(f"{path} contains itself, so it cannot be saved; remove the cycle")
        self._open.add(id(value))
        try:
            return self._members(value, path)
        finally:
            self._open.discard(id(value))

    def _members(self, value: Any, path: str) -> TreeNode:
        kind = type(value)
        if kind is list:
            return [self._node(item, f"{path}.{index}") for index, item in enumerate(value)]
        if kind is tuple:
            return {"tuple": [self._node(item, f"{path}.{index}") for index, item in enumerate(value)]}
        if kind is dict:
            return {"dict": [[_check_key(key, path), self._node(item, f"{path}.{key}")] for key, item in value.items()]}
        if (fields := _record_fields(value)) is not None:
            return {"record": kind.__qualname__, "fields": {k: self._node(v, f"{path}.{k}") for k, v in fields.items()}}
        raise UsageError(
            f"{path}: {_type_name(value)} cannot be saved; a state is made of NumPy arrays and scalars, "
            f"numbers, text and None in dicts, lists, tuples and dataclasses{_conversion_hint(value)}"
        )

    def _array(self, array: Array, path: str) -> int:
        # The list keeps every array alive, so that Python reuses no id.
        if id(array) not in self._indices:
            check_dtype(array, path)
            self._indices[id(array)] = len(self._arrays)
            self._arrays.append(NamedArray(path, array))
        return self._indices[id(array)]


class _Builder:
    def __init__(self, arrays: list[Array], types: dict[str, type]) -> None:
        self._arrays = arrays
        self._types = types

    def build(self, node: TreeNode) -> Any:
        if isinstance(node, list):
            return [self.build(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "record" in node:
            return self._record(node["record"], {name: self.build(item) for name, item in node["fields"].items()})
        ((tag, content),) = node.items()
        return self._tags[tag](self, content)

    def _record(self, name: str, fields: dict[str, Any]) -> Any:
        if (cls := self._types.get(name)) is None:
            raise UsageError(
                f"the checkpoint contains a {name}, but the default passed to restore() does not; "
                "pass a default with the same classes as the saved state"
            )
        current_fields = _field_names(cls)
        if set(fields) != current_fields:
            raise UsageError(
                f"the checkpoint's {name} has the fields {sorted(fields)}, the program's has {sorted(current_fields)}; "
                "the code has changed: start a new run, or restore the fields"
            )
        if issubclass(cls, tuple):
            return cls(**fields)
        record = cls.__new__(cls)
        for field, value in fields.items():
            object.__setattr__(record, field, value)  # works for frozen classes too
        return record

    _tags: dict[str, Callable[["_Builder", Any], Any]] = {
        "array": lambda self, index: self._arrays[index],
        "scalar": lambda self, index: self._arrays[index][()],
        "int": lambda _, text: int(text, 16),
        "float": lambda _, text: struct.unpack(">d", bytes.fromhex(text))[0],
        "tuple": lambda self, items: tuple(self.build(item) for item in items),
        "dict": lambda self, items: {key: self.build(item) for key, item in items},
    }


def _check_key(key: Any, path: str) -> str | int:
    if type(key) in (str, int):
        return key  # type: ignore[no-any-return]
    raise UsageError(f"{path}: key {key!r} cannot be saved; keys are text or whole numbers")


def _record_fields(value: Any) -> dict[str, Any] | None:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    return None


def _field_names(cls: Any) -> set[str]:
    return set(cls._fields) if issubclass(cls, tuple) else {field.name for field in dataclasses.fields(cls)}


def _record_types(value: Any) -> Iterator[type]:
    if (fields := _record_fields(value)) is not None:
        yield type(value)
        value = fields
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _record_types(item)


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _conversion_hint(value: Any) -> str:
    if hasattr(value, "detach"):
        return "; for a tensor pass tensor.detach().cpu().numpy()"
    if isinstance(value, np.random.Generator):
        return "; for a generator pass generator.bit_generator.state"
    return "; omit it, or save values from which it can be rebuilt"
