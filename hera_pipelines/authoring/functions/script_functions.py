"""Functions that the script of a step contains, as far as it calls them: how it reads parameters and writes outputs.

They use the standard library of Python 3.8 and `json`, `os`, `pathlib` and `shutil`, which each script imports. Their
parameters have no annotations, because a script does not have the names in these.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

import inspect
import json
import os
import pathlib
import shutil
from collections.abc import Iterable


def _read(name, read, text):
    try:
        return read(text)
    except (ValueError, TypeError) as error:
        raise SystemExit(f"parameter {name}: {error}") from None


def _any(text):
    # As Hera reads what has no annotation: as JSON if the text is valid JSON, else as text.
    try:
        return None if text == "<none>" else json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return text


def _same(value):
    return value


def _text(value):
    if isinstance(value, str):
        return value
    raise ValueError(f"{value!r} is no text")


def _bool(value):
    word = str(value).strip().lower()
    if word in ("true", "1", "yes", "on") or word in ("false", "0", "no", "off"):
        return word in ("true", "1", "yes", "on")
    raise ValueError(f"{value!r} is neither true nor false")


def _int(value):
    try:
        return int(str(value))
    except ValueError:
        try:
            number = float(str(value))
        except ValueError:
            number = 0.5
    if number.is_integer():
        return int(number)
    raise ValueError(f"{value!r} is no whole number")


def _float(value):
    try:
        return float(str(value))
    except ValueError:
        raise ValueError(f"{value!r} is no number") from None


def _made(module, name):
    def read(value):
        import importlib

        make = vars(importlib.import_module(module))[name.partition(".")[0]]
        for part in name.split(".")[1:]:
            make = getattr(make, part)
        try:
            return make(str(value))
        except (ValueError, ArithmeticError):
            raise ValueError(f"{value!r} is no {name.partition('.')[0]}") from None

    return read


def _literal(*choices):
    def read(value):
        same = [choice for choice in choices if type(choice) is type(value) and choice == value]
        for choice in same or choices:
            if same or (not isinstance(choice, str) and value in (str(choice), json.dumps(choice))):
                return choice
        raise ValueError(f"{value!r} is none of {', '.join(map(repr, choices))}")

    return read


def _optional(read_one, none):
    return lambda value: None if value is None or value == none else read_one(value)


def _union(*readers):
    # A value of JSON keeps its type, and so does the text of a number or truth value; else the first that takes it.
    def read(value):
        is_text = isinstance(value, str)
        taken: list[object] = []
        reasons = []
        for each in readers:
            try:
                result = each(value)
            except ValueError as error:
                reasons.append(str(error))
                continue
            if (
                json.dumps(result) == value
                if is_text and isinstance(result, (bool, int, float))
                else type(result) is type(value)
            ):
                return (taken or [result])[0] if is_text and isinstance(result, str) else result
            taken.append(result)
        if not taken:
            raise ValueError("; ".join(reasons))
        return taken[0]

    return read


def _json(value, kind, name):
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        found = None
    if isinstance(found, kind):
        return found
    raise ValueError(f"{value!r} is no JSON {name}")


def _list(read_one, make):
    return lambda value: make([read_one(element) for element in _json(value, list, "list")])


def _tuple(*readers):
    def read(value):
        values = _json(value, list, "list")
        if len(values) != len(readers):
            raise ValueError(f"{value!r} has {len(values)} values in place of {len(readers)}")
        return tuple(each(element) for each, element in zip(readers, values))  # noqa: B905  Python 3.9 has no strict=

    return read


def _dict(read_key, read_value):
    return lambda value: {read_key(key): read_value(member) for key, member in _json(value, dict, "object").items()}


def _plain(value):
    for name in ("tolist", "isoformat", "model_dump"):
        if hasattr(value, name):
            return getattr(value, name)()
    if isinstance(value, (set, frozenset)):
        return list(value)
    if hasattr(value, "__dataclass_fields__"):
        return {name: getattr(value, name) for name in value.__dataclass_fields__}
    if type(value).__module__.partition(".")[0] in ("decimal", "pathlib", "uuid"):
        return str(value)
    raise TypeError(f"a value of the type {type(value).__name__} cannot be handed on; hand on what JSON has")


def _written(value, none):
    if value is None or isinstance(value, str):
        return none if value is None else value
    text = json.dumps(value, default=_plain)
    return json.loads(text) if text.startswith('"') else text


def _parts(values, count):
    if not isinstance(values, (tuple, list)) or len(values) != count:
        found = len(values) if isinstance(values, (tuple, list)) else 1
        raise SystemExit(f"the function returned {found} values, and its annotation names {count} outputs")
    return values


def _keep(variable, path, value, none="null"):
    target = pathlib.Path(os.environ.get(variable, path))
    target.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(value, os.PathLike):
        source = pathlib.Path(value)
        if source.resolve() != target.resolve():
            shutil.copytree(source, target) if source.is_dir() else shutil.copyfile(source, target)
    elif isinstance(value, bytes):
        target.write_bytes(value)
    else:
        # Argo takes two opening braces of an output parameter for a tag, also after it has inserted the value.
        text = _written(value, none)
        target.write_text(text if isinstance(value, str) else text.replace("{" * 2, "{\\u007b"))


def function_sources(names: Iterable[str]) -> str:
    """Source of the functions of this module that have these names, in the order of the names."""
    return "\n\n".join(inspect.getsource(globals()[name]) for name in sorted(names))
