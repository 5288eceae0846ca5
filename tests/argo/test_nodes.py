"""A node that is drained, and one that is lost without a word: the attempt moves to another and resumes there."""

from collections.abc import Iterator

import pytest
from support.story.pipelines import expected_version, story
from support.story.scenarios import check_starts, ended, version

from tiphys.kube.resources import NODES, PODS
from tiphys.records import Cause, Outcome

from .world import Workflow, World, command, evict

STEPS = 60


class SecondNode:
    """A node of its own for the training, beside the one that everything else runs on."""

    def __init__(self, world: World) -> None:
        if not world.settings.node:
            pytest.skip("a second node is needed: give a command as TIPHYS_ARGO_NODE")
        self._world = world
        self._command = world.settings.node.split()
        self.name = self.tell("start").strip().splitlines()[-1]

    def tell(self, what: str) -> str:
        return command([*self._command, what])

    def cordon(self, name: str, on: bool) -> None:
        self._world.api.patch(NODES, None, name, {"spec": {"unschedulable": on}})


@pytest.fixture
def node(world: World) -> Iterator[SecondNode]:
    second = SecondNode(world)
    try:
        yield second
    finally:
        second.tell("stop")


def training_on(world: World, node: SecondNode) -> tuple[Workflow, str]:
    """The story with its training on the second node, and the name of that pod."""
    affinity = {
        "nodeAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {
                    "weight": 100,
                    "preference": {
                        "matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [node.name]}]
                    },
                }
            ]
        }
    }
    pipeline = story(world.place, steps=STEPS, pause=0.5, train_options={"affinity": affinity})
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
    assert last.outcome is Outcome.DONE


def test_a_lost_node_is_given_up_and_the_attempt_moves(world: World, node: SecondNode) -> None:
    """Argo makes a pod again that is gone and never told its end, so the same attempt may go on in another pod."""
    workflow, _ = training_on(world, node)
    node.tell("lose")
    world.until("the node is found not to be ready", lambda: not ready(world, node.name))
    # What an administrator does once the machine is known to be off: Kubernetes itself never dares to.
    # In sidecar mode the agent pod of the Workflow may be among them.
    for lost in world.api.list(PODS, world.settings.namespace, fields=f"spec.nodeName={node.name}").items:
        world.api.delete(PODS, world.settings.namespace, lost["metadata"]["name"], grace=0)
    check_moved(workflow, node)
    *given_up, last = (ended(one) for one in workflow.attempts("train"))
    assert last.outcome is Outcome.DONE
    assert len(given_up) <= 1
    assert all(one.cause in (Cause.PREEMPTION, Cause.INFRASTRUCTURE) for one in given_up)


def ready(world: World, name: str) -> bool:
    found = world.api.get(NODES, None, name) or {}
    conditions = (found.get("status") or {}).get("conditions") or []
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
