"""The Workflow is gone, and `tiphys resume` goes on from storage: the next one runs only what is missing."""

import sys
from collections.abc import Callable

import pytest
from support.story.pipelines import expected_version, pair, story
from support.story.scenarios import check_starts, ended, model, version

from tiphys.kube.resources import WORKFLOWS
from tiphys.records import Outcome, SubmissionKind
from tiphys.store import submissions

from .world import Workflow, World, command

STEPS = 40


def resume(world: World, run: str) -> Workflow:
    """`tiphys resume` as a person calls it, who watches to the end; the Workflow that it made."""
    line = [sys.executable, "-m", "hera_pipelines.cli", "resume", run, "--store", world.settings.store]
    command(line, seconds=world.settings.patience_seconds)
    bound = submissions(world.store, run)[-1].bound
    assert bound is not None
    return world.workflow(bound.workflow_name)


def test_a_deleted_workflow_is_resumed_with_what_is_missing(world_in_each_mode: World) -> None:
    world = world_in_each_mode
    first = world.submit(pair(world.place, steps=STEPS, pause=0.5).compile())
    first.trains()
    run = first.run
    world.api.delete(WORKFLOWS, world.settings.namespace, first.name)
    world.until("the workflow is gone", lambda: first.read() is None)

    second = resume(world, run)
    second.wait()

    assert second.name == f"{run}-2"
    assert {node.template for node in second.nodes()}.isdisjoint({"preprocess", "preprocess-admit"})
    assert [one.claim.kind for one in submissions(world.store, run)] == [
        SubmissionKind.ORIGINAL,
        SubmissionKind.RESUME,
    ]
    outcomes = [ended(attempt).outcome for attempt in second.attempts("train")]
    assert outcomes[-1] is Outcome.DONE
    assert Outcome.DONE not in outcomes[:-1]
    assert f"model-{model(world.store, run)}" == expected_version(STEPS)
    check_starts(world.store, run)


def stop(world: World, workflow: Workflow) -> None:
    world.argo("stop", workflow.name)


def terminate(world: World, workflow: Workflow) -> None:
    world.argo("terminate", workflow.name)


def be_over_its_time(world: World, workflow: Workflow) -> None:
    """The whole Workflow has a deadline, and it has passed."""
    world.api.patch(WORKFLOWS, world.settings.namespace, workflow.name, {"spec": {"activeDeadlineSeconds": 1}})


@pytest.mark.parametrize("end", [stop, terminate, be_over_its_time])
def test_what_is_behind_a_step_that_always_runs_is_taken_over(
    world: World, end: Callable[[World, Workflow], None]
) -> None:
    """validate looks at the outside world, so it is asked again; preprocess stands while the answer stays the same."""
    first = world.submit(story(world.place, steps=STEPS, pause=0.5).compile())
    first.trains()
    end(world, first)
    first.wait("Failed")
    second = resume(world, first.run)
    second.wait()
    assert len(second.attempts("validate")) == 2
    assert len(second.attempts("preprocess")) == 1
    assert second.phases("preprocess-run") == ["Skipped"]
    assert version(world.store, first.run) == expected_version(STEPS)
    check_starts(world.store, first.run)


def test_a_failed_step_is_run_again_by_resume(world: World) -> None:
    first = world.submit(story(world.place, steps=12, fate="error@7").compile())
    first.wait("Failed")
    second = resume(world, first.run)
    second.wait()
    assert version(world.store, first.run) == expected_version(12)
    assert [ended(attempt).outcome for attempt in second.attempts("train")] == [Outcome.FAILED, Outcome.DONE]


def test_a_finished_run_has_nothing_to_resume(world: World) -> None:
    first = world.submit(story(world.place, steps=4, pause=0).compile())
    first.wait()
    command([sys.executable, "-m", "hera_pipelines.cli", "resume", first.run, "--store", world.settings.store])
    assert len(submissions(world.store, first.run)) == 1
