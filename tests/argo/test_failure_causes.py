"""What can happen to a training pod: who is blamed, what it costs, and where the next attempt starts.

| what happens | cause | what follows |
|---|---|---|
| the rows of `support.stories.interrupted_training.scenarios` | as there | as there |
| `kubectl delete pod` | preemption | the program saves, the next attempt goes on there |
| eviction by the API, as a drain does | preemption | likewise |
| `kubectl delete pod --force` | preemption, infrastructure, or the same attempt goes on | resumed from what was saved |
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from support.stories.interrupted_training.pipelines import expected_version, story
from support.stories.interrupted_training.scenarios import FATES, Fate, check_starts, ended, only, version

from tiphys.kube.resources import PODS
from tiphys.records import AttemptEndOutcome, Cause

from .world import Workflow, World, evict

STEPS = 60


@pytest.mark.parametrize("fate", FATES, ids=lambda fate: fate.name)
def test_a_failure_of_the_training_gets_its_cause_and_the_run_survives_it(world: World, fate: Fate) -> None:
    workflow = world.submit(story(world.place, **fate.arguments).compile())
    workflow.wait(fate.phase)
    fate.check(world.store, workflow.run)


def delete(world: World, pod: str) -> None:
    world.api.delete(PODS, world.settings.namespace, pod)


def delete_by_force(world: World, pod: str) -> None:
    world.api.delete(PODS, world.settings.namespace, pod, grace_seconds=0)


def disturbed(
    world: World, disturb: Callable[[World, str], None], training: Mapping[str, Any] | None = None
) -> Workflow:
    """The story, whose first training pod is taken away once it has saved something."""
    workflow = world.submit(story(world.place, steps=STEPS, pause=0.5, training=training).compile())
    disturb(world, workflow.trains())
    workflow.wait()
    assert version(world.store, workflow.run) == expected_version(STEPS)
    assert workflow.went_on_from() is not None
    check_starts(world.store, workflow.run)
    return workflow


@pytest.mark.parametrize("disturb", [delete, evict], ids=["deleted", "evicted"])
def test_a_pod_that_is_asked_to_go_saves_first(
    world_in_each_mode: World, disturb: Callable[[World, str], None]
) -> None:
    workflow = disturbed(world_in_each_mode, disturb, {"retries": only(Cause.PREEMPTION)})
    first, _ = (ended(attempt) for attempt in workflow.attempts("train"))
    assert (first.outcome, first.cause, first.exit_code) == (AttemptEndOutcome.FAILED, Cause.PREEMPTION, 75)
    start = workflow.attempts("train")[1].claim.starts_from
    assert start is not None
    # What it was judged by depends on who looked first: the exit code, or what the pod says while it still exists.
    assert workflow.messages("train-conclude")[0] == (
        f"Attempt 1 ended by preemption, {first.message}; attempt 2 resumes from step {start.global_step}"
    )
    assert f"resumes from step {start.global_step}" in workflow.messages("train-admit")[1]


def test_a_pod_that_is_gone_at_once_is_resumed_from_what_it_had_saved(world: World) -> None:
    """Argo makes a pod again that is gone and never told its end, so the same attempt may go on in another pod."""
    workflow = disturbed(world, delete_by_force)
    *gone, last = (ended(attempt) for attempt in workflow.attempts("train"))
    assert last.outcome is AttemptEndOutcome.DONE
    assert len(gone) <= 1
    assert all(one.cause in (Cause.PREEMPTION, Cause.INFRASTRUCTURE) and one.progress for one in gone)
