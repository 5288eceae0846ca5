"""withItems, withParam and withSequence: one task becomes many."""

from typing import Any, NamedTuple

from hera_pipelines.local.gotext import go_json, go_text
from hera_pipelines.local.names import item_name
from hera_pipelines.local.scope import Variables
from tiphys.errors import UsageError
from tiphys.protocol.fan_out import FIELDS, is_fan_out, values
from tiphys.protocol.pipeline import Manifest

__all__ = ["Item", "is_fan_out", "items_of", "without_items"]


class Item(NamedTuple):
    """One item: the name its task gets, and what ``{{item}}`` stands for."""

    name: str
    variables: Variables


def without_items(task: Manifest) -> Manifest:
    """``task`` without what says that it stands for many."""
    return {key: value for key, value in task.items() if key not in FIELDS}


def items_of(task: Manifest) -> list[Item]:
    """The items of a task whose variables have been filled in.

    Raises:
        UsageError: withParam is not a JSON list, or withSequence has no end.
    """
    return [_item(task["name"], index, value) for index, value in enumerate(values(task))]


def _item(name: str, index: int, value: Any) -> Item:
    if value is None:
        raise UsageError(f"{name}: item {index} is null; use a text, number, list or map")
    if not isinstance(value, dict):
        text = go_json(value) if isinstance(value, list) else go_text(value)
        return Item(item_name(name, index, go_text(value)), {"item": text})
    label = ",".join(sorted(f"{key}:{go_text(field)}" for key, field in value.items()))
    fields = {f"item.{key}": go_text(field) for key, field in value.items()}
    return Item(item_name(name, index, label), {"item": go_json(value), **fields})
