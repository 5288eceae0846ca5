"""Every part of the system killed in the middle of a training, alone and two at a time: nothing lost, nothing twice.

A part that is killed shortly before another shows what one outage hides from
the other: an answer that was given and not seen, a claim without its Workflow.
"""

from itertools import combinations

import pytest
from support.story.pipelines import expected_version, story
from support.story.scenarios import check_starts, ended, version

from tiphys.records import AttemptEndOutcome
from tiphys.store import read_submissions

from .world import Workflow, World

STEPS = 30
PARTS = ("WORKFLOW_CONTROLLER", "PLUGIN", "CONTROLLER", "APISERVER", "S3")


def check_nothing_lost_or_twice(workflow: Workflow) -> None:
    """The result is that of an undisturbed run, by one submission, with one finished attempt of each step."""
    workflow.wait()
    store = workflow.world.store
    assert version(store, workflow.run) == expected_version(STEPS)
    [submission] = read_submissions(store, workflow.run)
    assert submission.binding is not None
    assert submission.binding.uid == workflow.uid
    for step in ("validate", "preprocess", "train", "register"):
        outcomes = [ended(attempt).outcome for attempt in workflow.attempts(step)]
        assert outcomes[-1] is AttemptEndOutcome.DONE, step
        assert outcomes.count(AttemptEndOutcome.DONE) == 1, step
    check_starts(store, workflow.run)


@pytest.mark.parametrize("part", PARTS, ids=str.lower)
def test_a_part_that_dies_is_not_noticed_in_the_result(world_in_each_mode: World, part: str) -> None:
    world = world_in_each_mode
    workflow = world.submit(story(world.place, steps=STEPS, pause=0.5).compile())
    workflow.trains()
    world.crash(part)
    check_nothing_lost_or_twice(workflow)


@pytest.mark.parametrize("part", PARTS, ids=str.lower)
def test_a_part_that_dies_while_steps_are_admitted_is_not_noticed(world: World, part: str) -> None:
    workflow = world.submit(story(world.place, steps=STEPS).compile())
    world.crash(part)
    check_nothing_lost_or_twice(workflow)


@pytest.mark.parametrize("parts", list(combinations(PARTS, 2)), ids=lambda two: "+".join(two).lower())
def test_two_parts_that_die_together_are_not_noticed_in_the_result(world: World, parts: tuple[str, str]) -> None:
    workflow = world.submit(story(world.place, steps=STEPS, pause=0.5).compile())
    workflow.trains()
    world.crash_together(*parts)
    check_nothing_lost_or_twice(workflow)
