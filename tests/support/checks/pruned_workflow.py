"""A small interpreter of an entry DAG, to tell whether a pruned Workflow means what the whole one meant.

It shares no code with the controller. A task that runs answers a digest of its
name and of everything that was put into it, so that one wrong input changes
everything behind it. Expressions of Argo are those of the local engine.
"""

import hashlib
import json
import re
from graphlib import TopologicalSorter
from typing import Any, NamedTuple

from hera_pipelines.local.expressions.expr import evaluate_expression, nest_variables
from tiphys.protocol.compiled_workflow import Manifest, is_fan_out
from tiphys.protocol.fan_out import aggregate_outputs

RESULTS = "Succeeded|Failed|Errored|Skipped|Omitted|Daemoned"


class Ended(NamedTuple):
    """How a task ended, what it was given, and its output parameter ``n`` (of each item, for a fan-out)."""

    status: str
    given: str = ""
    values: tuple[str, ...] = ()
    is_fan_out: bool = False


def interpret(tasks: list[Manifest], failing: frozenset[str], artifact_keys: dict[str, str]) -> dict[str, Ended]:
    """Run all tasks, which are called t0, t1 and so on. Those of ``failing`` fail whenever they run.

    Raises:
        KeyError: a task names another that is not there.
        ValueError: a task reads something that nobody made.
    """
    bodies = {task["name"]: task for task in tasks}
    order = TopologicalSorter({name: waits_for(body) for name, body in bodies.items()}).static_order()
    ended: dict[str, Ended] = {}
    for name in order:
        ended[name] = _run(bodies[name], ended, failing, artifact_keys)
    return ended


def waits_for(body: Manifest) -> set[str]:
    """Names of the tasks before it: those of its condition and those it reads."""
    named = re.findall(r"\b(t\d+)\b", body.get("depends", ""))
    read = re.findall(r"tasks\.(t\d+)\.", json.dumps(body.get("arguments", {})))
    return {*named, *read, *body.get("dependencies", ())}


def condition_holds(body: Manifest, ended: dict[str, Ended]) -> bool:
    """Whether a task starts, given how those before it ended."""
    text = " && ".join(body.get("dependencies", ())) or body.get("depends") or "True"
    text = re.sub(rf"\b(t\d+)(?:\.({RESULTS}))?", lambda match: str(_is(ended[match[1]].status, match[2])), text)
    text = text.replace("&&", " and ").replace("||", " or ").replace("!", " not ")
    return bool(eval(text))  # made of True, False and operators only


def _is(status: str, result: str | None) -> bool:
    return status == result if result else status in ("Succeeded", "Skipped", "Daemoned")


def _run(body: Manifest, ended: dict[str, Ended], failing: frozenset[str], artifact_keys: dict[str, str]) -> Ended:
    if not condition_holds(body, ended):
        return Ended("Omitted")
    given = json.dumps(_resolved(body.get("arguments", {}), ended, artifact_keys), sort_keys=True)
    if body["name"] in failing:
        return Ended("Failed", given)
    items = json.loads(body["withParam"]) if "withParam" in body else body.get("withItems", [""])
    values = tuple(_digest(f"{body['name']} {item} {given}") for item in items)
    return Ended("Succeeded", given, values, is_fan_out(body))


def _resolved(part: Any, ended: dict[str, Ended], artifact_keys: dict[str, str]) -> Any:
    if isinstance(part, list):
        return [_resolved(value, ended, artifact_keys) for value in part]
    if isinstance(part, dict) and "from" in part:
        source = re.fullmatch(r"\{\{tasks\.(\w+)\.outputs\.artifacts\.m\}\}", part["from"])
        assert source
        if ended[source[1]].status != "Succeeded":
            raise ValueError(part["from"])
        return {"name": part["name"], "s3": {"key": artifact_keys[source[1]]}}
    if isinstance(part, dict):
        return {name: _resolved(value, ended, artifact_keys) for name, value in part.items()}
    part = re.sub(r"\{\{=(.+?)\}\}", lambda match: _evaluated(match[1], ended), part)
    return re.sub(r"\{\{tasks\.(\w+)\.([a-z.]+)\}\}", lambda match: _value(ended[match[1]], match[2]), part)


def _evaluated(expression: str, ended: dict[str, Ended]) -> str:
    made = {name: aggregate_outputs([{"n": value} for value in task.values]) for name, task in ended.items()}
    scope = {f"tasks.{name}.{path}": value for name, paths in made.items() for path, value in paths.items()}
    return str(evaluate_expression(expression, nest_variables(scope)))


def _value(task: Ended, path: str) -> str:
    if path == "status":
        return task.status
    if task.status != "Succeeded":
        raise ValueError(path)
    return json.dumps(list(task.values), separators=(",", ":")) if task.is_fan_out else task.values[0]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
