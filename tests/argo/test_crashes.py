"""Every part of the system killed in the middle of a training, alone and two at a time: nothing lost, nothing twice.

A part that is killed shortly before another shows what one outage hides from
the other: an answer that was given and not seen, a claim without its Workflow.
"""

from itertools import combinations

import pytest
from support.stories.interrupted_training.pipelines import story

from .outcomes import check_nothing_lost_or_twice
from .world import World

STEPS = 30
PARTS = ("WORKFLOW_CONTROLLER", "PLUGIN", "CONTROLLER", "APISERVER", "S3")


@pytest.mark.parametrize("part", PARTS, ids=str.lower)
def test_a_part_that_dies_is_not_noticed_in_the_result(world_in_each_mode: World, part: str) -> None:
    world = world_in_each_mode
    workflow = world.submit(story(world.place, steps=STEPS, pause=0.5).compile())
    workflow.trains()
    world.crash(part)
    workflow.wait()
    check_nothing_lost_or_twice(workflow, STEPS)


@pytest.mark.parametrize("part", PARTS, ids=str.lower)
def test_a_part_that_dies_while_steps_are_admitted_is_not_noticed(world: World, part: str) -> None:
    workflow = world.submit(story(world.place, steps=STEPS).compile())
    world.crash(part)
    workflow.wait()
    check_nothing_lost_or_twice(workflow, STEPS)


@pytest.mark.parametrize("parts", list(combinations(PARTS, 2)), ids=lambda two: "+".join(two).lower())
def test_parts_that_die_together_leave_the_result_unchanged(world: World, parts: tuple[str, str]) -> None:
    workflow = world.submit(story(world.place, steps=STEPS, pause=0.5).compile())
    workflow.trains()
    world.crash_together(*parts)
    workflow.wait()
    check_nothing_lost_or_twice(workflow, STEPS)
