"""Which items a fanned-out task has, as far as storage can tell.

The recorded manifest holds the items, or names where they come from; their
order there is the order of Argo's index, in which a fan-in reads them.
"""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from tiphys.errors import UsageError
from tiphys.protocol.fan_out import FIELDS, values
from tiphys.protocol.pipeline import Manifest
from tiphys.records import item_hash, item_step
from tiphys_controller.binding import bind
from tiphys_controller.finished import TaskOutputs
from tiphys_controller.references import has_tags, substitute


class Item(NamedTuple):
    """One item: its step id, and its value as Argo puts it in place of ``{{item}}``."""

    step: str
    text: str


def items_of(
    name: str, body: Manifest, parameters: Mapping[str, str], finished: Mapping[str, TaskOutputs]
) -> list[Item] | None:
    """Items of a fanned-out task, in order; None where only a run can tell.

    Args:
        name: Name of the task.
        body: The task.
        parameters: Workflow parameters in force.
        finished: What the tasks before it left, as far as they are finished.
    """
    source: Manifest = {"name": name, **{field: body[field] for field in FIELDS if field in body}}
    known = bind(source, finished, lambda key: key)
    by_tag = {f"workflow.parameters.{parameter}": value for parameter, value in parameters.items()}
    known = substitute(known, by_tag.get)
    try:
        return None if has_tags(known) else _identified(name, [_text(value) for value in values(known)])
    except UsageError:  # the workflow itself will say so, where it stands
        return None


def _text(value: Any) -> str:
    """What takes the place of ``{{item}}``; `item_hash` knows the item however its JSON is spelled."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)


def _identified(name: str, texts: list[str]) -> list[Item]:
    """Equal items are interchangeable, so that any order of ordinals among them will do."""
    seen: Counter[str] = Counter()
    items = []
    for text in texts:
        kind = item_hash(text)
        items.append(Item(item_step(name, text, seen[kind]), text))
        seen[kind] += 1
    return items
