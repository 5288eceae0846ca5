"""A run goes on in another cluster that has the same store.

| the first cluster | `tiphys resume` in the second |
|---|---|
| has recorded the end | goes on |
| runs it, and cannot be asked | is refused; with --force it goes on, and the first one's program is fenced |
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.stories.interrupted_training.pipelines import expected_version, story
from support.stories.interrupted_training.scenarios import check_starts, ended, version

from tiphys.kube import connect_to_cluster, identify_cluster
from tiphys.records import AttemptEndOutcome
from tiphys.store import read_submissions

from .test_resume import resume
from .world import Workflow, World

STEPS = 160


@pytest.fixture
def other(world: World) -> World:
    """Another cluster with Argo and Tiphys, and the same images and store."""
    kubeconfig = world.settings.other_kubeconfig
    if not kubeconfig:
        pytest.skip("TIPHYS_ARGO_OTHER_KUBECONFIG names no second cluster")
    return World(connect_to_cluster(Path(kubeconfig)), world.store, replace(world.settings, kubeconfig=kubeconfig))


def begun(world: World) -> Workflow:
    """The story, in the middle of its training."""
    workflow = world.submit(story(world.place, steps=STEPS, pause=0.5, name="moved").compile())
    workflow.trains()
    return workflow


def here(world: World) -> list[str]:
    return ["--cluster", "--namespace", world.settings.namespace]


def check_moved(first: Workflow, second: Workflow) -> None:
    second.wait()
    store, run = second.world.store, first.run
    assert version(store, run) == expected_version(STEPS)
    check_starts(store, run)
    assert [ended(attempt).outcome for attempt in second.attempts("train")] == [
        AttemptEndOutcome.FENCED,
        AttemptEndOutcome.DONE,
    ]
    assert second.attempts("train")[1].claim.starts_from is not None
    places = [one.binding.cluster for one in read_submissions(store, run) if one.binding]
    assert places == [identify_cluster(first.world.api), identify_cluster(second.world.api)]


def test_a_run_stopped_in_one_cluster_resumes_in_another(world: World, other: World) -> None:
    first = begun(other)
    other.argo("stop", first.name)
    first.wait("Failed")
    check_moved(first, resume(world, first.run, *here(world)))


def test_a_run_in_an_unreachable_cluster_is_taken_over_by_force_only(world: World, other: World) -> None:
    first = begun(other)
    line = [sys.executable, "-m", "hera_pipelines.cli", "resume", first.run, "--store", world.settings.store]
    refused = subprocess.run([*line, *here(world)], capture_output=True, text=True, check=False)
    assert (refused.returncode, "may still be running" in refused.stderr) == (4, True), refused.stderr

    second = resume(world, first.run, *here(world), "--force")
    first.wait("Failed")
    assert ["was fenced" in message for message in first.messages("train-conclude")] == [True]
    check_moved(first, second)
