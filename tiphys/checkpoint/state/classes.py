"""Which objects a state may hold besides plain containers, and how their classes are found again.

A checkpoint is written by a program of a tenant, so reading one imports no
module and runs no code of a class: a class is looked up by name among the
modules that the program has imported, and its instances are made without
``__new__``, ``__init__`` and ``__setattr__``.
"""

import contextlib
import dataclasses
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from enum import Enum
from types import BuiltinFunctionType, MemberDescriptorType, ModuleType
from typing import Any

from tiphys.errors import UsageError

ClassName = tuple[str, str]
"""Module and qualified name of a class; other modules may have a class of the same name."""

BUILTIN_BASES = (object, tuple, list, dict, OrderedDict, defaultdict, deque)
FACTORIES = {factory.__name__: factory for factory in (int, float, bool, complex, str, bytes, list, dict, set, tuple)}
"""Functions that a ``defaultdict`` of a state may have."""

_HEAP_TYPE = 1 << 9
"""``Py_TPFLAGS_HEAPTYPE`` of CPython: the class was made at run time, such as by a ``class`` statement."""


def class_name(cls: type) -> ClassName:
    return cls.__module__, cls.__qualname__


def find_class(name: ClassName) -> type | None:
    """Return the class of this name in a module that is imported already; None if there is none."""
    found: Any = sys.modules.get(name[0])
    for part in name[1].split("."):
        found = vars(found).get(part) if isinstance(found, ModuleType | type) else None
    return found if isinstance(found, type) and class_name(found) == name else None


def builtin_base(cls: type) -> type | None:
    """Return the built-in class that holds the content of an instance of ``cls``; None if no state may hold one.

    Such are dataclasses, named tuples, and subclasses of list and dict, without a ``__del__``, which a checkpoint
    could run. An instance of any other class may have content that Python does not show.
    """
    base: Any = next(base for base in cls.__mro__ if not _is_python_class(base))
    has_form = dataclasses.is_dataclass(cls) if base is object else base is not tuple or hasattr(cls, "_fields")
    return base if base in BUILTIN_BASES and has_form and not hasattr(cls, "__del__") else None


def find_saved_class(name: ClassName, fields: list[str], known: Mapping[ClassName, type]) -> type:
    """Return the class of this name and these fields in a checkpoint; raises UsageError if the program has none."""
    cls = known.get(name) or find_class(name)
    if cls is None or not (issubclass(cls, Enum) or builtin_base(cls)):
        raise UsageError(
            f"the checkpoint contains a {name[1]} of the module {name[0]}, which neither the default of restore() nor "
            "an imported module has; import it before restore(), or pass a default with the same classes"
        )
    if fields != field_names(cls):
        raise UsageError(
            f"the checkpoint's {name[1]} has the fields {fields}, the program's has {field_names(cls)}; "
            "the code has changed: start a new run, or restore the fields"
        )
    return cls


def field_names(cls: Any) -> list[str]:
    """Return the names that a later version of the program may have changed."""
    if dataclasses.is_dataclass(cls):
        return sorted(field.name for field in dataclasses.fields(cls))
    return list(getattr(cls, "_fields", ())) if issubclass(cls, tuple) else []


def get_attributes(value: Any) -> dict[str, Any]:
    """Return all attributes of an instance, whether declared as fields or not."""
    attributes = {}
    for name, slot in _slots(type(value)).items():
        with contextlib.suppress(AttributeError):  # it was never set
            attributes[name] = slot.__get__(value)
    return attributes | getattr(value, "__dict__", {})


def set_attributes(value: Any, attributes: dict[str, Any]) -> None:
    """Set attributes of an instance that is just made, also of a frozen dataclass."""
    slots = _slots(type(value))
    for name, item in attributes.items():
        if name in slots:
            slots[name].__set__(value, item)
        else:
            value.__dict__[name] = item


def _slots(cls: type) -> dict[str, Any]:
    members = [vars(base).items() for base in reversed(cls.__mro__) if _is_python_class(base)]
    return {name: item for items in members for name, item in items if isinstance(item, MemberDescriptorType)}


def _is_python_class(cls: type) -> bool:
    # A class of an extension module may be made at run time too, but has a constructor in C.
    return bool(cls.__flags__ & _HEAP_TYPE) and not isinstance(vars(cls).get("__new__"), BuiltinFunctionType)
