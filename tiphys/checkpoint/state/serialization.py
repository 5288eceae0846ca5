"""Training state as a JSON document and a list of arrays, bit for bit, and back.

A resumed run is only the same run if nothing changes on the way through storage:
neither the sign of a NaN, nor the 128 bits of a random generator, nor whether
two layers share one weight, nor the memory order that decides how BLAS rounds.
What cannot be kept exactly is refused by its path in the state, at the start of
the program rather than at the first save.

The exact form of a NumPy array: type, shape, memory order and bytes.

Memory order is part of it: BLAS sums a transposed matrix in another order, and
a run that resumed with one would round differently from the run that did not.
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


Node = Any
"""JSON: scalars and lists stand for themselves, an object has one tag such as ``dict`` or ``array``."""

_BIG = 1 << 63


class NamedArray(NamedTuple):
    """``path`` is where it was found first, such as ``state.optimizer.0``."""

    path: str
    array: Array


class Flat(NamedTuple):
    """A state taken apart: ``tree`` refers to ``arrays`` by their index."""

    tree: Node
    arrays: list[NamedArray]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(named.array.nbytes for named in self.arrays)

    def document(self) -> bytes:
        """The JSON form of everything but the numbers in the arrays."""
        arrays = [describe(named.array) for named in self.arrays]
        return json.dumps({"format": 1, "state": self.tree, "arrays": arrays}, allow_nan=False).encode()


def flatten(state: Any) -> Flat:
    """Take ``state`` apart without copying arrays.

    Raises:
        UsageError: some part of it cannot be kept exactly; the message names its path.
    """
    return _Flattener().run(state)


def read_document(document: bytes) -> tuple[Node, list[Array]]:
    """The tree of a `Flat.document`, and arrays of the right form whose numbers are still to be filled in.

    Raises:
        UsageError: another version of Tiphys wrote it, in a format that this one does not know.
    """
    content = json.loads(document)
    if content.get("format") != 1:
        raise UsageError(
            f"the checkpoint's state has format {content.get('format')!r}, this version of Tiphys reads format 1; "
            "use an image with the version that wrote it"
        )
    return content["state"], [allocate(form) for form in content["arrays"]]


def unflatten(tree: Node, arrays: list[Array], like: Any = None) -> Any:
    """Put a state together again.

    ``like`` is a state of the same program: dataclasses and named tuples are
    built from the classes found in it, so that none is imported by its name.

    Raises:
        UsageError: such a class is not in ``like``, or has other fields now.
    """
    return _Builder(arrays, {cls.__qualname__: cls for cls in _record_types(like)}).build(tree)


class _Flattener:
    def __init__(self) -> None:
        self._arrays: list[NamedArray] = []
        self._indices: dict[int, int] = {}
        self._open: set[int] = set()

    def run(self, state: Any) -> Flat:
        return Flat(self._node(state, "state"), self._arrays)

    def _node(self, value: Any, path: str) -> Node:
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if abs(value) < _BIG else {"int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
        if kind is np.ndarray:
            return {"array": self._array(value, path)}
        if isinstance(value, np.generic):
            return {"scalar": self._array(np.asarray(value), path)}
        return self._container(value, path)

    def _container(self, value: Any, path: str) -> Node:
        if id(value) in self._open:
            raise UsageError(f"{path} contains itself, so it cannot be saved; break the circle")
        self._open.add(id(value))
        try:
            return self._members(value, path)
        finally:
            self._open.discard(id(value))

    def _members(self, value: Any, path: str) -> Node:
        kind = type(value)
        if kind is list:
            return [self._node(item, f"{path}.{index}") for index, item in enumerate(value)]
        if kind is tuple:
            return {"tuple": [self._node(item, f"{path}.{index}") for index, item in enumerate(value)]}
        if kind is dict:
            return {"dict": [[_key(key, path), self._node(item, f"{path}.{key}")] for key, item in value.items()]}
        if (fields := _record_fields(value)) is not None:
            return {"record": kind.__qualname__, "fields": {k: self._node(v, f"{path}.{k}") for k, v in fields.items()}}
        raise UsageError(
            f"{path}: {_name(value)} cannot be saved; a state is made of NumPy arrays and scalars, numbers, text and "
            f"None, with dict, list, tuple or dataclass around them{_hint(value)}"
        )

    def _array(self, array: Array, path: str) -> int:
        # The list keeps every array alive, so that no id is used twice.
        if id(array) not in self._indices:
            check_dtype(array, path)
            self._indices[id(array)] = len(self._arrays)
            self._arrays.append(NamedArray(path, array))
        return self._indices[id(array)]


class _Builder:
    def __init__(self, arrays: list[Array], types: dict[str, type]) -> None:
        self._arrays = arrays
        self._types = types

    def build(self, node: Node) -> Any:
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
                f"the checkpoint holds a {name}, and the default state given to restore() has none; "
                "give a default of the same classes as the state that was saved"
            )
        known = _field_names(cls)
        if set(fields) != known:
            raise UsageError(
                f"the checkpoint's {name} has the fields {sorted(fields)}, the program's has {sorted(known)}; "
                "the code has changed: start a new run, or keep the fields"
            )
        if issubclass(cls, tuple):
            return cls(**fields)
        record = cls.__new__(cls)
        for field, value in fields.items():
            object.__setattr__(record, field, value)  # also where the class is frozen
        return record

    _tags: dict[str, Callable[["_Builder", Any], Any]] = {
        "array": lambda self, index: self._arrays[index],
        "scalar": lambda self, index: self._arrays[index][()],
        "int": lambda _, text: int(text, 16),
        "float": lambda _, text: struct.unpack(">d", bytes.fromhex(text))[0],
        "tuple": lambda self, items: tuple(self.build(item) for item in items),
        "dict": lambda self, items: {key: self.build(item) for key, item in items},
    }


def _key(key: Any, path: str) -> str | int:
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


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _hint(value: Any) -> str:
    if hasattr(value, "detach"):
        return "; for a tensor give tensor.detach().cpu().numpy()"
    if isinstance(value, np.random.Generator):
        return "; for a generator give generator.bit_generator.state"
    return "; leave it out, or give what it can be made from again"
