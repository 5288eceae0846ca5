"""The cluster that the benchmark of Workflows meets: what it refuses, and Workflows that it sees to their end."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from argo.settings import Settings, from_environment
from bench.argo.installation import WORKFLOW_LABEL, Installation, installation
from support.processes.controller import kubeconfig
from support.processes.polling import until
from support.servers.kube_server import KubeServer, serving

from tiphys.errors import UsageError
from tiphys.kube.resources import CUSTOM_RESOURCE_DEFINITIONS, PODS, WORKFLOWS

WORKFLOW = {"metadata": {"name": "w"}, "spec": {}}
LONGEST_SECONDS = 60.0


@pytest.fixture
def server() -> Iterator[KubeServer]:
    with serving() as server:
        server.add_namespace("ml")
        server.api().create(CUSTOM_RESOURCE_DEFINITIONS, None, {"metadata": {"name": "workflows.argoproj.io"}})
        yield server


def settings(server: KubeServer, folder: Path, **variables: str) -> Settings:
    given = {"KUBECONFIG": str(kubeconfig(server, folder)), "TIPHYS_ARGO_IMAGE": "registry.example.com/image:1"}
    return from_environment({**given, **variables})


@contextmanager
def argo(server: KubeServer, here: Installation, phase: str) -> Iterator[None]:
    """Runs one pod for the Workflow, ends it as ``phase``, and takes the pod away with it."""
    api = server.api()

    def run() -> None:
        until(lambda: server.objects("workflows"))
        metadata = {"name": "p", "labels": {WORKFLOW_LABEL: "w"}}
        api.create(PODS, "ml", {"metadata": metadata, "status": {"phase": "Running"}})
        until(lambda: here.timelines["w"].pods)
        node = {"id": {"name": "w", "phase": phase, "message": "exit 1"}}
        api.patch(WORKFLOWS, "ml", "w", {"status": {"phase": phase, "nodes": node}})
        until(lambda: not server.objects("workflows"))
        api.delete(PODS, "ml", "p")

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join()


def test_a_workflow_is_seen_from_its_creation_to_its_end_and_deleted(server: KubeServer, tmp_path: Path) -> None:
    with installation(settings(server, tmp_path), "2s") as here, argo(server, here, "Succeeded"):
        timeline = here.run(WORKFLOW, LONGEST_SECONDS)
    assert here.controller.requeue == "2s"
    assert timeline.finished is not None
    assert timeline.seconds > 0
    assert (server.objects("workflows"), server.objects("pods")) == ([], [])


def test_a_workflow_that_fails_ends_the_benchmark_with_its_nodes(server: KubeServer, tmp_path: Path) -> None:
    with (
        installation(settings(server, tmp_path), "2s") as here,
        argo(server, here, "Failed"),
        pytest.raises(RuntimeError, match="w ended as Failed\n  w: Failed exit 1"),
    ):
        here.run(WORKFLOW, LONGEST_SECONDS)
    assert server.objects("workflows") == []


def test_a_workflow_that_argo_does_not_begin_ends_the_benchmark(server: KubeServer, tmp_path: Path) -> None:
    with installation(settings(server, tmp_path), "2s") as here, pytest.raises(RuntimeError, match="ended as "):
        here.run(WORKFLOW, 0.5)
    assert server.objects("workflows") == []


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"KUBECONFIG": ""}, "KUBECONFIG names no cluster"),
        ({"TIPHYS_ARGO_IMAGE": ""}, "TIPHYS_ARGO_IMAGE names no image"),
    ],
)
def test_a_missing_variable_is_named(server: KubeServer, tmp_path: Path, variables: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words), installation(settings(server, tmp_path, **variables), "2s"):
        pass


def test_a_cluster_without_argo_is_refused(tmp_path: Path) -> None:
    with (
        serving() as bare,
        pytest.raises(UsageError, match="has no Argo Workflows"),
        installation(settings(bare, tmp_path), "2s"),
    ):
        pass


def test_a_requeue_time_that_cannot_be_read_is_asked_for(server: KubeServer, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give it as REQUEUE=2s"), installation(settings(server, tmp_path), ""):
        pass
