"""A training of higher priority on a full queue: the lower one is asked, saves, goes, and goes on afterwards.

The lower one lingers once it was asked, until the test lets it go: so there is
time to see what both are told, on a machine of any speed.
"""

import re

from support.stories.interrupted_training.pipelines import expected_version, story
from support.stories.interrupted_training.programs import MAY_GO
from support.stories.interrupted_training.scenarios import check_starts, ended, version

from hera_pipelines import Retries
from tiphys.records import AttemptEndOutcome, Cause

from .test_queues import waiting
from .world import Workflow, World, command

STEPS = 8
LINGERS_AT = 4
SAVED_AT = LINGERS_AT + 1
"""A step at which nothing is saved but by who was asked to go."""


def training(world: World, priority: int, fate: str = "") -> Workflow:
    """The story on all GPUs of the queue; no failure is forgiven."""
    queue, quota = world.preempting_queue()
    never = Retries(**{cause.value: 0 for cause in Cause}, backoff="1s")
    asked = {"gpus": quota, "queue": queue, "priority": priority, "retries": never, "grace": "5m"}
    return world.submit(story(world.place, steps=STEPS, fate=fate, name="priority", training=asked).compile())


def lets_go(world: World, pod: str) -> None:
    touch = ["python", "-c", f"open({MAY_GO!r}, 'w')"]
    command(["kubectl", "exec", pod, "--namespace", world.settings.namespace, "--container", "main", "--", *touch])


def test_a_lower_priority_saves_goes_and_resumes_after_the_higher_one(world_in_each_mode: World) -> None:
    world = world_in_each_mode
    low = training(world, 0, fate=f"linger@{LINGERS_AT}")
    pod = low.trains()
    high = training(world, 5)
    said = high.wait_for(
        "it waits for the save of another",
        lambda: [message for message in waiting(high) if "WaitingForPreemptedCheckpoint" in message],
    )
    assert said[0].startswith(f"Deferred: WaitingForPreemptedCheckpoint: {low.run}/train was asked to save and go at ")
    assert not high.attempts("train"), "the GPUs are held until the pod is gone"

    lets_go(world, pod)
    high.wait()
    low.wait()
    first, last = (ended(attempt) for attempt in low.attempts("train"))
    assert (first.outcome, first.cause, last.outcome) == (
        AttemptEndOutcome.FAILED,
        Cause.PREEMPTION,
        AttemptEndOutcome.DONE,
    )
    assert re.fullmatch(
        rf"Attempt 1 ended by preemption, it was asked at [\d:]+ to save and go for {high.run}/train; checkpoint "
        rf"{SAVED_AT} of attempt 1 is committed; attempt 2 resumes from step {SAVED_AT}",
        low.messages("train-conclude")[0],
    ), low.describe()
    assert f"resumes from step {SAVED_AT}" in low.messages("train-admit")[1]
    assert first.preempted is not None
    assert first.preempted.seconds_lost == 0, "it saved after it was asked"
    [between] = (ended(attempt) for attempt in high.attempts("train"))
    assert between.outcome is AttemptEndOutcome.DONE
    assert first.written_at <= between.written_at <= last.written_at
    for workflow in (low, high):
        assert version(world.store, workflow.run) == expected_version(STEPS)
        check_starts(world.store, workflow.run)
