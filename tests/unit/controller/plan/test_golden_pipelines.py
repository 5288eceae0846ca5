"""Every compiled example can be pruned, wherever its run stopped."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.compiled import History
from support.memory import MemoryStore
from tiphys_controller.plan.dag import Graph, Task, references, template_names
from tiphys_controller.plan.prune import Identity, prune
from tiphys_controller.submit.planner import Planned, planned

from tiphys.protocol import fan_out
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest
from tiphys.protocol.step_spec import StepSpec
from tiphys.records import RunRecord, item_step
from tiphys.store import RunLayout

RUN = "digits-1"
GOLDEN = Path(__file__).parents[4] / "examples" / "golden"


def workflow_of(path: Path) -> Manifest | None:
    """The Workflow of a golden file; a CronWorkflow holds one without its annotations."""
    document: Manifest = yaml.safe_load(path.read_text())
    return document if document["kind"] == "Workflow" else None


CASES = [path for path in sorted(GOLDEN.glob("*.yaml")) if workflow_of(path)]


def finish(history: History, task: Any, spec: StepSpec) -> None:
    """Record a task as done, with a value for everything that it declares."""
    parameters = dict.fromkeys(spec.parameters, '["a", "b"]')
    artifacts = dict.fromkeys(spec.artifacts, b"made")
    if not task.fan_out:
        history.done(task.name, parameters=parameters, artifacts=artifacts)
        return
    made = {"name": task.name, **task.body}
    if "withParam" in made:
        made["withParam"] = '["a", "b"]'
    for value in fan_out.values(made):
        text = value if isinstance(value, str) else str(value).replace("'", '"')
        history.done(item_step(task.name, text, 0), parameters=parameters, artifacts=artifacts)


def stopped_after(manifest: Manifest, done: int) -> Planned:
    store = MemoryStore()
    record = RunRecord(run=RUN, pipeline="x", workflow=manifest, digest="d")
    store.create(RunLayout(RUN).record, record.to_bytes())
    history = History(store, RUN)
    for task in list(Graph.of(CompiledPipeline.from_manifest(manifest)).tasks.values())[:done]:
        if task.spec:
            finish(history, task, task.spec)
    return planned(store, RUN)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_every_example_can_be_pruned_wherever_it_stopped(path: Path) -> None:
    manifest = workflow_of(path)
    assert manifest is not None
    tasks = Graph.of(CompiledPipeline.from_manifest(manifest)).tasks
    for done in range(len(tasks)):
        found = stopped_after(manifest, done)

        pruned = prune(found.pipeline, found.plan, lambda key: key, Identity(RUN, 2, "digits-1-2", "default"))

        left = CompiledPipeline.from_manifest(pruned).tasks()
        names = {task["name"] for task in left}
        assert set(tasks) - names == set(list(tasks)[:done]) - kept(tasks)
        assert {reference.task for task in left for reference in references(task)} <= names
        templates = {one["name"] for one in pruned["spec"]["templates"]}
        assert set(template_names(pruned["spec"]["templates"])) | {"tiphys-finalize"} <= templates


def kept(tasks: Mapping[str, Task]) -> set[str]:
    """Tasks that run again though they are done: those without cache, plain ones, and what is behind them."""
    found: set[str] = set()
    for name, task in tasks.items():
        if task.spec is None or not task.spec.cache or task.needs & found:
            found.add(name)
    return found
