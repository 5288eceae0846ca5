"""The same compiled file by every road that Argo has: a run of its own each time, and no record shared."""

import copy
import uuid
from typing import Any

from hera.workflows import DAG, Artifact, Parameter
from hera.workflows.models import ValueFrom
from support.stories.interrupted_training.pipelines import Place, story
from support.stories.interrupted_training.scenarios import ended

from hera_pipelines import Pipeline, Step
from hera_pipelines.compile import cron_workflow, workflow_template
from tiphys.kube.resources import WORKFLOWS, Resource
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.records import SubmissionKind
from tiphys.store import read_submissions

from .world import Workflow, World

CRON_WORKFLOWS = Resource("argoproj.io", "v1alpha1", "cronworkflows", "CronWorkflow")
WORKFLOW_TEMPLATES = Resource("argoproj.io", "v1alpha1", "workflowtemplates", "WorkflowTemplate")


def compiled(world: World) -> Manifest:
    return story(world.place, steps=4, pause=0).compile()


def check_own_runs(*workflows: Workflow) -> None:
    """Each is submission 1 of a run of its own, and ran everything."""
    for workflow in workflows:
        workflow.wait()
    assert len({workflow.run for workflow in workflows}) == len(workflows)
    for workflow in workflows:
        [submission] = read_submissions(workflow.world.store, workflow.run)
        assert (submission.claim.kind, submission.claim.workflow_name) == (SubmissionKind.ORIGINAL, workflow.name)
        assert len(workflow.attempts("train")) == 1


def test_the_same_file_twice_makes_two_runs(world: World) -> None:
    manifest = compiled(world)
    check_own_runs(world.submit(copy.deepcopy(manifest)), world.submit(manifest))


def test_the_same_name_after_a_deletion_is_a_new_run(world: World) -> None:
    manifest = compiled(world)
    name = f"named-{uuid.uuid4().hex[:6]}"
    manifest["metadata"] = {**manifest["metadata"], "name": name}
    del manifest["metadata"]["generateName"]
    first = world.submit(copy.deepcopy(manifest))
    first.wait()
    assert first.run == name
    world.api.delete(WORKFLOWS, world.settings.namespace, name)
    world.until("the first workflow is gone", lambda: first.read() is None)
    second = world.submit(manifest)
    second.wait()
    assert second.run == f"{name}-{second.uid[:5]}"
    assert len(second.attempts("train")) == 1


def test_a_submission_from_a_template_is_a_run_of_its_own(world: World) -> None:
    template = workflow_template(compiled(world), f"story-{uuid.uuid4().hex[:6]}")
    name = template["metadata"]["name"]
    world.api.create(WORKFLOW_TEMPLATES, world.settings.namespace, template)
    try:
        check_own_runs(*(world.submitted("--from", f"workflowtemplate/{name}") for _ in range(2)))
    finally:
        world.api.delete(WORKFLOW_TEMPLATES, world.settings.namespace, name)


def test_a_firing_of_a_schedule_is_a_run_of_its_own(world: World) -> None:
    cron = cron_workflow(compiled(world), f"story-{uuid.uuid4().hex[:6]}", {"schedules": ["* * * * *"]})
    name = cron["metadata"]["name"]
    world.api.create(CRON_WORKFLOWS, world.settings.namespace, cron)
    try:
        fired = world.until("the schedule fires twice", lambda: firings(world, name, 2))
        world.api.patch(CRON_WORKFLOWS, world.settings.namespace, name, {"spec": {"suspend": True}})
        check_own_runs(*fired)
    finally:
        world.api.delete(CRON_WORKFLOWS, world.settings.namespace, name)


def firings(world: World, cron: str, count: int) -> list[Workflow]:
    found = world.api.list(WORKFLOWS, world.settings.namespace, f"workflows.argoproj.io/cron-workflow={cron}").items
    return [world.workflow(item["metadata"]["name"]) for item in found] if len(found) >= count else []


_WRITE = """
from pathlib import Path
def write(name, text):
    Path('/tmp/out').mkdir(exist_ok=True)
    Path('/tmp/out', name).write_text(text, encoding='utf-8')
"""


def sums(place: Place, source: str) -> Pipeline:
    """fetch makes a number and a file, double reads both, and show, which is not shared, reads all."""
    number = Parameter(name="n", value_from=ValueFrom(path="/tmp/out/n"))
    common: dict[str, Any] = {"image": place.image, "command": ["python", "-c"], "image_pull_policy": "IfNotPresent"}
    with Pipeline("sums", store=place.store, entrypoint="main", reuse=True, **place.workflow) as made:
        fetch = Step(
            name="fetch",
            args=[f"{_WRITE}write('data', '{source} ü'); write('n', '21')"],
            outputs=[number, Artifact(name="data", path="/tmp/out/data")],
            share=True,
            **common,
        )
        double = Step(
            name="double",
            args=[f"{_WRITE}write('m', str({{{{inputs.parameters.n}}}} * 2))"],
            inputs=[Parameter(name="n"), Artifact(name="data", path="/tmp/data")],
            outputs=[Parameter(name="m", value_from=ValueFrom(path="/tmp/out/m"))],
            share=True,
            **common,
        )
        values = "{{inputs.parameters.n}} {{inputs.parameters.m}} "
        show = Step(
            name="show",
            args=[f"{_WRITE}write('shown', '{values}' + Path('/tmp/data').read_text(encoding='utf-8'))"],
            inputs=[Parameter(name="n"), Parameter(name="m"), Artifact(name="data", path="/tmp/data")],
            outputs=[Parameter(name="shown", value_from=ValueFrom(path="/tmp/out/shown"))],
            **common,
        )
        with DAG(name="main"):
            data = Artifact(name="data", from_="{{tasks.fetch.outputs.artifacts.data}}")
            given = {"n": "{{tasks.fetch.outputs.parameters.n}}"}
            fetch()
            double(arguments=[given, data])
            show(arguments=[given, {"m": "{{=tasks.double.outputs.parameters.m}}"}, data], depends="double.Succeeded")
    return made


def test_a_pipeline_with_reuse_takes_over_what_another_run_shares(world: World) -> None:
    source = uuid.uuid4().hex
    manifest = sums(world.place, source).to_dict()
    first = world.submit(copy.deepcopy(manifest))
    first.wait()
    assert first.messages("tiphys-reuse")[0].startswith("Nothing is taken over")
    second = world.submit(manifest)
    second.wait()
    assert second.messages("tiphys-reuse") == [
        f"fetch is adopted from run {first.run}, step fetch, attempt 1; "
        f"double is adopted from run {first.run}, step double, attempt 1"
    ]
    assert [second.phases(step) for step in ("fetch", "double", "show")] == [["Skipped"], ["Skipped"], ["Succeeded"]]
    for workflow in (first, second):
        [shown] = ended(workflow.attempts("show")[0]).outputs
        assert shown.value == f"21 42 {source} ü"
