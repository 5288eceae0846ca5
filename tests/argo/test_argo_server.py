"""Workflows through an argo-server: `tiphys run`, `stop` and `resume`, with the API server at hand and without.

| the API server | the Workflow ended, and | resume |
|---|---|---|
| tells which cluster it is | its exit handler sealed the run | goes on |
| cannot be reached | is still shown by the argo-server | goes on: its uid says that it is the one |
| cannot be reached | is gone, and nobody sealed the run | only with --force |
"""

import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.stories.interrupted_training.pipelines import expected_version
from support.stories.interrupted_training.scenarios import check_starts, model

from tiphys.kube import identify_cluster
from tiphys.kube.resources import WORKFLOWS
from tiphys.store import read_submissions

from .world import Workflow, World

STEPS = 120
TESTS = Path(__file__).parents[1]
PIPELINE = """
from support.stories.interrupted_training.pipelines import Place, pair
pipeline = pair(Place({image!r}, {store!r}, {options!r}, {workflow!r}), steps={steps}, pause=0.5)
"""


@pytest.fixture
def with_api(world: World) -> dict[str, str]:
    """The environment of somebody who has an argo-server and a kubeconfig of its cluster."""
    if not world.settings.argo_server:
        pytest.skip("TIPHYS_ARGO_SERVER names no argo-server")
    return {**os.environ, "ARGO_SERVER": world.settings.argo_server, "PYTHONPATH": str(TESTS)}


@pytest.fixture
def without_api(with_api: Mapping[str, str], tmp_path: Path) -> dict[str, str]:
    """Of somebody who has an argo-server and a token."""
    return {**with_api, "KUBECONFIG": str(tmp_path / "none")}


def tiphys(world: World, environ: Mapping[str, str], *arguments: str) -> tuple[int, str]:
    """The command as a person calls it: exit code, and what it said on standard error."""
    line = [sys.executable, "-m", "hera_pipelines.cli", *arguments, "--store", world.settings.store]
    done = subprocess.run(
        line, env=dict(environ), capture_output=True, text=True, timeout=world.settings.patience_seconds, check=False
    )
    return done.returncode, done.stderr


def begun(world: World, environ: Mapping[str, str], folder: Path) -> Workflow:
    """A run that was sent through the argo-server, in the middle of its training."""
    place, run = world.place, f"sent-{secrets.token_hex(4)}"
    given = {"image": place.image, "store": place.store, "options": place.options, "workflow": place.workflow}
    file = folder / "pipeline.py"
    file.write_text(PIPELINE.format(**given, steps=STEPS))
    namespace = world.settings.namespace
    line = ("run", str(file), "--cluster", "--no-preflight", "-n", namespace, "--detach", "--run", run)
    code, said = tiphys(world, environ, *line)
    assert code == 0, said
    workflow = world.workflow(run)
    workflow.trains()
    return workflow


def check_finished(world: World, run: str) -> None:
    world.workflow(f"{run}-2").wait()
    assert f"model-{model(world.store, run)}" == expected_version(STEPS)
    check_starts(world.store, run)
    bound = read_submissions(world.store, run)[-1].binding
    assert bound is not None
    assert bound.cluster == identify_cluster(world.api)


def test_a_run_is_sent_stopped_and_resumed(world: World, with_api: dict[str, str], tmp_path: Path) -> None:
    first = begun(world, with_api, tmp_path)
    code, said = tiphys(world, with_api, "resume", first.run)
    assert (code, "is still running" in said) == (4, True), said
    code, said = tiphys(world, with_api, "stop", first.run)
    assert code == 0, said
    first.wait("Failed")
    code, said = tiphys(world, with_api, "resume", first.run)
    assert code == 0, said
    assert f"run {first.run} succeeded" in said
    check_finished(world, first.run)


def test_without_an_api_server_a_uid_says_whether_it_is_the_one(
    world: World, without_api: dict[str, str], tmp_path: Path
) -> None:
    first = begun(world, without_api, tmp_path)
    code, said = tiphys(world, without_api, "resume", first.run)
    assert (code, "is still running" in said) == (4, True), said
    code, said = tiphys(world, without_api, "stop", first.run, "--terminate")
    assert code == 0, said
    first.wait("Failed")
    code, said = tiphys(world, without_api, "resume", first.run)
    assert code == 0, said
    check_finished(world, first.run)


def test_without_an_api_server_what_is_gone_may_run_elsewhere(
    world: World, without_api: dict[str, str], tmp_path: Path
) -> None:
    first = begun(world, without_api, tmp_path)
    run = first.run
    world.api.delete(WORKFLOWS, world.settings.namespace, first.name)
    world.until("the workflow is gone", lambda: first.read() is None)
    code, said = tiphys(world, without_api, "resume", run)
    assert (code, "may still be running" in said, "--force" in said) == (4, True, True), said
    code, said = tiphys(world, without_api, "resume", run, "--force", "-n", world.settings.namespace)
    assert code == 0, said
    check_finished(world, run)
