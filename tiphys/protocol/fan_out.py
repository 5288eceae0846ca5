"""Fan-outs as Argo makes them: which items there are, and how their outputs come together again.

Source: Argo Workflows v4.1 ``workflow/controller/operator.go`` (expandSequence,
processItem, processAggregateNodeOutputs).
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tiphys.errors import UsageError
from tiphys.protocol.pipeline import Manifest

FIELDS = ("withItems", "withParam", "withSequence")
_FORMAT = re.compile(r"([^%]|%%)*%0?\d*[dxX]([^%]|%%)*")


def is_fan_out(task: Manifest) -> bool:
    """Whether ``task`` stands for many."""
    return any(task.get(field) for field in FIELDS)


def values(task: Manifest) -> list[Any]:
    """Values of the items of a task whose variables have been filled in, in the order of Argo's index.

    Raises:
        UsageError: withParam is not a JSON list, or withSequence has no end.
    """
    if task.get("withItems"):
        return list(task["withItems"])
    if task.get("withSequence"):
        return list(_sequence(task["name"], task["withSequence"]))
    try:
        found = json.loads(task["withParam"])
    except ValueError:
        found = None
    if not isinstance(found, list):
        raise UsageError(f"{task['name']}: withParam is not a JSON list: {task['withParam'].strip()[:200]!r}")
    return found


def aggregate(items: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """What a fan-in reads, by path below ``tasks.<name>``, from the output parameters of each item in order."""
    given = [dict(parameters) for parameters in items if parameters]
    lists: dict[str, list[str]] = {}
    for parameters in given:
        for name, value in parameters.items():
            lists.setdefault(name, []).append(value)
    return {
        "outputs.parameters": _json(given),
        **{f"outputs.parameters.{name}": _json(_unpacked(texts)) for name, texts in lists.items()},
    }


def _unpacked(texts: list[str]) -> list[Any]:
    """JSON objects and lists become part of the list, if all texts are such; otherwise all stay texts."""
    parsed: list[Any] = []
    for text in texts:
        try:
            parsed.append(json.loads(text))
        except ValueError:
            return texts
    return parsed if all(isinstance(value, dict | list) for value in parsed) else texts


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _sequence(name: str, sequence: Manifest) -> Iterator[str]:
    start = _integer(name, sequence.get("start", 0))
    if "end" in sequence:
        end = _integer(name, sequence["end"])
    elif "count" in sequence:
        count = _integer(name, sequence["count"])
        if count <= 0:
            return
        end = start + count - 1
    else:
        raise UsageError(f"{name}: withSequence needs end or count")
    pattern = sequence.get("format", "%d")
    if not _FORMAT.fullmatch(pattern):
        raise UsageError(f"{name}: withSequence format {pattern!r} must hold one %d or %x, such as 'host-%03d'")
    step = 1 if start <= end else -1
    for number in range(start, end + step, step):
        yield pattern % number


def _integer(name: str, value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name}: withSequence: {value!r} is not a whole number") from error
