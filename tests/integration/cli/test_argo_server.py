"""The commands through an argo-server: what they send, what they cannot know alone, what they say next."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.builders.compiled_workflows import History, gated, pipeline_of
from support.processes.polling import until
from support.servers import argo_rest
from support.servers.argo_rest import ArgoRest
from support.servers.kube_server import KubeServer, write_kubeconfig
from support.stories import small_pipeline
from tiphys_controller import start_run
from tiphys_controller.argo_server import ArgoServerSubmitter, connect_argo_server

from tiphys.kube import KubeApi, identify_cluster
from tiphys.kube.resources import WORKFLOWS
from tiphys.records import SubmissionBinding
from tiphys.store import RunLayout, Store, read_submissions

from .conftest import Command

RUN = "digits-1"
PIPELINE = pipeline_of(gated("prep"), gated("fit", depends="prep"))


@pytest.fixture
def argo(api: KubeApi) -> Iterator[ArgoRest]:
    with argo_rest.serving(api) as found:
        yield found


@pytest.fixture
def alone(argo: ArgoRest, tiphys: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command of somebody who has an argo-server and no kubeconfig."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("ARGO_SERVER", argo.url)
    return tiphys


@pytest.fixture
def kubeconfig(server: KubeServer, tmp_path: Path) -> Path:
    return write_kubeconfig(tmp_path, server.url, token="of-the-kubeconfig")


def begun(store: Store, argo: ArgoRest, admitted_as: str = "") -> None:
    """A run that was sent through the argo-server alone, and bound by its first admit to the Workflow of that uid."""
    started = start_run(store, ArgoServerSubmitter(connect_argo_server(argo.url, {})), PIPELINE, RUN, namespace="ml")
    History(store, RUN).done("prep")
    bound = SubmissionBinding(
        run=RUN,
        submission=1,
        cluster="kubernetes:real",
        namespace="ml",
        workflow_name=RUN,
        uid=admitted_as or started.uid,
    )
    store.create(RunLayout(RUN).submission_binding(1), bound.to_bytes())


def test_a_pipeline_is_sent_without_a_kubeconfig(
    alone: Command, argo: ArgoRest, server: KubeServer, store: Store, tmp_path: Path
) -> None:
    file = small_pipeline.write(tmp_path / "code")
    given = ("run", file, "--cluster", "--no-preflight", "--detach", "--run", "hot", "--store", store.url)
    answer = alone(*given)
    assert (answer.code, "give one with -n" in answer.error) == (2, True)

    answer = alone(*given, "-n", "ml")

    assert (answer.code, answer.out) == (0, "hot\n")
    assert f"the cluster behind argo-server {argo.url} cannot be identified" in answer.err
    assert f"stop it with `tiphys stop hot --store {store.url}`" in answer.err
    [found] = server.objects("workflows")
    assert (found["metadata"]["name"], found["metadata"]["namespace"]) == ("hot", "ml")
    assert [one.binding for one in read_submissions(store, "hot")] == [None]


def test_a_run_goes_on_and_is_watched_with_the_cluster_named_by_the_kubeconfig(
    tiphys: Command, argo: ArgoRest, api: KubeApi, store: Store, kubeconfig: Path
) -> None:
    begun(store, argo)
    api.patch(WORKFLOWS, "ml", RUN, {"status": {"phase": "Failed"}})
    argo.token = "Bearer of-the-kubeconfig"
    nodes = {"n": {"name": f"{RUN}-2.fit", "phase": "Succeeded"}}

    def finish() -> None:
        until(lambda: any(path == "/api/v1/workflow-events/ml" for _, path in argo.requests))
        api.patch(WORKFLOWS, "ml", f"{RUN}-2", {"status": {"phase": "Succeeded", "nodes": nodes}})

    thread = threading.Thread(target=finish)
    thread.start()
    options = ("--argo-server", argo.url, "--kubeconfig", kubeconfig)
    answer = tiphys("resume", RUN, "--store", store.url, "--cluster", *options)
    thread.join()

    assert answer.code == 0, answer.err
    assert "fit: Succeeded" in answer.err
    second = read_submissions(store, RUN)[-1]
    assert second.binding is not None
    assert second.binding.cluster == identify_cluster(api)


def test_a_run_is_stopped_by_its_uid(alone: Command, argo: ArgoRest, server: KubeServer, store: Store) -> None:
    begun(store, argo)
    answer = alone("stop", RUN, "--store", store.url)
    assert answer.code == 0, answer.err
    assert server.objects("workflows")[0]["spec"]["shutdown"] == "Stop"


def test_a_workflow_of_another_uid_is_neither_stopped_nor_followed(
    alone: Command, argo: ArgoRest, server: KubeServer, store: Store
) -> None:
    begun(store, argo, admitted_as="uid-elsewhere")
    answer = alone("stop", RUN, "--store", store.url)
    assert (answer.code, "has no Workflow ml/digits-1 of this run" in answer.error) == (3, True)
    assert "shutdown" not in server.objects("workflows")[0]["spec"]
    answer = alone("resume", RUN, "--store", store.url)
    assert (answer.code, "may still be running" in answer.error, "--force" in answer.error) == (4, True, True)
    assert len(read_submissions(store, RUN)) == 1
    answer = alone("get", RUN, "--cluster", "--store", store.url)
    assert (answer.code, "Unknown" in answer.out) == (0, True)


def test_an_argo_server_means_nothing_to_this_machine(tiphys: Command, tmp_path: Path) -> None:
    answer = tiphys("run", small_pipeline.write(tmp_path / "code"), "--argo-server", "argo.example:2746")
    assert (answer.code, "--argo-server: this is for a cluster; add --cluster" in answer.error) == (2, True)
