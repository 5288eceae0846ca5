"""A node that is drained, and one that is lost without a word: the attempt moves to another and resumes there."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hera.workflows.models import Affinity, Toleration
from support.stories.interrupted_training.pipelines import expected_version, story
from support.stories.interrupted_training.scenarios import check_starts, ended, version

from hera_pipelines import Pipeline
from tiphys.kube.resources import NODES, PODS
from tiphys.records import AttemptEndOutcome, Cause

from .world import Workflow, World, command, evict

STEPS = 60
TAINT = "tiphys.dev/second-node-of-a-test"


class SecondNode:
    """A node of its own for the training, beside the one that everything else runs on; others are kept off."""

    def __init__(self, world: World) -> None:
        if not world.settings.node:
            pytest.skip("a second node is needed: give a command as TIPHYS_ARGO_NODE")
        self._world = world
        self._command = world.settings.node.split()
        self.name = self.tell("start").strip().splitlines()[-1]
        world.api.patch(NODES, None, self.name, {"spec": {"taints": [{"key": TAINT, "effect": "NoSchedule"}]}})

    def tell(self, what: str) -> str:
        return command([*self._command, what])

    def cordon(self, name: str, on: bool) -> None:
        self._world.api.patch(NODES, None, name, {"spec": {"unschedulable": on}})


@pytest.fixture
def node(connected: World) -> Iterator[SecondNode]:
    second = SecondNode(connected)
    try:
        yield second
    finally:
        second.tell("stop")


def rather_on(node: SecondNode) -> dict[str, Any]:
    """Options of a container, or of a Workflow, that prefer this node while there is one."""
    terms = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [node.name]}]}
    rule = "preferredDuringSchedulingIgnoredDuringExecution"
    affinity = {"nodeAffinity": {rule: [{"weight": 100, "preference": terms}]}}
    tolerated = Toleration(key=TAINT, operator="Exists", effect="NoSchedule")
    return {"affinity": Affinity.model_validate(affinity), "tolerations": [tolerated]}


def training_on(world: World, node: SecondNode) -> tuple[Workflow, str]:
    """The story with its training on the second node, and the name of that pod."""
    return began(world, node, story(world.place, steps=STEPS, pause=0.5, train_options=rather_on(node)))


def all_on(world: World, node: SecondNode) -> tuple[Workflow, str]:
    """The same with all pods of the Workflow there, the one that Argo makes for its plugin steps included."""
    place = replace(world.place, workflow={**world.place.workflow, **rather_on(node)})
    workflow, pod = began(world, node, story(place, steps=STEPS, pause=0.5))
    assert workflow.agent_pod()["spec"]["nodeName"] == node.name
    return workflow, pod


def began(world: World, node: SecondNode, pipeline: Pipeline) -> tuple[Workflow, str]:
    workflow = world.submit(pipeline.compile())
    pod = workflow.trains()
    [found] = [one for one in workflow.pods(step="train") if one["metadata"]["name"] == pod]
    assert found["spec"]["nodeName"] == node.name
    return workflow, pod


def check_moved(workflow: Workflow, node: SecondNode) -> None:
    workflow.wait()
    store = workflow.world.store
    assert version(store, workflow.run) == expected_version(STEPS)
    check_starts(store, workflow.run)
    assert workflow.went_on_from() is not None
    [last] = [pod for pod in workflow.pods(step="train") if pod["status"]["phase"] == "Succeeded"]
    assert last["spec"]["nodeName"] != node.name


def test_a_drained_node_lets_the_program_save_and_the_attempt_moves(world: World, node: SecondNode) -> None:
    workflow, pod = training_on(world, node)
    node.cordon(node.name, on=True)
    evict(world, pod)
    check_moved(workflow, node)
    first, last = (ended(one) for one in workflow.attempts("train"))
    assert (first.cause, first.exit_code) == (Cause.PREEMPTION, 75)
    assert last.outcome is AttemptEndOutcome.DONE


def test_a_lost_node_is_given_up_and_the_attempt_moves(world: World, node: SecondNode) -> None:
    """Argo makes a pod again that is gone and never told its end, so the same attempt may go on in another pod."""
    workflow, _ = training_on(world, node)
    lose(world, node)
    # What an administrator does once the machine is known to be off: Kubernetes itself never dares to.
    # In sidecar mode the agent pod of the Workflow may be among them.
    for lost in world.api.list(PODS, world.settings.namespace, fields=f"spec.nodeName={node.name}").items:
        world.api.delete(PODS, world.settings.namespace, lost["metadata"]["name"], grace_seconds=0)
    check_moved(workflow, node)
    check_given_up_at_most_once(workflow)


def test_an_agent_pod_that_a_lost_node_never_ends_is_replaced(world_in_sidecar_mode: World, node: SecondNode) -> None:
    world = world_in_sidecar_mode
    workflow, pod = all_on(world, node)
    lose(world, node)
    # Kubernetes asks for the end of all pods after some minutes, and waits for the node to confirm it.
    world.api.delete(PODS, world.settings.namespace, workflow.agent_pod()["metadata"]["name"])
    world.api.delete(PODS, world.settings.namespace, pod, grace_seconds=0)
    assert "its node has not ended it" in workflow.event_message("AgentPodDeleted")
    check_moved(workflow, node)
    check_given_up_at_most_once(workflow)


def lose(world: World, node: SecondNode) -> None:
    """End the node as a power cut would, and wait until that is known."""
    node.tell("lose")
    world.until("the node is found not to be ready", lambda: not ready(world, node.name))


def check_given_up_at_most_once(workflow: Workflow) -> None:
    *given_up, last = (ended(one) for one in workflow.attempts("train"))
    assert last.outcome is AttemptEndOutcome.DONE
    assert len(given_up) <= 1
    assert all(one.cause in (Cause.PREEMPTION, Cause.INFRASTRUCTURE) for one in given_up)


def ready(world: World, name: str) -> bool:
    found = world.api.get(NODES, None, name) or {}
    conditions = (found.get("status") or {}).get("conditions") or []
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
