"""Every compiled example can be pruned, wherever its run stopped."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.builders.compiled_workflows import History
from support.fakes.memory_store import MemoryStore
from tiphys_controller.plan.dag import Task, TaskGraph, find_template_names
from tiphys_controller.plan.prune import SubmissionIdentity, prune_workflow
from tiphys_controller.submit.planner import RunPlan, plan_stored_run

from tiphys.protocol import fan_out
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest
from tiphys.protocol.step_spec import StepSpec
from tiphys.recording.bindings import find_references
from tiphys.records import RunRecord, item_step_id
from tiphys.store import RunLayout

RUN = "digits-1"
GOLDEN = Path(__file__).parents[4] / "examples" / "golden"


# A CronWorkflow holds a Workflow without its annotations.
CASES = [
    path for path in sorted(GOLDEN.glob("*.yaml")) if re.search(r"^kind: Workflow$", path.read_text(), re.MULTILINE)
]


def finish(history: History, task: Any, spec: StepSpec) -> None:
    """Record a task as done, with a value for everything that it declares."""
    parameters = dict.fromkeys(spec.parameters, '["a", "b"]')
    artifacts = dict.fromkeys(spec.artifacts, b"made")
    if not task.is_fan_out:
        history.done(task.name, parameters=parameters, artifacts=artifacts)
        return
    made = {"name": task.name, **task.body}
    if "withParam" in made:
        made["withParam"] = '["a", "b"]'
    for value in fan_out.item_values(made):
        text = value if isinstance(value, str) else str(value).replace("'", '"')
        history.done(item_step_id(task.name, text, 0), parameters=parameters, artifacts=artifacts)


def stopped_after(manifest: Manifest, done: int) -> RunPlan:
    store = MemoryStore()
    record = RunRecord(run=RUN, pipeline="x", workflow=manifest, digest="d")
    store.create(RunLayout(RUN).run_record, record.to_bytes())
    history = History(store, RUN)
    for task in list(TaskGraph.from_pipeline(CompiledPipeline.from_manifest(manifest)).tasks.values())[:done]:
        if task.spec:
            finish(history, task, task.spec)
    return plan_stored_run(store, RUN)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_every_example_can_be_pruned_wherever_it_stopped(path: Path) -> None:
    manifest: Manifest = yaml.load(path.read_text(), yaml.CSafeLoader)
    tasks = TaskGraph.from_pipeline(CompiledPipeline.from_manifest(manifest)).tasks
    for done in range(len(tasks)):
        found = stopped_after(manifest, done)

        pruned = prune_workflow(
            found.pipeline, found.decisions, lambda key: key, SubmissionIdentity(RUN, 2, "digits-1-2", "default")
        )

        left = CompiledPipeline.from_manifest(pruned).tasks()
        names = {task["name"] for task in left}
        assert set(tasks) - names == set(list(tasks)[:done]) - kept(tasks)
        assert {reference.task for task in left for reference in find_references(task)} <= names
        templates = {one["name"] for one in pruned["spec"]["templates"]}
        assert set(find_template_names(pruned["spec"]["templates"])) | {"tiphys-finalize"} <= templates


def kept(tasks: Mapping[str, Task]) -> set[str]:
    """Tasks that run again though they are done: those without cache, plain ones, and what is behind them."""
    found: set[str] = set()
    for name, task in tasks.items():
        if task.spec is None or not task.spec.cache or task.needs & found:
            found.add(name)
    return found
