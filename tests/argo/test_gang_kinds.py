"""The story with its training on four nodes whose members another controller makes, as far as the cluster has one.

| what happens | what must hold |
|---|---|
| nothing | every rank reads the input, the first one's outputs are the step's |
| one rank is deleted | all save, all end, preemption is the cause and names a rank, the next attempt goes on there |
| the program is broken | its error is the cause, and the run ends |
| `argo stop`, which writes that into the Workflow | no rank is left |
| a training of higher priority needs the GPUs | all save and go, and go on from there after it |
"""

import re
from dataclasses import replace

import pytest
from support.stories.interrupted_training.pipelines import story
from support.stories.interrupted_training.scenarios import MET_AT, ended

from tiphys.kube.gang_workloads import GANG_RESOURCES, GangPhase, gang_phase
from tiphys.kube.resources import CUSTOM_RESOURCE_DEFINITIONS, PODS, WORKFLOWS, Resource
from tiphys.protocol.gang import GANG_ACCOUNT, GangBackend, gang_name
from tiphys.records import AttemptEndOutcome, Cause

from .test_gangs import RANKS, STEPS, check_result, has_saved, members
from .world import Workflow, World

LONG = 4000
"""Steps of a training that goes on until it is stopped."""
ROLES = Resource("rbac.authorization.k8s.io", "v1", "roles", "Role")


@pytest.fixture(params=[backend for backend in GangBackend if backend is not GangBackend.JOB], ids=str)
def backend(request: pytest.FixtureRequest, world: World) -> GangBackend:
    """A kind that the cluster has and the chart allows; skips with one sentence otherwise."""
    kind: GangBackend = request.param
    resource, namespace = GANG_RESOURCES[kind], world.settings.namespace
    definition = f"{resource.plural}.{resource.group}"
    if world.api.get(CUSTOM_RESOURCE_DEFINITIONS, None, definition) is None:
        pytest.skip(f"the cluster has no {resource.kind}: {definition} is not defined")
    role = world.api.get(ROLES, namespace, GANG_ACCOUNT) or {"rules": []}
    if not any(resource.plural in rule["resources"] for rule in role["rules"]):
        pytest.skip(
            f"{GANG_ACCOUNT} of {namespace} may not create a {resource.kind}: see the values gangs.* of the chart"
        )
    return kind


def distributed(world: World, backend: GangBackend, fate: str = "", steps: int = STEPS, **training: object) -> Workflow:
    """The story, its training begun on four nodes by another controller."""
    # A TrainJob has no place for a pull policy; that of an image with a tag is IfNotPresent anyway.
    place = replace(world.place, options={})
    pipeline = story(
        place,
        steps=steps,
        pause=0.5,
        fate=fate,
        name=backend.value,
        training={"nodes": RANKS, **training},
        train_options={"backend": backend},
    )
    return world.submit(pipeline.compile())


def test_members_of_another_controller_make_what_one_pod_would(world: World, backend: GangBackend) -> None:
    workflow = distributed(world, backend)
    check_result(workflow)
    assert [ended(one).outcome for one in workflow.attempts("train")] == [AttemptEndOutcome.DONE]
    assert [pod["status"]["phase"] for pod in members(workflow)] == ["Succeeded"] * RANKS


def test_a_deleted_member_has_all_save_and_go_on_from_there(world: World, backend: GangBackend) -> None:
    workflow = distributed(world, backend)
    has_saved(workflow)
    world.api.delete(PODS, world.settings.namespace, members(workflow)[2]["metadata"]["name"])
    check_result(workflow)
    first, last = (ended(one) for one in workflow.attempts("train"))
    assert (first.cause, last.outcome) == (Cause.PREEMPTION, AttemptEndOutcome.DONE), first.message
    assert re.match(rf"rank \d of {RANKS}: ", first.message)
    start = workflow.attempts("train")[1].claim.starts_from
    assert start is not None
    assert start.global_step > 0


def test_an_error_of_a_members_program_ends_the_run(world: World, backend: GangBackend) -> None:
    workflow = distributed(world, backend, fate=f"error@{MET_AT}")
    workflow.wait("Failed")
    [only] = (ended(one) for one in workflow.attempts("train"))
    assert (only.cause, only.exit_code) == (Cause.USER_ERROR, 1), only.message
    assert re.match(rf"rank \d of {RANKS}: ", only.message)


def test_no_member_of_another_controller_outlives_a_stop(world: World, backend: GangBackend) -> None:
    workflow = distributed(world, backend)
    has_saved(workflow)
    world.api.patch(WORKFLOWS, world.settings.namespace, workflow.name, {"spec": {"shutdown": "Stop"}})
    world.until("all ranks are gone", lambda: not members(workflow), workflow.describe)
    name = gang_name(workflow.run, "train", 1)
    found = world.api.get(GANG_RESOURCES[backend], world.settings.namespace, name)
    assert found is None or gang_phase(found) is not GangPhase.ACTIVE


def test_a_higher_priority_has_all_members_save_and_go(world: World, backend: GangBackend) -> None:
    queue, quota = world.preempting_queue()
    if quota < RANKS:
        pytest.skip(f"a gang of {RANKS} needs as many GPUs: queue {queue} of TIPHYS_ARGO_PREEMPTING_QUEUE has {quota}")
    low = distributed(world, backend, steps=LONG, queue=queue, gpus=1)
    has_saved(low)
    training = {"queue": queue, "gpus": quota, "priority": 5}
    high = world.submit(story(world.place, steps=4, name="urgent", training=training).compile())
    high.wait()
    low.wait_for("the training goes on", lambda: len(low.attempts("train")) == 2)
    first, second = low.attempts("train")
    assert ended(first).cause is Cause.PREEMPTION, ended(first).message
    assert ended(first).preempted is not None
    assert second.claim.starts_from is not None
    world.api.patch(WORKFLOWS, world.settings.namespace, low.name, {"spec": {"shutdown": "Stop"}})
