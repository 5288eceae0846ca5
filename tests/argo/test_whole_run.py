"""validate → preprocess → train → register by `argo submit`, and the words that a person meets on the way."""

from support.stories.interrupted_training.pipelines import expected_version, story
from support.stories.interrupted_training.scenarios import ended, version

from tiphys.records import AttemptEndOutcome
from tiphys.store import read_submissions

from .world import World

STEPS = 12


def test_the_whole_story_is_green(world_in_each_mode: World) -> None:
    world = world_in_each_mode
    workflow = world.submit(story(world.place, steps=STEPS).compile())
    workflow.wait()

    assert version(world.store, workflow.run) == expected_version(STEPS)
    for step in ("validate", "preprocess", "train", "register"):
        assert [ended(attempt).outcome for attempt in workflow.attempts(step)] == [AttemptEndOutcome.DONE], step
    [submission] = read_submissions(world.store, workflow.run)
    assert submission.end is not None
    assert submission.end.status == "Succeeded"


def test_nodes_show_what_they_did(world_in_each_mode: World) -> None:
    world = world_in_each_mode
    workflow = world.submit(story(world.place, steps=STEPS).compile())
    workflow.wait()

    assert workflow.messages("train-admit") == ["Attempt 1 starts from the beginning"]
    assert workflow.messages("train-conclude") == ["Attempt 1 is done: 2 objects verified"]
    assert workflow.messages("preprocess-admit") == ["Attempt 1 runs"]
    assert {node.template for node in workflow.nodes() if "validate" in node.template} == {"validate"}
    assert workflow.messages("tiphys-finalize") == [f"Run {workflow.run}, submission 1: Succeeded"]
