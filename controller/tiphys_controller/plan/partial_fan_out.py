"""A fan-out without gates of which only the missing items run.

Nothing in such a Workflow could take over a finished item, so the next Workflow has the
others alone. Its readers get one list of both: an expression of Argo puts the recorded
outputs and those of the items that run into the order of the items.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tiphys.protocol.compiled_workflow import FAN_OUT_FIELDS, Manifest, substitute_tags
from tiphys.protocol.fan_out import item_documents
from tiphys.recording.bindings import find_references, parse_reference
from tiphys_controller.plan.dag import Task
from tiphys_controller.plan.progress import ItemProgress

_LIST = "outputs.parameters"


class PartialOutputs(NamedTuple):
    """Outputs of the finished items of a fan-out, in the order of all items; None for an item that runs."""

    items: tuple[Mapping[str, str] | None, ...]


def choose_items(items: Sequence[ItemProgress]) -> tuple[int, ...]:
    """Positions of the items that run: those that are not done, and their equals, whose nodes nothing tells apart."""
    missing = {item.item for item in items if not item.state.is_done}
    return tuple(position for position, item in enumerate(items) if item.item in missing)


def can_read_partly(reader: Task, name: str) -> bool:
    """Whether all that a task reads of the fan-out ``name`` can be merged."""
    paths = [reference.path for reference in find_references(reader.body) if reference.task == name]
    return all(path == _LIST or path.startswith(f"{_LIST}.") or path == "status" for path in paths)


def can_be_merged(values: Mapping[str, str]) -> bool:
    """Whether Argo would insert these outputs of an item as they are: it takes double braces for a tag."""
    return not any("{{" in value for value in values.values())


def keep_items(body: Manifest, kept: Sequence[int]) -> Manifest:
    """The task with the items at the positions ``kept`` alone; its references must be resolved."""
    documents = item_documents(body)
    rest = {field: value for field, value in body.items() if field not in FAN_OUT_FIELDS}
    # As a text, because Argo keeps the spelling of the numbers in it.
    return {**rest, "withParam": "[" + ",".join(documents[position] for position in kept) + "]"}


def merge_outputs(body: Manifest, partial: Mapping[str, PartialOutputs]) -> Manifest:
    """The task with merged lists in the place of references to partly finished fan-outs."""

    def value_of(tag: str) -> str | None:
        reference = parse_reference(tag)
        outputs = partial.get(reference.task) if reference else None
        if reference is None or outputs is None or not reference.path.startswith(_LIST):
            return None
        return f"{{{{={_merge_expression(reference.task, reference.path, outputs)}}}}}"

    merged: Manifest = substitute_tags(body, value_of)
    return merged


def _merge_expression(task: str, path: str, outputs: PartialOutputs) -> str:
    """An expression for the list that Argo would have made of all items.

    Its size in nodes does not grow with the items, because expr-lang allows 10,000 nodes: a text of JSON holds each
    recorded output in a list of its own, and the position of each other item among those that run. Argo has no
    value of ``outputs.parameters`` in an expression, only of each name, whose elements are texts, or objects and lists
    if every item made such a document.
    """
    name = path.removeprefix(_LIST).removeprefix(".")
    done = [item for item in outputs.items if item is not None and (not name or name in item)]
    names = [name] if name else sorted({key for item in done for key in item})
    if not names:
        return "toJson([])"
    made = {key: f"made{number}" for number, key in enumerate(names)}
    lists = "".join(f"let {made[key]} = fromJSON(tasks[{task!r}].{_LIST}[{key!r}]); " for key in names)
    merged: list[int | list[Any]] = []
    running_items = itertools.count()
    for item in outputs.items:
        if item is None:
            merged.append(next(running_items))
        elif not name or name in item:
            merged.append([item[name] if name else dict(item)])
    recorded, running = "#[0]", _text_of(f"{made[names[0]]}[int(#)]")
    if not name:
        running = _object_of({key: _text_of(f"{made[key]}[int(#)]") for key in names})
    elif all(_is_document(item[name]) for item in done):
        recorded = f'type({made[name]}[0]) == "string" ? #[0] : fromJSON(#[0])'
        running = f"{made[name]}[int(#)]"
    text = _literal(json.dumps(merged, ensure_ascii=False))
    return f'{lists}toJson(map(fromJSON({text}), type(#) == "array" ? ({recorded}) : ({running})))'


def _text_of(element: str) -> str:
    """The text of an output, which stands in a list of documents as what it means."""
    return f'type({element}) == "string" ? {element} : toJson({element})'


def _object_of(values: Mapping[str, str]) -> str:
    """An object of these expressions, by way of its JSON: Argo's ``toJson`` takes no map that an expression made."""
    members = ' + "," + '.join(f"{_literal(json.dumps(key) + ':')} + toJson({value})" for key, value in values.items())
    return f"fromJSON({_literal('{')} + {members} + {_literal('}')})"


def _is_document(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict | list)
    except ValueError:
        return False


def _literal(text: str) -> str:
    """``text`` as a literal of an expression inside a tag, which the first two closing braces would end.

    expr-lang knows no surrogate pairs, so characters beyond ASCII stay as they are.
    """
    return json.dumps(text, ensure_ascii=False).replace("{", "\\u007b").replace("}", "\\u007d")
