"""From a task or step as written to what is to be run: condition, references, items.

DAG tasks and steps follow the same rules; Argo holds two copies of them, in
``dag.go`` and ``steps.go``.
"""

from hera_pipelines.local.binding import resolve_arguments
from hera_pipelines.local.conditions import holds
from hera_pipelines.local.fanout import Item, is_fan_out, items_of, without_items
from hera_pipelines.local.scope import Scope
from hera_pipelines.local.substitute import replace_tags, substitute, substitute_all
from tiphys.errors import UsageError
from tiphys.protocol.pipeline import Manifest

EMPTY_FAN_OUT = "Skipped, empty params"
_ROOTS = ("steps", "tasks")


def expand(child: Manifest, scope: Scope) -> list[Manifest]:
    """What ``child`` stands for: itself, or one of each item, with nothing left to fill in.

    A child whose condition is already known to be false keeps its references:
    they may name what was never made, and it will not run.

    Raises:
        UsageError: a reference has no value, or the items cannot be read.
    """
    child = {**child, "when": replace_tags(child.get("when", ""), scope.values, _ROOTS)}
    if _never_runs(child):
        return _as_written(child)
    resolved = _resolve(child, scope)
    if not is_fan_out(child):
        return [resolved]
    return [_fill_in(resolved, item, scope) for item in items_of(resolved)]


def _never_runs(child: Manifest) -> bool:
    try:
        return not holds(child["when"])
    except UsageError:
        if is_fan_out(child):  # it may hold {{item}}
            return False
        raise


def _as_written(child: Manifest) -> list[Manifest]:
    """Children that will be skipped; where even their items are not known there are none."""
    if not is_fan_out(child):
        return [child]
    try:
        return [{**without_items(child), "name": item.name} for item in items_of(child)]
    except UsageError:
        return []


def _resolve(child: Manifest, scope: Scope) -> Manifest:
    rest = {key: value for key, value in child.items() if key not in ("arguments", "name", "when")}
    return {
        **substitute(rest, scope.values, _ROOTS),
        "name": child["name"],
        "when": child["when"],
        "arguments": resolve_arguments(child.get("arguments") or {}, scope),
    }


def _fill_in(child: Manifest, item: Item, scope: Scope) -> Manifest:
    filled: Manifest = substitute_all(without_items(child), {**scope.values, **item.variables})
    return {**filled, "name": item.name}
