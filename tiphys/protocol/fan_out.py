"""Fan-outs as Argo makes them: which items there are, and how their outputs come together again.

Source: Argo Workflows v4.1 ``workflow/controller/operator.go`` (expandSequence,
processItem, processAggregateNodeOutputs).
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest, placeholders
from tiphys.records import check_step, item_hash

FIELDS = ("withItems", "withParam", "withSequence")
SWEEP_ANNOTATION = "sweep.tiphys.dev/"
"""Before the name of a task: an annotation of the Workflow that says how the items of its sweep came about."""
_FORMAT = re.compile(r"([^%]|%%)*%0?\d*[dxX]([^%]|%%)*")


class Item(NamedTuple):
    """One item: its step id, and its value as Argo puts it in place of ``{{item}}``."""

    step: str
    text: str


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


def written_items(task: Manifest) -> list[Item] | None:
    """The items of a fanned-out task, in their order; None where only a run can tell."""
    if not task.get("withItems") or any(placeholders(task["withItems"])):
        return None
    return identified(task["name"], values(task))


def given_by(text: str) -> dict[str, Any]:
    """What the item ``text`` gives to its step, by name; under ``item`` where it is no map."""
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    return value if isinstance(value, dict) else {"item": value}


def in_words(parameters: Mapping[str, Any]) -> str:
    """``lr=0.1 width=64``: an item as people know it."""
    return " ".join(f"{name}={value_text(value)}" for name, value in parameters.items())


def value_text(value: Any) -> str:
    """One value of an item, as its program gets it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def identified(name: str, found: Iterable[Any]) -> list[Item]:
    """The items of the task ``name`` whose values are ``found``, in their order.

    Equal items are interchangeable, so any order of ordinals among them will do.
    """
    seen: Counter[str] = Counter()
    items = []
    for text in map(_text, found):
        kind = item_hash(text)
        items.append(Item(check_step(f"{name}.{kind}.{seen[kind]}"), text))
        seen[kind] += 1
    return items


def _text(value: Any) -> str:
    """What takes the place of ``{{item}}``; `item_hash` knows the item however its JSON is spelled."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)


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
