"""The Workflow is gone, and `tiphys resume` goes on from storage: the next one runs only what is missing."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.stories.interrupted_training.pipelines import expected_version, pair, story
from support.stories.interrupted_training.scenarios import check_starts, ended, model, version
from tiphys_controller import start_run

from hera_pipelines.local.run_session import LocalSession
from tiphys.kube.resources import WORKFLOWS
from tiphys.records import AttemptEndOutcome, SubmissionKind
from tiphys.store import read_submissions

from .world import Workflow, World, command

STEPS = 40


def resume(world: World, run: str, *options: str) -> Workflow:
    """`tiphys resume` as a person calls it, who watches to the end; the Workflow that it made."""
    line = [sys.executable, "-m", "hera_pipelines.cli", "resume", run, "--store", world.settings.store, *options]
    command(line, seconds=world.settings.patience_seconds)
    bound = read_submissions(world.store, run)[-1].binding
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
    assert [one.claim.kind for one in read_submissions(world.store, run)] == [
        SubmissionKind.ORIGINAL,
        SubmissionKind.RESUME,
    ]
    outcomes = [ended(attempt).outcome for attempt in second.attempts("train")]
    assert outcomes[-1] is AttemptEndOutcome.DONE
    assert AttemptEndOutcome.DONE not in outcomes[:-1]
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
def test_a_step_behind_one_that_always_runs_is_reused(world: World, end: Callable[[World, Workflow], None]) -> None:
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
    assert [ended(attempt).outcome for attempt in second.attempts("train")] == [
        AttemptEndOutcome.FAILED,
        AttemptEndOutcome.DONE,
    ]


def test_a_finished_run_has_nothing_to_resume(world: World) -> None:
    first = world.submit(story(world.place, steps=4, pause=0).compile())
    first.wait()
    command([sys.executable, "-m", "hera_pipelines.cli", "resume", first.run, "--store", world.settings.store])
    assert len(read_submissions(world.store, first.run)) == 1


def test_a_run_begun_in_another_place_goes_on_here(world: World, tmp_path: Path) -> None:
    """The local engine is a cluster of its own, with the same store; its program fails after a checkpoint."""
    manifest = story(world.place, steps=12, fate="error@7", name="moved").compile()
    with LocalSession(world.store, tmp_path / "state") as session:
        started = start_run(world.store, session, manifest, namespace=world.settings.namespace)
        assert str(session.run(started.workflow_name)) == "Failed"
    second = resume(world, started.run, "--cluster", "--namespace", world.settings.namespace)
    second.wait()
    first, last = second.attempts("train")
    assert first.claim.submission != last.claim.submission
    assert last.claim.starts_from is not None
    assert second.phases("preprocess-run") == ["Skipped"]
    assert version(world.store, started.run) == expected_version(12)
    bound = [one.binding for one in read_submissions(world.store, started.run)]
    assert len({one.cluster for one in bound if one}) == 2


def test_done_steps_run_again_from_one_of_them_and_a_fork_begins_with_the_others(world: World) -> None:
    first = world.submit(story(world.place, steps=8, pause=0).compile())
    first.wait()
    second = resume(world, first.run, "--from", "train")
    second.wait()
    assert [ended(attempt).outcome for attempt in second.attempts("train")] == [AttemptEndOutcome.DONE] * 2
    assert second.attempts("train")[1].claim.starts_from is None, "it begins anew"
    assert len(second.attempts("preprocess")) == 1
    store = ["--store", world.settings.store]
    line = [sys.executable, "-m", "hera_pipelines.cli", "fork", first.run, *store, "--from", "register"]
    line += ["--cluster", "--namespace", world.settings.namespace]
    fork = command(line, seconds=world.settings.patience_seconds).strip().splitlines()[-1]
    assert version(world.store, fork) == expected_version(8)
    assert world.workflow(fork).phases("train-run") == ["Skipped"]
