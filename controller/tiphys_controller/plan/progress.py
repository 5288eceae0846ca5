"""How far a gated task of the DAG has come: one step, or all items of its fan-out.

Which items a fanned-out task has, as far as storage can tell.

The recorded manifest holds the items, or names where they come from; their
order there is the order of Argo's index, in which a fan-in reads them.
"""

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.fan_out import FIELDS, Item, identified, values
from tiphys_controller.plan.bindings import TaskOutputs, bind
from tiphys_controller.plan.dag import Task, has_tags, substitute
from tiphys_controller.plan.step_state import EndKey, Standing, Verdict


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
        return None if has_tags(known) else list(_identified(name, json.dumps(list(values(known)))))
    except UsageError:  # the workflow itself will say so, where it stands
        return None


@lru_cache(maxsize=16)
def _identified(name: str, found: str) -> tuple[Item, ...]:
    """`identified`, once for each list of items: a plan is made more than once, and there may be thousands."""
    return tuple(identified(name, json.loads(found)))


Judge = Callable[[str], Verdict]
"""The verdict on a step id."""


class ItemProgress(NamedTuple):
    """One item of a fan-out, as storage knows it. ``item`` is its value."""

    step: str
    item: str
    verdict: Verdict


class TaskProgress(NamedTuple):
    """Where a task stands, with the end records that hold its outputs if it is done."""

    standing: Standing
    reason: str
    ends: tuple[EndKey, ...] = ()
    unread: frozenset[EndKey] = frozenset()
    """End records that decide, and are not read yet."""
    items: tuple[ItemProgress, ...] = ()


def of_step(step: str, judge: Judge) -> TaskProgress:
    """Progress of a task that is one step."""
    verdict = judge(step)
    key = [(step, verdict.attempt)] if verdict.attempt is not None else []
    return TaskProgress(
        standing=verdict.standing,
        reason=verdict.reason,
        ends=tuple(key) if verdict.done else (),
        unread=frozenset(key) if verdict.standing is Standing.UNREAD else frozenset(),
    )


def of_fan_out(
    task: Task, judge: Judge, started: list[str], parameters: Mapping[str, str], finished: Mapping[str, TaskOutputs]
) -> TaskProgress:
    """Progress of a fanned-out task. It is done only if all of its items are known and done.

    Args:
        task: The task.
        judge: The verdict on a step id.
        started: Step ids of items that storage knows, for a fan-out whose items are not known.
        parameters: Workflow parameters in force.
        finished: What finished tasks before it left.
    """
    known = items_of(task.name, task.body, parameters, finished)
    if known is None:
        seen = tuple(ItemProgress(step, "", judge(step)) for step in started)
        reason = f"its items are made by a step before it; {_count(seen)} are done and will be taken over"
        return TaskProgress(Standing.NEVER if not seen else Standing.MISSING, reason, items=seen)
    items = tuple(ItemProgress(step, text, judge(step)) for step, text in known)
    return TaskProgress(
        standing=_standing(items),
        reason=_reason(items),
        ends=tuple((item.step, item.verdict.attempt or 0) for item in items if item.verdict.done),
        unread=frozenset(
            (item.step, item.verdict.attempt or 0) for item in items if item.verdict.standing is Standing.UNREAD
        ),
        items=items,
    )


def _standing(items: tuple[ItemProgress, ...]) -> Standing:
    found = {item.verdict.standing for item in items} or {Standing.NEVER}
    if found in ({Standing.DONE}, {Standing.NEVER}):
        return found.pop()
    return next((one for one in (Standing.UNREAD, Standing.DAMAGED) if one in found), Standing.MISSING)


def _reason(items: tuple[ItemProgress, ...]) -> str:
    if not items:
        return "it has no items"
    open_items = [item for item in items if not item.verdict.done]
    if not open_items:
        objects = sum(item.verdict.objects for item in items)
        verified = f", {objects} objects verified" if objects else ""
        return f"all {len(items)} items done{verified}"
    first = open_items[0]
    others = f" and {len(open_items) - 1} more" if len(open_items) > 1 else ""
    done = _count(items)
    adopted = f"; {done} done {'is' if done == 1 else 'are'} taken over" if done else ""
    return f"item {first.item}{others} of {len(items)} not done ({first.verdict.reason}){adopted}"


def _count(items: tuple[ItemProgress, ...]) -> int:
    return sum(item.verdict.done for item in items)
