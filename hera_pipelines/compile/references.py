"""What templates and tasks say about each other in Argo's placeholders.

Names that compile gives; authors may not use them.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tiphys.protocol.compiled_workflow import Manifest, placeholders

RESERVED = "tiphys-"
FINALIZE = "tiphys-finalize"
EXIT = "tiphys-exit"
ITEM = "tiphys-item"
CHECKPOINT_VOLUME = "tiphys-checkpoints"


def pipeline_name(given: str | None, name: str | None, generate_name: str | None) -> str:
    """Name of a pipeline: as given, or what its Workflows are called; empty where nothing says."""
    return given or name or (generate_name or "").rstrip("-.")


def answer(name: str) -> str:
    """Input parameter of the run template that carries one of admit's answers."""
    return f"{RESERVED}{name}"


def parameter_artifact(name: str) -> str:
    """Artifact of the run template that carries the declared output parameter ``name``."""
    return f"{RESERVED}parameter-{name}"


@dataclass(frozen=True)
class StepNames:
    """Templates made for the step called ``step``; the wrapper bears the step's own name."""

    step: str

    @property
    def admit(self) -> str:
        return f"{self.step}-admit"

    @property
    def run(self) -> str:
        return f"{self.step}-run"

    @property
    def attempt(self) -> str:
        return f"{self.step}-attempt"

    @property
    def settle(self) -> str:
        return f"{self.step}-settle"

    @property
    def conclude(self) -> str:
        return f"{self.step}-conclude"


_WORKFLOW_PARAMETER = re.compile(r"""workflow\.parameters(?:\.([-\w]+)|\[\s*['"]([-\w]+)['"]\s*\])""")
_TASK = re.compile(r"""\btasks(?:\.([A-Za-z0-9][-\w]*)|\[\s*['"]([^'"]+)['"]\s*\])""")
_CONDITIONS = ("depends", "dependencies")


def workflow_parameters(part: Any) -> list[str]:
    """Names of the workflow parameters that ``part`` uses directly, sorted."""
    found = {dotted or quoted for tag, _ in placeholders(part) for dotted, quoted in _WORKFLOW_PARAMETER.findall(tag)}
    return sorted(found)


def tasks_used(part: Any) -> set[str]:
    """Names of the tasks that ``part`` asks for something."""
    return {dotted or quoted for tag, _ in placeholders(part) for dotted, quoted in _TASK.findall(tag)}


def fields_used(part: Any, fields: Iterable[str]) -> set[tuple[str, str]]:
    """(task, field) wherever ``part`` asks a task for one of ``fields``, in a plain tag or an expression."""
    wanted = re.compile(rf"{_TASK.pattern}\.({'|'.join(map(re.escape, fields))})\b")
    return {(dotted or quoted, field) for tag, _ in placeholders(part) for dotted, quoted, field in wanted.findall(tag)}


def add_dependencies(tasks: list[Manifest]) -> None:
    """Make each task wait for the tasks whose outputs it takes.

    Argo refuses a reference to a task that is not an ancestor; the author
    already said so by using the output.
    """
    _speak_one_way(tasks)
    lists = _uses_lists(tasks)
    waits = {task["name"]: _waits_for(task) for task in tasks}
    for task in tasks:
        body = {field: value for field, value in task.items() if field not in _CONDITIONS}
        used = tasks_used(body) & waits.keys() - {task["name"]}
        if missing := sorted(used - ancestors(task["name"], waits)):
            _wait_for(task, missing, lists)
            waits[task["name"]] |= set(missing)


def ancestors(name: str, waits: Mapping[str, set[str]]) -> set[str]:
    """All tasks that must be over before ``name`` starts; ``waits`` says for which ones each task waits."""
    found: set[str] = set()
    open_names = [name]
    while open_names:
        for parent in waits.get(open_names.pop(), set()) - found:
            found.add(parent)
            open_names.append(parent)
    return found


def _waits_for(task: Manifest) -> set[str]:
    named = re.findall(r"(?<![.\w-])[A-Za-z0-9][-\w]*", task.get("depends") or "")
    return set(task.get("dependencies") or []) | set(named)


def _uses_lists(tasks: list[Manifest]) -> bool:
    """Whether the DAG is written with ``dependencies``. Only then does Argo allow ``continueOn`` on its tasks."""
    lists = any(task.get("dependencies") or task.get("continueOn") for task in tasks)
    return lists and not any(task.get("depends") for task in tasks)


def _speak_one_way(tasks: list[Manifest]) -> None:
    """Argo refuses a DAG that uses both words; a list means the same as its names joined by ``&&``."""
    if any(task.get("depends") for task in tasks):
        for task in tasks:
            if names := task.pop("dependencies", None):
                _wait_for(task, names, lists=False)


def _wait_for(task: Manifest, names: list[str], lists: bool) -> None:
    if lists:
        task["dependencies"] = [*(task.get("dependencies") or []), *names]
    elif depends := task.get("depends"):
        simple = re.fullmatch(r"[-\w.&\s]+", depends)
        task["depends"] = " && ".join([depends if simple else f"({depends})", *names])
    else:
        task["depends"] = " && ".join(names)
