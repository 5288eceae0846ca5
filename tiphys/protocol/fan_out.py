"""Argo's rules for fan-outs: expansion into items, and aggregation of their outputs.

Planner, local engine and sweeps must compute the same items as Argo, because a
step id contains a hash of its item, and a step key one of the texts of its
parameters. Source: Argo Workflows v4.1 ``workflow/controller/operator.go``
(expandSequence, processItem, processAggregateNodeOutputs), and Go's
``encoding/json``, which escapes ``<``, ``>`` and ``&`` for HTML.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import FAN_OUT_FIELDS, Manifest, contains_tags
from tiphys.records import check_step_id, item_hash, task_name

SWEEP_ANNOTATION = "sweep.tiphys.dev/"
"""Prefix of an annotation of the Workflow; followed by the name of a task, it describes how its items were chosen."""
_ARGO_ITEM = re.compile(r"([^(\[.]+)\(([0-9]{1,9}):(.*)\)", re.DOTALL)
_HTML_ESCAPES = str.maketrans({character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"})
_JSON_PARTS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s\[\]{},:"]+')
_FORMAT = re.compile(r"([^%]|%%)*%0?\d*[dxX]([^%]|%%)*")


class FanOutItem(NamedTuple):
    """One item: its step id, and its value as Argo substitutes it for ``{{item}}``."""

    step_id: str
    text: str


def item_values(task: Manifest) -> list[Any]:
    """Values of the items of a task, in the order of Argo's index. Its placeholders must be resolved.

    Raises:
        UsageError: withParam is not a JSON list, or withSequence is not valid.
    """
    if task.get("withItems"):
        return list(task["withItems"])
    if task.get("withSequence"):
        return list(_expand_sequence(task["name"], task["withSequence"]))
    try:
        values = json.loads(task["withParam"])
    except ValueError:
        values = None
    if not isinstance(values, list):
        raise UsageError(f"{task['name']}: withParam is not a JSON list: {task['withParam'].strip()[:200]!r}")
    return values


def item_documents(task: Manifest) -> list[str]:
    """The JSON text of each item of a task, as Argo holds it; raises like `item_values`.

    Argo keeps the spelling of ``withParam``, such as ``1e-3``. The API server has parsed ``withItems``.
    """
    values = item_values(task)
    if task.get("withItems") or task.get("withSequence"):
        return [go_json(value) for value in values]
    return split_json_list(compact_json(task["withParam"]))


def item_variables(document: str) -> tuple[str, dict[str, str]]:
    """The text of an item in the name of its node, and its ``{{item}}`` variables; ``document`` is its JSON text.

    Raises:
        UsageError: the item is null; the message is the end of a sentence.
    """
    match json.loads(document):
        case None:
            raise UsageError("null; use a text, number, list or map")
        case dict():
            members = split_json_object(document)
            fields = {key: _item_string(members[key]) for key in sorted(members)}
            label = ",".join(sorted(f"{key}:{field}" for key, field in fields.items()))
            text = "{" + ",".join(f"{go_json(key)}:{members[key]}" for key in fields) + "}"
            return label, {"item": text, **{f"item.{key}": field for key, field in fields.items()}}
        case list():
            return "[" + " ".join(map(_item_string, split_json_list(document))) + "]", {"item": document}
        case str() as value:
            return _item_string(document), {"item": value}
    return _item_string(document), {"item": _item_string(document)}


def _item_string(document: str) -> str:
    """Argo's ``Item.String``: the JSON of an item, of a string without its quotes, but with its other escapes."""
    text = document[1:-1] if document.startswith('"') else document
    return text.replace("\\u003c", "<").replace("\\u003e", ">").replace("\\u0026", "&")


def static_items(task: Manifest) -> list[FanOutItem] | None:
    """The items of a fanned-out task, in their order; None if they are only known at run time, or not valid."""
    source = [task[field] for field in FAN_OUT_FIELDS if task.get(field)]
    if not source or contains_tags(source):
        return None
    try:
        return assign_item_ids(task["name"], item_values(task))
    except UsageError:  # Argo reports the invalid items when it runs the task
        return None


def parse_item_parameters(text: str) -> dict[str, Any]:
    """Parameters of the item ``text``, by name; an item that is no map becomes the parameter ``item``."""
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    return value if isinstance(value, dict) else {"item": value}


def format_item_parameters(parameters: Mapping[str, Any]) -> str:
    """Format the parameters of an item for display: ``lr=0.1 width=64``."""
    return " ".join(f"{name}={format_item_value(value)}" for name, value in parameters.items())


def format_item(text: str) -> str:
    """Format an item for display: ``lr=0.1 width=64`` for a map, otherwise its value."""
    parameters = parse_item_parameters(text)
    return text if parameters.keys() == {"item"} else format_item_parameters(parameters)


@dataclass(frozen=True)
class ArgoItemName:
    """The parts of the name that Argo gives an item, such as ``fit(2:lr:0.1)``."""

    step: str
    index: int
    value: str

    @property
    def display_name(self) -> str:
        """The name that people read and type: ``fit[2]``."""
        return item_display_name(self.step, self.index)


def parse_argo_item_name(name: str) -> ArgoItemName | None:
    """The parts of ``name``; None if it is not the name that Argo gives an item."""
    match = _ARGO_ITEM.fullmatch(name)
    return ArgoItemName(match[1], int(match[2]), match[3]) if match else None


def find_item(instance: str) -> ArgoItemName | None:
    """The item that a node such as ``wf.fit(2:0.1)`` runs; None for the node of a step that is no item."""
    workflow = instance.partition("(")[0].rpartition(".")[0]
    return parse_argo_item_name(instance.removeprefix(f"{workflow}."))


def item_display_name(step: str, index: int) -> str:
    """Name of an item for people: ``fit[2]``. The index is that of Argo, from 0."""
    return f"{step}[{index}]"


def step_display_name(step: str, index: int | None) -> str:
    """The name that people read and type of the step id ``step``; ``index`` is that of its item, None without one."""
    return step if index is None else item_display_name(task_name(step), index)


def format_item_value(value: Any) -> str:
    """One value of an item, as its program receives it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def assign_item_ids(name: str, item_values: Iterable[Any]) -> list[FanOutItem]:
    """The items of the task ``name`` with the values ``item_values``, in their order.

    Equal items get ordinals in order of appearance; they are interchangeable.
    """
    next_ordinals: Counter[str] = Counter()
    items = []
    for text in map(_item_text, item_values):
        digest = item_hash(text)
        items.append(FanOutItem(check_step_id(f"{name}.{digest}.{next_ordinals[digest]}"), text))
        next_ordinals[digest] += 1
    return items


def _item_text(value: Any) -> str:
    """The text that replaces ``{{item}}``. `item_hash` normalizes it, so the JSON formatting does not matter."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)


def aggregate_outputs(items: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The aggregated outputs that a fan-in reads, by path below ``tasks.<name>``.

    ``items`` are the output parameters of each item, in the order of the items.
    """
    outputs = [dict(parameters) for parameters in items if parameters]
    lists: dict[str, list[str]] = {}
    for parameters in outputs:
        for name, value in parameters.items():
            lists.setdefault(name, []).append(value)
    return {
        "outputs.parameters": go_json(outputs),
        **{f"outputs.parameters.{name}": go_json(_parse_json_texts(texts)) for name, texts in lists.items()},
    }


def aggregate_results(results: Iterable[str]) -> str:
    """The aggregated ``outputs.result`` that a fan-in reads: what each item printed, as JSON if it is."""
    return "[" + ",".join(map(_result_document, results)) + "]"


def _result_document(text: str) -> str:
    """``text`` as a raw message of Go if it is JSON; other text, which Argo refuses, as a JSON string."""
    try:
        json.loads(text)
    except ValueError:
        return go_json(text)
    return compact_json(text)


def parse_go_json(text: str) -> Any:
    """Parse ``text`` as Go's ``json.Unmarshal`` does, whose numbers are floats.

    Raises:
        ValueError: it is no JSON, or a number is beyond a float.
    """
    return json.loads(text, parse_int=_go_float, parse_float=_go_float, parse_constant=_go_float)


def _parse_json_texts(texts: list[str]) -> list[Any]:
    """The parsed texts if all are JSON objects or lists; otherwise the texts."""
    parsed: list[Any] = []
    for text in texts:
        try:
            parsed.append(parse_go_json(text))
        except ValueError:
            return texts
    return parsed if all(isinstance(value, dict | list) for value in parsed) else texts


def _go_float(text: str) -> float:
    """The ``float64`` into which Go reads every number. Raises ``ValueError`` for one that Go refuses."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is no number of JSON")
    return value


def go_json(value: Any) -> str:
    """Format ``value`` as Go's ``json.Marshal`` does: compact, with sorted keys, Go's numbers and escapes for HTML."""
    return _go_json(value).translate(_HTML_ESCAPES)


def argo_text(value: Any) -> str:
    """The text that Argo makes of a value (``AnyString``): a text stays, and ``1.0`` is ``1``."""
    return value if isinstance(value, str) else go_json(value)


def _go_json(value: Any) -> str:
    match value:
        case dict():
            pairs = (f"{json.dumps(key, ensure_ascii=False)}:{_go_json(value[key])}" for key in sorted(value))
            return "{" + ",".join(pairs) + "}"
        case list():
            return "[" + ",".join(_go_json(element) for element in value) + "]"
        case float():
            return _go_number(value)
    return json.dumps(value, ensure_ascii=False)


def _go_number(value: float) -> str:
    if value == 0 or 1e-6 <= abs(value) < 1e21:
        return format(Decimal(repr(value)), "f").removesuffix(".0")
    mantissa, _, exponent = repr(value).partition("e")
    return f"{mantissa}e{'-' if exponent.startswith('-') else '+'}{exponent.lstrip('+-').lstrip('0')}"


def compact_json(text: str) -> str:
    """The JSON ``text`` as Go copies a raw message: without spaces and escaped for HTML, otherwise as it is spelt."""
    return "".join(_JSON_PARTS.findall(text)).translate(_HTML_ESCAPES)


def split_json_list(text: str) -> list[str]:
    """The texts of the elements of a list in compact JSON."""
    return ["".join(parts) for parts in _split_members(text)]


def split_json_object(text: str) -> dict[str, str]:
    """The texts of the values of an object in compact JSON, by key."""
    return {json.loads(key): "".join(parts) for key, _, *parts in _split_members(text)}


def _split_members(text: str) -> Iterator[list[str]]:
    """The parts of each element of a list, or of each key and value of an object."""
    depth, member = 0, list[str]()
    for part in _JSON_PARTS.findall(text[1:-1]):
        depth += (part in "[{") - (part in "]}")
        if part == "," and depth == 0:
            yield member
            member = []
        else:
            member.append(part)
    if member:
        yield member


def _expand_sequence(name: str, sequence: Manifest) -> Iterator[str]:
    pattern = sequence.get("format", "%d")
    if not _FORMAT.fullmatch(pattern):
        raise UsageError(f"{name}: withSequence format {pattern!r} must hold one %d or %x, such as 'host-%03d'")
    for number in sequence_numbers(name, sequence):
        yield pattern % number


def sequence_numbers(name: str, sequence: Manifest) -> range:
    """Numbers of the ``withSequence`` of the task ``name``, of which there may be too many to list.

    Raises:
        UsageError: the sequence has no end, or one that is not a whole number.
    """
    start = _parse_integer(name, sequence.get("start", 0))
    if "end" in sequence:
        end = _parse_integer(name, sequence["end"])
    elif "count" in sequence:
        count = _parse_integer(name, sequence["count"])
        if count <= 0:
            return range(0)
        end = start + count - 1
    else:
        raise UsageError(f"{name}: withSequence needs end or count")
    step = 1 if start <= end else -1
    return range(start, end + step, step)


def _parse_integer(name: str, value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name}: withSequence: {value!r} is not a whole number") from error
