"""Measures the progress of a gated task: one step, or all items of its fan-out.

The recorded manifest holds the items, or names their source; their order there
is the order of Argo's index, in which a fan-in reads them.
"""

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import FAN_OUT_FIELDS, Manifest, contains_tags, substitute_tags
from tiphys.protocol.fan_out import FanOutItem, assign_item_ids, format_item, item_values, step_display_name
from tiphys.recording.bindings import TaskOutputs, bind_references
from tiphys_controller.plan.dag import Task
from tiphys_controller.plan.step_state import AttemptId, StepState, StepStatus, describe_check


def resolve_fan_out_items(
    name: str, body: Manifest, parameters: Mapping[str, str], finished_outputs: Mapping[str, TaskOutputs]
) -> list[FanOutItem] | None:
    """Items of a fanned-out task, in order; None if they are known only at run time.

    ``finished_outputs`` are those of the finished tasks that it reads.
    """
    source: Manifest = {"name": name, **{field: body[field] for field in FAN_OUT_FIELDS if field in body}}
    bound = bind_references(source, finished_outputs, lambda key: key)
    by_tag = {f"workflow.parameters.{parameter}": value for parameter, value in parameters.items()}
    bound = substitute_tags(bound, by_tag.get)
    try:
        return None if contains_tags(bound) else list(_identify_items(name, json.dumps(list(item_values(bound)))))
    except UsageError:  # Argo reports the invalid items when it runs the task
        return None


@lru_cache(maxsize=16)
def _identify_items(name: str, items: str) -> tuple[FanOutItem, ...]:
    """`assign_item_ids`, cached: deciding repeats, and there may be thousands of items."""
    return tuple(assign_item_ids(name, json.loads(items)))


StepStateLookup = Callable[[str], StepState]
"""Returns the state of a step id."""


class ItemProgress(NamedTuple):
    """State of one item of a fan-out. ``item`` is its value; empty if only its step id is known."""

    step: str
    item: str
    state: StepState


class TaskProgress(NamedTuple):
    """State of a task, with the end records that hold its outputs if it is done."""

    status: StepStatus
    reason: str
    ends: tuple[AttemptId, ...] = ()
    unread_ends: frozenset[AttemptId] = frozenset()
    """End records that decide the state and are not read yet."""
    items: tuple[ItemProgress, ...] = ()
    has_all_items: bool = False
    """Whether ``items`` are all items of a fan-out, in their order, with their values."""


def measure_step_progress(step: str, step_state_of: StepStateLookup) -> TaskProgress:
    """Measure a task that is one step."""
    state = step_state_of(step)
    key = [(step, state.attempt)] if state.attempt is not None else []
    return TaskProgress(
        status=state.status,
        reason=state.reason,
        ends=tuple(key) if state.is_done else (),
        unread_ends=frozenset(key) if state.status is StepStatus.UNREAD else frozenset(),
    )


def measure_fan_out_progress(
    task: Task,
    step_state_of: StepStateLookup,
    started: list[str],
    parameters: Mapping[str, str],
    finished_outputs: Mapping[str, TaskOutputs],
) -> TaskProgress:
    """Measure a fanned-out task. It is done only if all of its items are known and done.

    ``started`` are step ids of items that have attempts, for a fan-out whose items are not known, and
    ``finished_outputs`` those of the finished tasks that it reads.
    """
    resolved = resolve_fan_out_items(task.name, task.body, parameters, finished_outputs)
    if resolved is None:
        started_items = tuple(ItemProgress(step, "", step_state_of(step)) for step in started)
        status = StepStatus.MISSING if started_items else StepStatus.NEVER_STARTED
        return TaskProgress(status, "its items are made by a step before it", items=started_items)
    items = tuple(ItemProgress(step, text, step_state_of(step)) for step, text in resolved)
    return TaskProgress(
        status=_combine_status(items),
        reason=_fan_out_reason(items),
        ends=tuple((item.step, item.state.attempt or 0) for item in items if item.state.is_done),
        unread_ends=frozenset(
            (item.step, item.state.attempt or 0) for item in items if item.state.status is StepStatus.UNREAD
        ),
        items=items,
        has_all_items=True,
    )


def _combine_status(items: tuple[ItemProgress, ...]) -> StepStatus:
    statuses = {item.state.status for item in items} or {StepStatus.NEVER_STARTED}
    if statuses in ({StepStatus.DONE}, {StepStatus.NEVER_STARTED}):
        return statuses.pop()
    return next(
        (status for status in (StepStatus.UNREAD, StepStatus.DAMAGED) if status in statuses), StepStatus.MISSING
    )


def _fan_out_reason(items: tuple[ItemProgress, ...]) -> str:
    if not items:
        return "it has no items"
    open_items = [item for item in items if not item.state.is_done]
    if not open_items:
        objects = sum(item.state.object_count for item in items)
        by_size = any(item.state.checked_by_size for item in items if item.state.object_count)
        return f"all {len(items)} items done{describe_check(objects, by_size)}"
    first = open_items[0]
    others = f" and {len(open_items) - 1} more" if len(open_items) > 1 else ""
    name = step_display_name(first.step, items.index(first))
    return f"{name} {format_item(first.item)}{others} of {len(items)} not done ({first.state.reason})"
