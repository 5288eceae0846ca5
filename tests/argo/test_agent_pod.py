"""Sidecar mode has one agent pod for each Workflow; Argo neither deletes nor replaces one that failed."""

from support.stories.interrupted_training.pipelines import expected_version, story
from support.stories.interrupted_training.scenarios import version

from tiphys.kube.resources import PODS

from .world import World

STEPS = 40


def test_a_failed_agent_pod_is_removed_and_the_training_goes_on(world_in_sidecar_mode: World) -> None:
    world = world_in_sidecar_mode
    workflow = world.submit(story(world.place, steps=STEPS, pause=0.5).compile())
    workflow.trains()
    agent = workflow.agent_pod()["metadata"]["name"]
    # The kubelet then fails the pod itself, as it does when a node runs short of something.
    world.api.patch(PODS, world.settings.namespace, agent, {"spec": {"activeDeadlineSeconds": 1}})
    workflow.wait()
    assert version(world.store, workflow.run) == expected_version(STEPS)
