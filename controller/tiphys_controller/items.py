"""Which items a fanned-out task has, as far as storage can tell.

The recorded manifest holds the items, or names where they come from; their
order there is the order of Argo's index, in which a fan-in reads them.
"""

import json
from collections.abc import Mapping
from functools import lru_cache

from tiphys.errors import UsageError
from tiphys.protocol.fan_out import FIELDS, Item, identified, values
from tiphys.protocol.pipeline import Manifest
from tiphys_controller.binding import bind
from tiphys_controller.finished import TaskOutputs
from tiphys_controller.references import has_tags, substitute


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
