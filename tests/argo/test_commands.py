"""What Argo's own commands do to a training with GPUs: what is on record and said, and that the GPUs come back.

| command | finalize runs | what goes on with the run, and where it is said |
|---|---|---|
| `argo stop` | yes: sealed as Failed | `tiphys resume`: Event |
| `argo terminate`, `kubectl delete workflow` | no | `tiphys resume`: Event |
| `argo retry` | | the verdict stands, and names `tiphys resume` |
| `argo resubmit` | | a new run |
"""

import pytest
from support.stories.interrupted_training.pipelines import story
from support.stories.interrupted_training.scenarios import ended

from tiphys.kube.resources import WORKFLOWS
from tiphys.records import AttemptEndOutcome
from tiphys.store import read_submissions

from .world import Workflow, World

STEPS = 400
"""More than any of these tests waits for."""


def training(world: World) -> Workflow:
    """The story on all GPUs of the queue, in the middle of its training."""
    queue, quota = world.queue()
    asked = {"gpus": quota, "queue": queue}
    workflow = world.submit(story(world.place, steps=STEPS, pause=0.5, training=asked).compile())
    workflow.trains()
    return workflow


def check_gpus_are_free(world: World) -> None:
    """Another training gets every GPU of the queue, once the pods before it are gone."""
    queue, quota = world.queue()
    asked = {"gpus": quota, "queue": queue}
    following = world.submit(story(world.place, steps=4, pause=0, training=asked).compile())
    following.wait()
    assert len(following.attempts("train")) == 1


def test_stop_lets_the_program_save_and_seals_the_run(world_in_each_mode: World) -> None:
    world = world_in_each_mode
    workflow = training(world)
    world.argo("stop", workflow.name)
    workflow.wait("Failed")
    [submission] = read_submissions(world.store, workflow.run)
    assert submission.end is not None
    assert submission.end.status == "Failed"
    assert f"go on with `tiphys resume {workflow.run} " in workflow.event_message("WorkflowStopped")
    check_gpus_are_free(world)


@pytest.mark.parametrize("how", ["terminate", "delete"])
def test_a_workflow_that_is_cut_off_gives_its_gpus_back(world_in_each_mode: World, how: str) -> None:
    world = world_in_each_mode
    workflow = training(world)
    run = workflow.run
    if how == "terminate":
        world.argo("terminate", workflow.name)
        workflow.wait("Failed")
        assert f"go on with `tiphys resume {run} " in workflow.event_message("WorkflowStopped")
    else:
        world.api.delete(WORKFLOWS, world.settings.namespace, workflow.name)
        assert f"go on with `tiphys resume {run} " in workflow.event_message("WorkflowDeleted")
    check_gpus_are_free(world)
    [submission] = read_submissions(world.store, run)
    assert submission.end is None


def test_retry_changes_no_verdict_and_names_what_does(world: World) -> None:
    workflow = world.submit(story(world.place, steps=12, fate="error@7").compile())
    workflow.wait("Failed")
    [verdict] = workflow.messages("train-conclude")
    assert f"tiphys resume {workflow.run}" in verdict
    before = [attempt.claim for attempt in workflow.attempts("train")]

    world.argo("retry", workflow.name)
    world.argo("stop", workflow.name)  # a workflow with a failed training attempt stays Running after `argo retry`
    workflow.wait("Failed")
    assert [attempt.claim for attempt in workflow.attempts("train")] == before
    assert [ended(attempt).outcome for attempt in workflow.attempts("train")] == [AttemptEndOutcome.FAILED]


def test_resubmit_is_a_new_run(world: World) -> None:
    first = world.submit(story(world.place, steps=4, pause=0).compile())
    first.wait()
    second = world.resubmitted(first)
    second.wait()
    assert second.run != first.run
    assert len(second.attempts("train")) == 1
    assert len(read_submissions(world.store, first.run)) == 1
