"""Names of steps and fan-out items as people read and type them: ``fit``, ``fit[2]``.

Records name an item by a hash of its value, which stays the same when items are
added, removed or reordered. People name it by its index in the fan-out, or by its
value. The Workflow lists the items of most fan-outs; of those that a step makes at
run time, the `ItemBinding` records hold index and value.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from tiphys.errors import IntegrityError, NotFoundError, ObjectMissingError, UsageError, unknown_name_message
from tiphys.protocol.compiled_workflow import CompiledPipeline, is_fan_out
from tiphys.protocol.fan_out import (
    FanOutItem,
    format_item,
    format_item_value,
    item_display_name,
    parse_argo_item_name,
    parse_item_parameters,
    static_items,
)
from tiphys.records import ItemBinding, item_hash, task_name
from tiphys.store import RunLayout, Store, read_record
from tiphys.store.runs import read_concurrently

_ITEM_ID = re.compile(r"(?<![\w.-])[a-z0-9][-a-z0-9]*\.[0-9a-f]{12}\.\d+(?!\w)", re.ASCII)
_BRACKETED = re.compile(r"([^(\[]+)\[(.*)\]", re.DOTALL)
_WORD = re.compile(r"[\w.+-]+")
_MAX_LISTED = 20


@dataclass(frozen=True)
class NamedItem:
    """One item of a fan-out. ``text`` is its value as Argo substitutes it for ``{{item}}``."""

    step_id: str
    step: str
    index: int
    text: str

    @property
    def name(self) -> str:
        """Its name for people, such as ``fit[2]``."""
        return item_display_name(self.step, self.index)

    @property
    def value(self) -> str:
        """Its value for people, such as ``lr=0.1 width=64``."""
        return format_item(self.text)

    @property
    def label(self) -> str:
        return f"{self.name} {self.value}"

    def has_value(self, wanted: str) -> bool:
        """Whether ``wanted`` is its value in any spelling, or holds some of its parameters: ``lr=0.1``."""
        if wanted in (self.text, self.value) or item_hash(wanted) == item_hash(self.text):
            return True
        own = {name: item_hash(format_item_value(value)) for name, value in parse_item_parameters(self.text).items()}
        pairs = (pair.partition("=") for pair in re.split(r"[\s,]+", wanted.strip()))
        return all(equals and own.get(name) == item_hash(value) for name, equals, value in pairs)


class StepNames:
    """Names of the steps and items of one run.

    Args:
        read_bindings: Reads the bindings of its items, of the newest submission last. Called at most once, and only
            for a name that the Workflow does not show.
    """

    def __init__(
        self, run: str, pipeline: CompiledPipeline, read_bindings: Callable[[], Iterable[ItemBinding]] = tuple
    ) -> None:
        self._run = run
        self._tasks = {task["name"]: task for task in pipeline.tasks()}
        self._read_bindings = read_bindings
        self._known: dict[str, list[FanOutItem]] = {}
        self._items: dict[str, Mapping[str, NamedItem]] = {}

    def add_items(self, step: str, items: Iterable[FanOutItem]) -> None:
        """Name the items of the fan-out ``step``, which are in the order of Argo's index."""
        self._known[step] = list(items)
        self._items.pop(step, None)

    @property
    def steps(self) -> Collection[str]:
        """Names of the steps, in the order of the Workflow."""
        return self._tasks.keys()

    def items(self, step: str) -> Collection[NamedItem]:
        """The known items of the fan-out ``step``, by index; none for other steps."""
        return self._items_by_id(step).values()

    def name(self, step_id: str) -> str:
        """The name for people; ``step_id`` itself if no record holds the index of the item."""
        item = self._find(step_id)
        return item.name if item else step_id

    def value(self, step_id: str) -> str:
        """The value of an item for people; empty for a step, and for an item whose value no record holds."""
        item = self._find(step_id)
        return item.value if item else ""

    def label(self, step_id: str) -> str:
        """Name and value, such as ``fit[2] lr=0.1``."""
        item = self._find(step_id)
        return item.label if item else step_id

    def sort(self, step_ids: Iterable[str]) -> list[str]:
        """Step ids in the order of the Workflow, items by index; unknown ones last."""
        order = {name: number for number, name in enumerate(self._tasks)}

        def position(step_id: str) -> tuple[int, float, str]:
            item = self._find(step_id)
            return order.get(task_name(step_id), len(order)), item.index if item else math.inf, step_id

        return sorted(step_ids, key=position)

    def readable(self, text: str) -> str:
        """``text`` with the names of items in place of their step ids."""
        return _ITEM_ID.sub(lambda match: self.name(match[0]), text)

    def resolve(self, text: str) -> str:
        """The step id that ``text`` names. The name of a fan-out stands for all of its items.

        An item is named by its index ``fit[2]``, otherwise by its value ``fit[0.1]`` or ``fit[lr=0.1]``, as Argo does
        ``fit(2:0.1)``, or by its step id.

        Raises:
            NotFoundError: there is no such step or item; the message lists what there is.
            UsageError: several items have this value.
        """
        if text in self._tasks:
            return text
        step = re.split(r"[.(\[]", text, maxsplit=1)[0]
        if step not in self._tasks:
            raise NotFoundError(unknown_name_message(f"run {self._run}", "step", text, self._tasks))
        if _ITEM_ID.fullmatch(text):
            return text
        found = _find_items(self.items(step), text)
        if len(found) > 1:
            raise UsageError(
                f"{text!r} names several items of run {self._run}: {_list_items(found)}; name one by its index"
            )
        if not found:
            raise NotFoundError(f"run {self._run} has no item {text!r}; {self._describe_items(step)}")
        return found[0].step_id

    def _describe_items(self, step: str) -> str:
        if not is_fan_out(self._tasks[step]):
            return f"{step} is not fanned out"
        items = self.items(step)
        return f"{step} has: {_list_items(items)}" if items else f"the items of {step} are made at run time"

    def _find(self, step_id: str) -> NamedItem | None:
        step, dot, _ = step_id.partition(".")
        return self._items_by_id(step).get(step_id) if dot else None

    def _items_by_id(self, step: str) -> Mapping[str, NamedItem]:
        task = self._tasks.get(step)
        if task is None or not is_fan_out(task):
            return {}
        if step not in self._items:
            known = self._known.get(step) or static_items(task)
            self._items[step] = self._bound_items.get(step, {}) if known is None else self._index_items(step, known)
        return self._items[step]

    def _index_items(self, step: str, items: list[FanOutItem]) -> Mapping[str, NamedItem]:
        ordered = enumerate(self._order_equal_items(step, items))
        return {item.step_id: NamedItem(item.step_id, step, index, item.text) for index, item in ordered}

    def _order_equal_items(self, step: str, items: list[FanOutItem]) -> list[FanOutItem]:
        """Order equal items, which take their step ids at run time, as their nodes are ordered in Argo."""
        if all(item.step_id.endswith(".0") for item in items):
            return items
        bound = {item.step_id: item.index for item in self._bound_items.get(step, {}).values()}
        unplaced: dict[str, list[FanOutItem]] = {}
        for item in sorted(items, key=lambda item: bound.get(item.step_id, len(items))):
            unplaced.setdefault(_without_ordinal(item.step_id), []).append(item)
        return [unplaced[_without_ordinal(item.step_id)].pop(0) for item in items]

    @cached_property
    def _bound_items(self) -> Mapping[str, Mapping[str, NamedItem]]:
        """Items by step and id. A submission that runs a part of a fan-out counts its items anew: the first index of
        an item is its name, unless two items had it, since then the fan-out was another one.
        """
        first: dict[str, NamedItem] = {}
        newest: dict[tuple[str, int], NamedItem] = {}
        for binding in self._read_bindings():
            if argo := parse_argo_item_name(binding.label):
                item = NamedItem(binding.step, argo.step, argo.index, binding.item)
                first.setdefault(item.step_id, item)
                newest[argo.step, argo.index] = item
        found: dict[str, dict[str, NamedItem]] = {}
        for step in {item.step for item in first.values()}:
            items = [item for item in first.values() if item.step == step]
            if len({item.index for item in items}) < len(items):
                items = [item for (name, _), item in newest.items() if name == step]
            found[step] = {item.step_id: item for item in sorted(items, key=lambda item: item.index)}
        return found


def _without_ordinal(step_id: str) -> str:
    """What the step ids of equal items share."""
    return step_id.rpartition(".")[0]


def _find_items(items: Iterable[NamedItem], text: str) -> list[NamedItem]:
    if argo := parse_argo_item_name(text):
        return [item for item in items if item.index == argo.index and _words(item.text) == _words(argo.value)]
    if match := _BRACKETED.fullmatch(text):
        by_index = [item for item in items if match[2] == str(item.index)]
        return by_index or [item for item in items if item.has_value(match[2])]
    return [item for item in items if text == _without_ordinal(item.step_id)]


def _words(text: str) -> list[str]:
    """The words of a value, however it is punctuated and its numbers are spelled."""
    return sorted(map(item_hash, _WORD.findall(text)))


def _list_items(items: Collection[NamedItem]) -> str:
    shown = ", ".join(item.label for item in list(items)[:_MAX_LISTED])
    return f"{shown} and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else shown


def selects_step(selected: str, step_id: str) -> bool:
    """Whether a resolved name selects a step: empty selects all, the name of a fan-out selects all its items."""
    return selected in ("", step_id, task_name(step_id))


def read_item_bindings(store: Store, run: str, submissions: Iterable[int]) -> list[ItemBinding]:
    """The bindings of all fan-out items of submissions, in the order of these numbers; damaged ones are left out.

    Costs a listing for each submission, and a read for each item.
    """
    layout = RunLayout(run)
    keys = [info.key for submission in submissions for info in store.list(layout.items(submission))]
    return [binding for binding in read_concurrently(lambda key: _read_binding(store, key), keys) if binding]


def _read_binding(store: Store, key: str) -> ItemBinding | None:
    try:
        return read_record(store, key, ItemBinding)
    except (IntegrityError, ObjectMissingError):
        return None  # its item keeps its step id for a name
