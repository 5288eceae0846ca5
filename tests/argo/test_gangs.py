"""The story with its training on four nodes, which Argo only watches: it comes together, loses a part, and goes on.

| what happens | what must hold |
|---|---|
| nothing | every rank reads the input, the first one's outputs are the step's |
| one rank is deleted | all save, all end, preemption is the cause, the next attempt goes on there |
| the program of one rank is killed | all start theirs again in their pods |
| the pod that watches is lost | the attempt goes on, or its Job is deleted and the next one goes on |
| `argo stop`, `argo terminate`, deletion | no rank is left |
| a node with some of the ranks is lost | the attempt is given up, and the training moves |
| one node of an elastic training is lost, its first one too | the attempt goes on without it, and its end says so |
"""

import pytest
from hera.workflows.models import Affinity, Toleration
from support.stories.interrupted_training.pipelines import expected_version, story
from support.stories.interrupted_training.scenarios import check_starts, ended, version

from tiphys.kube import Object
from tiphys.kube.gang_workloads import GangPhase, gang_phase
from tiphys.kube.resources import JOBS, PODS, WORKFLOWS
from tiphys.protocol.gang import GANG_LABEL, MEMBER_LABEL, gang_name
from tiphys.records import AttemptEndOutcome, Cause

from .test_nodes import TAINT, SecondNode, check_given_up_as_lost, lose, node
from .world import Workflow, World, command

__all__ = ["node"]

RANKS = 4
STEPS = 60


def distributed(world: World, steps: int = STEPS, **options: object) -> Workflow:
    """The story, its training begun on four nodes."""
    pipeline = story(
        world.place, steps=steps, pause=0.5, name="gang", training={"nodes": RANKS}, train_options=options or None
    )
    return world.submit(pipeline.compile())


def members(workflow: Workflow, attempt: int = 1) -> list[Object]:
    """Pods of an attempt, by rank."""
    name = gang_name(workflow.run, "train", attempt)
    settings = workflow.world.settings
    labels = f"{GANG_LABEL}={name},{MEMBER_LABEL}=true"
    found = workflow.world.api.list(PODS, settings.namespace, labels=labels).items
    return sorted(found, key=lambda pod: pod["metadata"]["name"])


def node_of(pod: Object) -> str:
    """Name of the node that a pod of Argo runs; empty for the one that answers plugin steps."""
    return str((pod["metadata"].get("annotations") or {}).get("workflows.argoproj.io/node-name", ""))


def job(workflow: Workflow, attempt: int = 1) -> Object | None:
    return workflow.world.api.get(JOBS, workflow.world.settings.namespace, gang_name(workflow.run, "train", attempt))


def has_saved(workflow: Workflow, attempt: int = 1) -> None:
    workflow.wait_for("a checkpoint is saved", lambda: any(ref.attempt == attempt for ref in workflow.checkpoints()))
    assert len(members(workflow, attempt)) == RANKS


def check_result(workflow: Workflow) -> None:
    workflow.wait()
    assert version(workflow.world.store, workflow.run) == expected_version(STEPS)
    check_starts(workflow.world.store, workflow.run)


def test_a_training_on_four_nodes_makes_what_one_would(world_in_each_mode: World) -> None:
    workflow = distributed(world_in_each_mode)
    check_result(workflow)
    assert [ended(one).outcome for one in workflow.attempts("train")] == [AttemptEndOutcome.DONE]
    assert [pod["status"]["phase"] for pod in members(workflow)] == ["Succeeded"] * RANKS


def test_a_rank_that_is_deleted_has_all_save_and_go_on_from_there(world: World) -> None:
    workflow = distributed(world)
    has_saved(workflow)
    world.api.delete(PODS, world.settings.namespace, members(workflow)[2]["metadata"]["name"])
    check_result(workflow)
    first, last = (ended(one) for one in workflow.attempts("train"))
    assert (first.cause, last.outcome) == (Cause.PREEMPTION, AttemptEndOutcome.DONE)
    start = workflow.attempts("train")[1].claim.starts_from
    assert start is not None
    assert start.global_step > 0
    assert workflow.messages("train-conclude")[0].endswith(f"attempt 2 resumes from step {start.global_step}")


def test_members_are_started_again_in_their_pods_when_a_rank_is_killed(world: World) -> None:
    workflow = distributed(world)
    has_saved(workflow)
    pod = members(workflow)[1]["metadata"]["name"]
    where = ["--namespace", world.settings.namespace]
    # Process 1 ignores a SIGKILL from inside, so the program that it started is killed.
    kill = "import os, pathlib, signal; [os.kill(int(p.name), 9) for p in pathlib.Path('/proc').iterdir() "
    kill += "if p.name.isdigit() and int(p.name) not in (1, os.getpid())]"
    command(["kubectl", "exec", pod, *where, "--", "python", "-c", kill])
    check_result(workflow)
    [only] = (ended(one) for one in workflow.attempts("train"))
    assert (only.outcome, only.incarnations) == (AttemptEndOutcome.DONE, 2)


def test_a_training_without_a_watcher_goes_on_or_is_ended_before_the_next_attempt(world: World) -> None:
    """Argo makes a pod again that is gone and never told its end, and that finds the Job; or it gives the node up."""
    workflow = distributed(world)
    has_saved(workflow)
    [watcher] = [pod for pod in workflow.pods() if node_of(pod).endswith(".run") and "train" in node_of(pod)]
    world.api.delete(PODS, world.settings.namespace, watcher["metadata"]["name"], grace_seconds=0)
    check_result(workflow)
    *given_up, last = (ended(one) for one in workflow.attempts("train"))
    assert last.outcome is AttemptEndOutcome.DONE
    assert [one.cause for one in given_up] in ([], [Cause.INFRASTRUCTURE])
    assert all(job(workflow, attempt) is None for attempt in range(1, len(given_up) + 1))


@pytest.mark.parametrize("how", ["stop", "terminate", "delete"])
def test_no_rank_outlives_its_workflow(world: World, how: str) -> None:
    workflow = distributed(world)
    has_saved(workflow)
    if how == "delete":
        world.api.delete(WORKFLOWS, world.settings.namespace, workflow.name)
    else:
        world.argo(how, workflow.name)
    world.until("all ranks are gone", lambda: not members(workflow), workflow.describe)
    found = job(workflow)
    assert found is None or gang_phase(found) is not GangPhase.ACTIVE


def test_a_lost_node_is_given_up_and_the_training_moves(world: World, node: SecondNode) -> None:
    rule = "preferredDuringSchedulingIgnoredDuringExecution"
    apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {MEMBER_LABEL: "true"}}}
    affinity = Affinity.model_validate({"podAntiAffinity": {rule: [{"weight": 100, "podAffinityTerm": apart}]}})
    tolerated = Toleration(key=TAINT, operator="Exists", effect="NoSchedule")
    workflow = distributed(world, affinity=affinity, tolerations=[tolerated])
    has_saved(workflow)
    places = {pod["spec"]["nodeName"] for pod in members(workflow)}
    assert len(places) == 2, "some ranks are on the second node, some are not"
    lost_at = lose(node)
    check_result(workflow)
    check_given_up_as_lost(workflow, node, lost_at)
    assert job(workflow) is None


@pytest.mark.parametrize("lost", [3, 0])
def test_an_elastic_training_goes_on_with_the_nodes_that_are_left(world: World, lost: int) -> None:
    training = {"nodes": f"2:{RANKS}"}
    workflow = world.submit(story(world.place, steps=STEPS, pause=0.5, name="elastic", training=training).compile())
    has_saved(workflow)
    world.api.delete(PODS, world.settings.namespace, members(workflow)[lost]["metadata"]["name"])
    world.until("the member is gone", lambda: len(members(workflow)) == RANKS - 1, workflow.describe)
    check_result(workflow)
    [only] = (ended(one) for one in workflow.attempts("train"))
    # Where all meet, the programs are started again without it; of any other node torchrun takes care.
    assert (only.outcome, only.incarnations) == (AttemptEndOutcome.DONE, 1 if lost else 2)
    [verdict] = workflow.messages("train-conclude")
    assert verdict.startswith("Attempt 1 is done: ")
    assert f"; 3 of its {RANKS} nodes were left in the end" in verdict
