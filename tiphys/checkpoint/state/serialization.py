"""Converts the state of a training to a JSON document and a list of arrays, bit for bit, and back.

A resumed run equals an uninterrupted one only if storage changes nothing: not
the sign of a NaN, the 128 bits of a random generator, or whether two layers
share one weight. A value that cannot be kept exactly is refused with its path
in the state, at the start of the program rather than at the first save.
"""

import contextlib
import gc
import json
import math
import re
import struct
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np

from tiphys.checkpoint.state.arrays import (
    Array,
    Form,
    NamedArray,
    allocate_array,
    describe_array,
    describe_dtype,
    find_dtype,
    find_owner,
    find_shared_memory,
    lay_out,
    view_of,
)
from tiphys.checkpoint.state.classes import (
    FACTORIES,
    ClassName,
    builtin_base,
    class_name,
    field_names,
    find_class,
    find_saved_class,
    get_attributes,
    set_attributes,
)
from tiphys.errors import UsageError

TreeNode = Any
"""JSON: scalars and lists represent themselves; any other value is an object whose first name is a tag, as ``dict``."""
Classes = Mapping[ClassName, type]

_MAX_JSON_INTEGER = 1 << 63
_MAX_DEPTH = 100
_MAX_INLINE_BYTES = 4096
_SURROGATE = re.compile("[\ud800-\udfff]")


class FlatState(NamedTuple):
    """A flattened state.

    Attributes:
        tree: Refers to the arrays and classes.
        arrays: Arrays that are stored; their elements are those of `to_contiguous`.
        forms: Their forms.
        views: Forms of the other arrays, each with index (``of``) and path of the array whose memory it shares.
        classes: Classes of its objects, in the order of their numbers in the tree.
    """

    tree: TreeNode
    arrays: list[NamedArray]
    forms: list[Form]
    views: list[Form]
    classes: dict[ClassName, type]

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes."""
        return sum(named.array.nbytes for named in self.arrays)

    def encode_document(self) -> bytes:
        """Encode everything except the content of the arrays as JSON."""
        document = {
            "format": 1,
            "state": self.tree,
            "arrays": self.forms,
            "views": self.views,
            "classes": [[*name, field_names(cls)] for name, cls in self.classes.items()],
        }
        return json.dumps(document, allow_nan=False).encode()


def flatten_state(state: Any, known: Classes | None = None) -> FlatState:
    """Flatten ``state`` without copying arrays.

    ``known`` are the classes of the program's default, where a restore looks before it looks in imported modules; None
    if ``state`` is that default.

    Raises:
        UsageError: a part of it cannot be saved exactly; the message names its path.
    """
    with _paused_collector():
        return _Flattener(known).run(state)


def read_document(document: bytes) -> tuple[TreeNode, list[Array]]:
    """Read the document of `FlatState.encode_document`.

    Returns:
        The content of the document, and allocated arrays of the right form without content.

    Raises:
        UsageError: another version of Tiphys wrote the document in a newer format.
    """
    content = json.loads(document)
    if content.get("format") != 1:
        raise UsageError(
            f"the checkpoint's state has format {content.get('format')!r}, this version of Tiphys reads format 1; "
            "use an image with the version that wrote it"
        )
    return content, [allocate_array(form) for form in content["arrays"]]


def unflatten_state(document: Any, arrays: list[Array], like: Any = None) -> Any:
    """Rebuild a state; the inverse of `flatten_state`.

    Classes are found in ``like``, a state of the same program, or in the modules that are imported.

    Raises:
        UsageError: a class of the state is in neither, or its fields have changed.
    """
    known = flatten_state(like).classes
    classes = [find_saved_class((module, name), fields, known) for module, name, fields in document["classes"]]
    arrays = [lay_out(array, form) for array, form in zip(arrays, document["arrays"], strict=True)]
    views = [view_of(arrays[form["of"]], form) for form in document["views"]]
    with _paused_collector():
        state = _Builder(arrays, views, classes).build(document["state"])
    for array, form in zip([*views, *arrays], [*document["views"], *document["arrays"]], strict=True):
        array.flags.writeable = "readonly" not in form
    return state


@contextlib.contextmanager
def _paused_collector() -> Iterator[None]:
    """Pause the collector of cycles, which would look at each of many new objects several times and free none."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _ArrayUse(NamedTuple):
    named: NamedArray
    dtype: str | list[str]
    node: dict[str, Any]
    """The node of the array in the tree, which is empty until it is known which arrays share memory."""


class _Flattener:
    def __init__(self, known: Classes | None) -> None:
        self._known = known
        self._uses: dict[int, _ArrayUse] = {}
        self._cells: dict[int, tuple[Array, str, dict[str, Any]]] = {}
        """Arrays without axes, of which a state may hold many; their elements are in the tree."""
        self._dtypes: dict[Any, str | list[str]] = {}
        self._codes: dict[type, str] = {}
        """Dtypes of types of NumPy scalars, so that a state may hold many of them."""
        self._classes: dict[type, int] = {}
        self._containers: dict[int, tuple[int, str, Any]] = {}
        self._count = 0
        self._open: set[int] = set()
        self._stored: dict[int, int] = {}
        self._arrays: list[NamedArray] = []
        self._forms: list[Form] = []

    def run(self, state: Any) -> FlatState:
        tree = self._node(state, "state")
        views = self._place_arrays()
        return FlatState(tree, self._arrays, self._forms, views, {class_name(cls): cls for cls in self._classes})

    def _node(self, value: Any, path: str) -> TreeNode:
        kind = type(value)
        if value is None or kind in (bool, str):
            # JSON joins two surrogates.
            is_plain = kind is not str or not _SURROGATE.search(value)
            return value if is_plain else {"utf-8": value.encode("utf-8", "surrogatepass").hex()}
        if kind in self._codes:
            return {self._codes[kind]: value.data.hex()}
        if kind is int:
            return value if abs(value) < _MAX_JSON_INTEGER else {"int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
        if kind is np.ndarray:
            return self._array(value, path)
        if isinstance(value, np.generic):
            return self._scalar(value, path)
        if kind is complex:
            return {"complex": struct.pack(">dd", value.real, value.imag).hex()}
        if kind is bytes:
            return {"bytes": self._bytes(value, path)}
        if isinstance(value, Enum) and kind.__members__.get(value.name) is value:
            return {"enum": [self._class(kind, path), value.name]}
        return self._container(value, path)

    def _container(self, value: Any, path: str) -> TreeNode:
        if id(value) in self._open:
            raise UsageError(f"{path} contains itself, so it cannot be saved; remove the cycle")
        if id(value) in self._containers and type(value) is not tuple:
            number, first_path, _ = self._containers[id(value)]
            return {"same": number, "path": first_path}
        if len(self._open) == _MAX_DEPTH:
            raise UsageError(f"{path}: a state of more than {_MAX_DEPTH} levels cannot be saved; flatten it")
        self._containers[id(value)] = self._count, path, value  # kept alive, so that Python reuses no id
        self._count += 1
        self._open.add(id(value))
        node = self._members(value, path)
        self._open.discard(id(value))
        return node

    def _members(self, value: Any, path: str) -> TreeNode:
        kind = type(value)
        if kind is list:
            return self._items(value, path)
        if kind is tuple:
            return {"tuple": self._items(value, path)}
        if kind is dict:
            return {"dict": self._pairs(value.items(), path)}
        if kind is bytearray:
            return {"bytearray": self._bytes(bytes(value), path)}
        if base := builtin_base(kind):
            return self._object(value, base, path)
        raise UsageError(
            f"{path}: {'.'.join(class_name(kind)).removeprefix('builtins.')} cannot be saved; a state is made of NumPy "
            "arrays and scalars, numbers, text, bytes, enum members and None in dicts, lists, tuples, their subclasses "
            f"and dataclasses{_conversion_hint(value)}"
        )

    def _items(self, items: Iterable[Any], path: str) -> list[TreeNode]:
        return [self._node(item, f"{path}.{index}") for index, item in enumerate(items)]

    def _pairs(self, pairs: Iterable[tuple[Any, Any]], path: str) -> list[list[TreeNode]]:
        return [[self._key(key, path), self._node(item, f"{path}.{key}")] for key, item in pairs]

    def _object(self, value: Any, base: Any, path: str) -> TreeNode:
        members = {name: self._node(item, f"{path}.{name}") for name, item in get_attributes(value).items()}
        node: dict[str, Any] = {"object": self._class(type(value), path), "attributes": members}
        if base in (list, tuple, deque):
            node["items"] = self._items(base.__iter__(value), path)
        elif base is not object:
            node["pairs"] = self._pairs(base.items(value), path)
        if base is deque:
            node["argument"] = value.maxlen
        elif base is defaultdict and (factory := value.default_factory):
            node["argument"] = getattr(factory, "__name__", "")
            if FACTORIES.get(node["argument"]) is not factory:
                raise UsageError(
                    f"{path}: a defaultdict with the factory {factory!r} cannot be saved; "
                    f"use one of {', '.join(FACTORIES)}, or save dict(...) of it"
                )
        return node

    def _class(self, cls: type, path: str) -> int:
        if cls not in self._classes:
            name = class_name(cls)
            if self._known is not None and (self._known.get(name) or find_class(name)) is not cls:
                raise UsageError(
                    f"{path}: the class {name[1]} cannot be found by its name in the module {name[0]}, so it cannot be "
                    "restored; define it at the top of a module, or put an instance into the default of restore()"
                )
            if name in map(class_name, self._classes):
                raise UsageError(f"{path}: the state holds two classes {'.'.join(name)}; rename one of them")
            self._classes[cls] = len(self._classes)
        return self._classes[cls]

    def _key(self, key: Any, path: str) -> TreeNode:
        if not _is_key(key):
            raise UsageError(
                f"{path}: key {key!r} cannot be saved; keys are text, numbers, None, enum members and tuples of them"
            )
        return self._node(key, path)

    def _scalar(self, value: Any, path: str) -> TreeNode:
        if isinstance(value, np.str_):  # an array of it, and str(value), lose zero characters at its end
            return {"numpy.str": str.__getitem__(value, slice(None))}
        if isinstance(value, np.bytes_):
            return {"numpy.bytes": value.hex()}
        form = self._dtype(value.dtype, path)
        if isinstance(form, str) and isinstance(value, np.number) and value.dtype.kind != "m":
            self._codes[type(value)] = form  # its dtype is always the same, unlike the unit of a timedelta
        content = value.tobytes().hex()
        return {form: content} if isinstance(form, str) else {"scalar": [form, content]}

    def _bytes(self, value: bytes, path: str) -> TreeNode:
        short = len(value) <= _MAX_INLINE_BYTES
        return value.hex() if short else self._array(np.frombuffer(value, dtype=np.uint8), path)

    def _dtype(self, dtype: "np.dtype[Any]", path: str) -> str | list[str]:
        if dtype.metadata is not None or dtype not in self._dtypes:  # equal dtypes may have other metadata
            self._dtypes[dtype] = describe_dtype(dtype, path)
        return self._dtypes[dtype]

    def _array(self, array: Array, path: str) -> TreeNode:
        if id(array) in self._cells:
            self._store_cell(id(array))
        if id(array) not in self._uses:
            dtype, node = self._dtype(array.dtype, path), {}
            if array.base is None and (cell := _cell(array, dtype)):
                node["cell"] = cell
                self._cells[id(array)] = array, path, node
                return node
            self._uses[id(array)] = _ArrayUse(NamedArray(path, array), dtype, node)
        return self._uses[id(array)].node

    def _store_cell(self, key: int) -> None:
        """Store an array without axes as other arrays are, since the state holds it twice or holds a view of it."""
        array, path, node = self._cells.pop(key)
        node.clear()
        self._uses[key] = _ArrayUse(NamedArray(path, array), self._dtype(array.dtype, path), node)

    def _place_arrays(self) -> list[Form]:
        """Decide where each array is stored, and return the forms of those that are views of another one."""
        for named, *_ in list(self._uses.values()):
            owner = find_owner(named.array)
            if id(owner) in self._cells:
                self._store_cell(id(owner))
            if isinstance(owner, bytearray) and id(owner) in self._containers:
                raise UsageError(f"{named.path} is a view of {self._containers[id(owner)][1]}, a bytearray; copy one")
        places: dict[int, tuple[NamedArray, Form]] = {}
        for memory in find_shared_memory([use.named for use in self._uses.values()]):
            places.update({index: (memory.base, form) for index, form in memory.views.items()})
        views: list[Form] = []
        bases = {id(base.array) for base, _ in places.values()}
        for index, (named, dtype, node) in enumerate(self._uses.values()):
            if index not in places and id(named.array) not in bases and (cell := _cell(named.array, dtype)):
                node["cell"] = cell  # a view of what the state does not hold
            elif index in places:
                base, form = places[index]
                node["view"] = len(views)
                number = self._store(base, self._dtype(base.array.dtype, named.path))
                views.append({"of": number, "path": base.path, **form})
            else:
                node["array"] = self._store(named, dtype)
        return views

    def _store(self, named: NamedArray, dtype: str | list[str]) -> int:
        if id(named.array) not in self._stored:
            self._stored[id(named.array)] = len(self._arrays)
            self._arrays.append(named)
            self._forms.append(describe_array(named.array, dtype))
        return self._stored[id(named.array)]


class _Builder:
    def __init__(self, arrays: list[Array], views: list[Array], classes: list[Any]) -> None:
        self._arrays = arrays
        self._views = views
        self._classes = classes
        self._containers: list[Any] = []
        """In the order of their numbers, which count from the outside to the inside."""
        self._dtypes: dict[str, np.dtype[Any]] = {}

    def build(self, node: TreeNode) -> Any:
        if isinstance(node, list):
            return self._fill([], node)
        if not isinstance(node, dict):
            return node
        tag, content = next(iter(node.items()))
        if tag[0] in "<>|":
            return self._element(tag, content)[0]
        return self._tags[tag](self, content, node)

    def _fill(self, container: Any, nodes: list[TreeNode]) -> Any:
        self._containers.append(container)
        container.extend(self.build(item) for item in nodes)
        return container

    def _dict(self, pairs: list[list[TreeNode]]) -> Any:
        container: dict[Any, Any] = {}
        self._containers.append(container)
        for key_node, node in pairs:
            key = self.build(key_node)
            container[key] = self.build(node)
        return container

    def _tuple(self, nodes: list[TreeNode]) -> Any:
        self._containers.append(None)  # nothing refers to a plain tuple by its number
        return tuple([self.build(item) for item in nodes])

    def _object(self, number: int, node: dict[str, Any]) -> Any:
        cls = self._classes[number]
        base: Any = builtin_base(cls)
        value: Any = None if base is tuple else base.__new__(cls)
        place = len(self._containers)
        self._containers.append(value)
        attributes = {name: self.build(item) for name, item in node["attributes"].items()}
        items = [self.build(item) for item in node.get("items", ())]
        pairs = [(self.build(key), self.build(item)) for key, item in node.get("pairs", ())]
        argument = node.get("argument")
        if base is tuple:
            self._containers[place] = value = tuple.__new__(cls, items)
        elif base is deque:
            deque.__init__(value, items, argument)
        elif base is list:
            list.extend(value, items)
        elif base is defaultdict:
            defaultdict.__init__(value, argument and FACTORIES[argument])
        for key, item in pairs:
            base.__setitem__(value, key, item)
        set_attributes(value, attributes)
        return value

    def _enum(self, number: int, name: str) -> Any:
        cls = self._classes[number]
        if name not in cls.__members__:
            raise UsageError(f"the checkpoint contains {cls.__name__}.{name}, which the program's {cls.__name__} lacks")
        return cls.__members__[name]

    def _bytes(self, content: TreeNode) -> bytes:
        found: bytes = bytes.fromhex(content) if isinstance(content, str) else self.build(content).tobytes()
        return found

    def _bytearray(self, content: TreeNode) -> bytearray:
        self._containers.append(found := bytearray(self._bytes(content)))
        return found

    def _element(self, form: str | list[str], content: str) -> Array:
        key = form if isinstance(form, str) else ".".join(form)
        if key not in self._dtypes:
            self._dtypes[key] = find_dtype(form)
        return np.frombuffer(bytes.fromhex(content), self._dtypes[key])

    _tags: dict[str, Callable[["_Builder", Any, dict[str, Any]], Any]] = {
        "array": lambda self, index, _: self._arrays[index],
        "view": lambda self, index, _: self._views[index],
        "cell": lambda self, content, _: self._element(*content.split()).reshape(()).copy(),
        "scalar": lambda self, content, _: self._element(*content)[0],
        "utf-8": lambda _, content, __: bytes.fromhex(content).decode("utf-8", "surrogatepass"),
        "numpy.str": lambda _, text, __: np.str_(text),
        "numpy.bytes": lambda _, text, __: np.bytes_(bytes.fromhex(text)),
        "int": lambda _, text, __: int(text, 16),
        "float": lambda _, text, __: struct.unpack(">d", bytes.fromhex(text))[0],
        "complex": lambda _, text, __: complex(*struct.unpack(">dd", bytes.fromhex(text))),
        "bytes": lambda self, content, _: self._bytes(content),
        "bytearray": lambda self, content, _: self._bytearray(content),
        "enum": lambda self, content, _: self._enum(*content),
        "same": lambda self, number, _: self._containers[number],
        "tuple": lambda self, items, _: self._tuple(items),
        "dict": lambda self, pairs, _: self._dict(pairs),
        "object": lambda self, number, node: self._object(number, node),
    }


_KEY_TYPES = (str, int, float, bool, complex, bytes, type(None))


def _cell(array: Array, dtype: str | list[str]) -> str:
    """The content of an array without axes, which is stored in the document; empty for others."""
    is_cell = array.ndim == 0 and array.flags.writeable and isinstance(dtype, str)
    return f"{dtype} {array.tobytes().hex()}" if is_cell else ""


def _is_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(map(_is_key, key))
    return (type(key) in _KEY_TYPES or isinstance(key, np.generic | Enum)) and bool(key == key)


def _conversion_hint(value: Any) -> str:
    if hasattr(value, "load_state_dict"):
        return "; for PyTorch pass capture(model, optimizer=…) of tiphys.checkpoint.adapters.pytorch"
    if hasattr(value, "detach"):
        return "; for a tensor pass tensor.detach().cpu().numpy()"
    if hasattr(value, "addressable_shards"):
        return "; for arrays of JAX pass capture(state) of tiphys.checkpoint.adapters.jax"
    if isinstance(value, np.random.Generator):
        return "; for a generator pass generator.bit_generator.state"
    if isinstance(value, np.ndarray):
        return "; pass numpy.array(...) of it, and its mask or the like beside it"
    if isinstance(value, set | frozenset):
        return "; pass sorted(...) of it, because a set has no order that could be kept"
    if isinstance(value, PurePath):
        return "; pass str(...) of it"
    return "; omit it, or save values from which it can be rebuilt"
