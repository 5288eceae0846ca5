"""Workflow objects through an API server: found, created, stopped, watched to their end."""

import threading

import pytest
from support.builders.argo_objects import put, workflow
from support.builders.compiled_workflows import History, gated, pipeline_of
from support.servers.kube_server import KubeServer
from tiphys_controller import LiveWorkflow, ShutdownStrategy, resume_run, start_run
from tiphys_controller.kubernetes import KubernetesSubmitter

from tiphys.errors import ConflictError, NotFoundError, StoreError
from tiphys.kube import KubeApi, identify_cluster
from tiphys.kube.resources import WORKFLOWS
from tiphys.store import Store, read_submissions


@pytest.fixture
def submitter(api: KubeApi) -> KubernetesSubmitter:
    return KubernetesSubmitter(api, identify_cluster(api))


def named(name: str = "digits-1") -> dict[str, object]:
    return {"metadata": {"name": name, "namespace": "ml"}, "spec": {"entrypoint": "main"}}


def test_a_workflow_is_created_and_found(submitter: KubernetesSubmitter) -> None:
    created = submitter.create(named())
    assert (created.name, created.namespace, created.phase, created.running) == ("digits-1", "ml", "Pending", True)
    assert created.uid
    assert submitter.find("ml", "digits-1") == created
    assert submitter.find("ml", "digits-2") is None
    assert (submitter.read("ml", "digits-1") or {})["metadata"]["uid"] == created.uid
    assert submitter.read("ml", "digits-2") is None


def test_a_name_is_taken_once(submitter: KubernetesSubmitter) -> None:
    submitter.create(named())
    with pytest.raises(ConflictError, match="digits-1"):
        submitter.create(named())


def test_a_cluster_without_argo_is_said(submitter: KubernetesSubmitter, server: KubeServer) -> None:
    server.unknown.add("workflows")
    with pytest.raises(NotFoundError, match=r"namespace ml: .* Argo Workflows is not installed there"):
        submitter.create(named())


def test_a_run_goes_on_where_its_first_workflow_was(submitter: KubernetesSubmitter, api: KubeApi, store: Store) -> None:
    pipeline = pipeline_of(gated("prep"), gated("fit", depends="prep"))
    start_run(store, submitter, pipeline, "digits-1", namespace="ml")
    History(store, "digits-1").done("prep")
    with pytest.raises(ConflictError, match="still running"):
        resume_run(store, submitter, "digits-1")
    api.patch(WORKFLOWS, "ml", "digits-1", {"status": {"phase": "Failed"}})

    resumed = resume_run(store, submitter, "digits-1")

    found = api.get(WORKFLOWS, "ml", resumed.workflow_name)
    assert found is not None
    assert [task["name"] for task in found["spec"]["templates"][0]["dag"]["tasks"]] == ["fit"]
    [_, second] = read_submissions(store, "digits-1")
    assert second.binding is not None
    assert (second.binding.cluster, second.binding.namespace, second.binding.uid) == (
        submitter.cluster,
        "ml",
        found["metadata"]["uid"],
    )


def test_a_create_whose_answer_was_lost_is_recovered(
    submitter: KubernetesSubmitter, server: KubeServer, store: Store
) -> None:
    server.fail_next(0, verb="create", plural="workflows", done=True)
    with pytest.raises(StoreError):
        start_run(store, submitter, pipeline_of(gated("prep")), "digits-1", namespace="ml")

    recovered = resume_run(store, submitter, "digits-1")

    assert recovered.submission == 1
    [first] = read_submissions(store, "digits-1")
    [found] = server.objects("workflows")
    assert first.binding is not None
    assert first.binding.uid == found["metadata"]["uid"]


@pytest.mark.parametrize("how", list(ShutdownStrategy))
def test_a_workflow_is_ended_by_argos_own_word(
    how: ShutdownStrategy, submitter: KubernetesSubmitter, api: KubeApi
) -> None:
    submitter.stop(submitter.create(named()), how)
    found = api.get(WORKFLOWS, "ml", "digits-1")
    assert found is not None
    assert found["spec"] == {"entrypoint": "main", "shutdown": how.value}


def test_a_namesake_is_not_ended(submitter: KubernetesSubmitter, server: KubeServer) -> None:
    meant = submitter.create(named())._replace(uid="uid-of-before")
    with pytest.raises(ConflictError):
        submitter.stop(meant)
    assert "shutdown" not in server.objects("workflows")[0]["spec"]


def watched(submitter: KubernetesSubmitter, live: LiveWorkflow) -> list[str]:
    seen = submitter.watch(live, threading.Event())
    return [(one.get("status") or {}).get("phase", "") for one in seen]


def test_a_workflow_is_watched_until_it_is_over(submitter: KubernetesSubmitter, api: KubeApi) -> None:
    live = submitter.create(named())
    phases = []
    for document in submitter.watch(live, threading.Event()):
        phases.append(phase := (document.get("status") or {}).get("phase", ""))
        following = {"": "Running", "Running": "Succeeded"}.get(phase)
        if following:
            api.patch(WORKFLOWS, "ml", "digits-1", {"status": {"phase": following}})
    assert phases == ["", "Running", "Succeeded"]


def test_a_workflow_that_has_ended_is_shown_once(submitter: KubernetesSubmitter, api: KubeApi) -> None:
    uid = put(api, workflow(phase="Failed"))["metadata"]["uid"]
    assert watched(submitter, LiveWorkflow("digits-1", "ml", uid, "Running", True)) == ["Failed"]


def test_a_workflow_that_is_deleted_meanwhile_is_said(submitter: KubernetesSubmitter, api: KubeApi) -> None:
    live = submitter.create(named())
    seen = submitter.watch(live, threading.Event())
    next(seen)
    api.delete(WORKFLOWS, "ml", "digits-1")
    with pytest.raises(NotFoundError, match="ml/digits-1 was deleted"):
        next(seen)
