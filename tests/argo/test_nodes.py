"""A node that is drained, and one that is lost without a word: the attempt moves to another and resumes there."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from hera.workflows.models import Affinity, Toleration
from support.stories.interrupted_training.pipelines import expected_version, story
from support.stories.interrupted_training.scenarios import check_starts, ended, version

from hera_pipelines import Pipeline
from tiphys.kube.resources import NODES, PODS
from tiphys.records import AttemptEndOutcome, Cause, utc_now

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
    """Nobody deletes anything: Kubernetes would wait five minutes, and then for the word of the node."""
    workflow, _ = training_on(world, node)
    lost_at = lose(node)
    check_moved(workflow, node)
    check_given_up_as_lost(workflow, node, lost_at)


def test_an_agent_pod_on_a_lost_node_is_replaced(world_in_sidecar_mode: World, node: SecondNode) -> None:
    workflow, _ = all_on(world_in_sidecar_mode, node)
    before = workflow.agent_pod()["metadata"]["uid"]
    lost_at = lose(node)
    workflow.wait_for("another pod answers plugin steps", lambda: before not in agent_pods(workflow))
    check_moved(workflow, node)
    check_given_up_as_lost(workflow, node, lost_at)


def agent_pods(workflow: Workflow) -> set[str]:
    """Uids of the pods in which its plugin steps are answered; while it is replaced, there is none."""
    labels = f"workflows.argoproj.io/workflow={workflow.name},workflows.argoproj.io/component=agent"
    found = workflow.world.api.list(PODS, workflow.world.settings.namespace, labels=labels).items
    return {pod["metadata"]["uid"] for pod in found}


def lose(node: SecondNode) -> datetime:
    """End the node as a power cut would; when that was."""
    node.tell("lose")
    return utc_now()


def check_given_up_as_lost(workflow: Workflow, node: SecondNode, lost_at: datetime) -> None:
    """Also prints how long it took, which no test judges."""
    *given_up, last = workflow.attempts("train")
    assert ended(last).outcome is AttemptEndOutcome.DONE
    assert given_up
    for end in map(ended, given_up):
        assert end.cause is Cause.INFRASTRUCTURE
        assert f"no Lease of {node.name} was renewed for" in end.message
    moments = {"lost": ended(given_up[0]).ended_at, "next attempt": last.claim.written_at}
    took = {what: f"after {(at - lost_at).total_seconds():.0f} s" for what, at in moments.items()}
    print(f"\n{node.name} stopped: {took}", flush=True)  # noqa: T201  shown with -s, or if it fails
