"""Names that compile creates, and the references between tasks in Argo's placeholders.

Authors may not use the reserved names. Compile reads the references to add the
dependencies that Argo requires.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.step_spec import RESULT_PARAMETER
from tiphys.protocol.variables import Variable, find_variables, map_variables

RESERVED_PREFIX = "tiphys-"
FINALIZE = "tiphys-finalize"
EXIT_HANDLER = "tiphys-exit"
CHECKPOINT_VOLUME = "tiphys-checkpoints"


def pipeline_name(declared: str | None, name: str | None, generate_name: str | None) -> str:
    """Name of a pipeline: the declared one, else that of its Workflows; empty where there is neither."""
    return declared or name or (generate_name or "").rstrip("-.")


def admit_output_parameter(name: str) -> str:
    """Input parameter of the run template for the output ``name`` of admit."""
    return f"{RESERVED_PREFIX}{name}"


def parameter_artifact(name: str) -> str:
    """Output artifact of the run template for the declared output parameter ``name``."""
    return f"{RESERVED_PREFIX}parameter-{name}"


@dataclass(frozen=True)
class TemplateNames:
    """Names of the templates for ``step``; the wrapper has the name of the step."""

    step: str

    @property
    def admit(self) -> str:
        return f"{self.step}-admit"

    @property
    def run(self) -> str:
        return f"{self.step}-run"

    @property
    def conclude(self) -> str:
        return f"{self.step}-conclude"

    @property
    def all(self) -> tuple[str, ...]:
        """The names of all of them."""
        return self.step, self.admit, self.run, self.conclude


RESULT_FIELD = "outputs.result"
_DEPENDENCY_FIELDS = ("depends", "dependencies")


def tasks_used(part: Any) -> set[str]:
    """Names of the tasks that placeholders in ``part`` refer to."""
    return {variable.task for variable in find_variables(part) if variable.task}


def fields_used(part: Any, fields: Iterable[str]) -> set[tuple[str, str]]:
    """Return (task, field) for each reference in ``part`` to one of ``fields`` of a task, in a tag or an expression."""
    wanted = {field: tuple(field.split(".")) for field in fields}
    return {
        (variable.task, field)
        for variable in find_variables(part)
        for field, names in wanted.items()
        if variable.task and variable.names[2 : 2 + len(names)] == names
    }


def read_results_as_parameters(entry: Manifest, steps: Iterable[str]) -> None:
    """Turn ``outputs.result`` of these steps into their output parameter `RESULT_PARAMETER`."""
    names = set(steps)

    def change(variable: Variable) -> Sequence[str]:
        if variable.task not in names or variable.names[2:4] != ("outputs", "result"):
            return variable.names
        return (*variable.names[:3], "parameters", RESULT_PARAMETER, *variable.names[4:])

    for task in entry["dag"].get("tasks") or []:
        task.update(map_variables(task, change))
    if "outputs" in entry:
        entry["outputs"] = map_variables(entry["outputs"], change)


def add_dependencies(tasks: list[Manifest]) -> None:
    """Make each task depend on the tasks whose outputs it uses.

    Argo refuses a reference to a task that is not an ancestor. The use of an
    output already implies the dependency, so authors need not write it.
    """
    _convert_to_depends(tasks)
    lists = uses_dependency_lists(tasks)
    waits = {task["name"]: task_dependencies(task) for task in tasks}
    for task in tasks:
        body = {field: value for field, value in task.items() if field not in _DEPENDENCY_FIELDS}
        used = tasks_used(body) & waits.keys() - {task["name"]} - waits[task["name"]]
        if missing := sorted(used - task_ancestors(task["name"], waits)) if used else []:
            add_task_dependencies(task, missing, lists)
            waits[task["name"]] |= set(missing)


def task_ancestors(name: str, dependencies: Mapping[str, set[str]]) -> set[str]:
    """Return all tasks that must end before ``name`` starts; ``dependencies`` has the direct ones of each task."""
    ancestors: set[str] = set()
    unvisited = [name]
    while unvisited:
        for parent in dependencies.get(unvisited.pop(), set()) - ancestors:
            ancestors.add(parent)
            unvisited.append(parent)
    return ancestors


def task_dependencies(task: Manifest) -> set[str]:
    """Names of the tasks that ``task`` waits for."""
    names = re.findall(r"(?<![.\w-])[A-Za-z0-9][-\w]*", task.get("depends") or "")
    return set(task.get("dependencies") or []) | set(names)


def uses_dependency_lists(tasks: list[Manifest]) -> bool:
    """Whether the DAG uses ``dependencies``. Argo allows ``continueOn`` on its tasks only then."""
    lists = any(task.get("dependencies") or task.get("continueOn") for task in tasks)
    return lists and not any(task.get("depends") for task in tasks)


def _convert_to_depends(tasks: list[Manifest]) -> None:
    """Turn ``dependencies`` into ``depends`` where both occur: Argo refuses a mixed DAG, and ``&&`` means the same."""
    if any(task.get("depends") for task in tasks):
        for task in tasks:
            if names := task.pop("dependencies", None):
                add_task_dependencies(task, names, as_list=False)


def add_task_dependencies(task: Manifest, names: list[str], as_list: bool) -> None:
    """Make a task wait for others too; ``as_list`` in a DAG that uses dependency lists."""
    if as_list:
        task["dependencies"] = [*(task.get("dependencies") or []), *names]
    elif depends := task.get("depends"):
        simple = re.fullmatch(r"[-\w.&\s]+", depends)
        task["depends"] = " && ".join([depends if simple else f"({depends})", *names])
    else:
        task["depends"] = " && ".join(names)
