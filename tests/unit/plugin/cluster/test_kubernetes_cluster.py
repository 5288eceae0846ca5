"""What is asked of the API server, how often, and what may be answered from memory."""

from datetime import timedelta

import pytest
from support.builders.argo_pods import BEGAN, ended, pod, waits
from tiphys_plugin.cluster.interface import PodStatus
from tiphys_plugin.cluster.kubernetes_cluster import KubernetesCluster

from tiphys.errors import ConflictError, ForbiddenError, StoreError
from tiphys.kube.gang_workloads import GANG_RESOURCES
from tiphys.kube.resources import JOBS, PODS, WORKFLOWS
from tiphys.protocol.gang import MEMBER_GATE, WORKFLOW_UID_LABEL, FirstFailure, GangBackend, GangPhase
from tiphys.protocol.step_spec import ATTEMPT_LABEL, RUN_LABEL


class Seconds:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def api(server):
    return server.api("ml")


@pytest.fixture
def clock():
    return Seconds()


@pytest.fixture
def cluster(api, clock):
    return KubernetesCluster(api, ("ml", "vision"), "kubernetes:abc", clock)


def workflow(api, phase: str = "Running", **spec):
    body = {"metadata": {"name": "digits"}, "spec": {"templates": [], **spec}, "status": {"phase": phase}}
    return api.create(WORKFLOWS, "ml", body)


def change(api, **fields):
    found = api.get(WORKFLOWS, "ml", "digits")
    api.replace(WORKFLOWS, "ml", {**found, **fields})


def test_pods_of_one_attempt_of_one_workflow_are_asked_for(api, cluster):
    api.create(PODS, "ml", pod(name="mine"))
    api.create(PODS, "ml", pod(name="later", labels={"tiphys.dev/attempt": "2"}))
    api.create(PODS, "ml", pod(name="other", workflow="other", uid="uid-2"))
    api.create(PODS, "ml", pod(name="earlier-of-the-name", uid="uid-0"))
    assert [one.name for one in cluster.pods("ml", "digits-abc12", "uid-1", "1")] == ["mine"]


def test_end_of_a_pod_is_seen_at_once(server, api, cluster):
    api.create(PODS, "ml", pod(name="mine"))
    assert not cluster.pods("ml", "digits-abc12", "uid-1", "1")[0].finished
    found = api.get(PODS, "ml", "mine")
    done = pod(ended("wait", 0), ended("main", 75), phase="Failed")["status"]
    api.replace(PODS, "ml", {**found, "status": done}, "status")
    assert cluster.pods("ml", "digits-abc12", "uid-1", "1")[0].exit_code == 75
    assert server.count("list", "pods") == 2


def member(name: str, rank: int, **fields):
    """A pod of an Indexed Job: nothing of Argo is on it."""
    labels = {
        "tiphys.dev/run": "digits-abc12",
        "tiphys.dev/attempt": "1",
        "tiphys.dev/workflow-uid": "uid-1",
        "batch.kubernetes.io/job-completion-index": str(rank),
    }
    metadata = {
        "name": name,
        "namespace": "ml",
        "labels": labels,
        "annotations": {"tiphys.dev/node": "digits-abc12.fit(0).run"},
        "ownerReferences": [{"kind": "Job", "name": "digits", "uid": "uid-of-job"}],
    }
    return {"metadata": metadata, "spec": {"containers": [{"name": "main"}]}, **fields}


def test_pods_of_a_gang_are_found_though_argo_did_not_make_them(api, cluster):
    status = {"phase": "Failed", "containerStatuses": [ended("main", 3, after=7)]}
    api.create(PODS, "ml", member("job-0", 0, status={"phase": "Running"}))
    api.create(PODS, "ml", member("job-1", 1, status=status))
    first, second = sorted(cluster.pods("ml", "digits-abc12", "uid-1", "1"), key=lambda one: one.name)
    assert (first.rank, first.trouble_at, first.finished) == (0, None, False)
    assert (second.rank, second.exit_code, second.trouble_at) == (1, 3, BEGAN + timedelta(seconds=7))
    assert {one.node for one in (first, second)} == {"digits-abc12.fit(0).run"}


def test_a_gang_that_the_chart_does_not_allow_is_refused_with_the_remedy(server, cluster):
    server.authorize = lambda request: request.plural != "jobs"
    with pytest.raises(ForbiddenError, match=r"jobs.*enable trainings on several nodes \(the values gangs\.\* of"):
        cluster.gang(GangBackend.JOB, "ml", "digits-fit-1", "uid-1")


def test_the_job_of_a_gang_is_read_and_ended(api, cluster):
    metadata = {"name": "digits-fit-1", "labels": {WORKFLOW_UID_LABEL: "uid-1"}}
    assert cluster.gang(GangBackend.JOB, "ml", "digits-fit-1", "uid-1") is None
    conditions = [{"type": "FailureTarget", "status": "True", "message": "…"}]
    api.create(JOBS, "ml", {"metadata": metadata, "status": {"conditions": conditions}})
    assert cluster.gang(GangBackend.JOB, "ml", "digits-fit-1", "uid-2") is None, "another Workflow made it"
    found = cluster.gang(GangBackend.JOB, "ml", "digits-fit-1", "uid-1")
    assert (found.stage, found.first_failure, found.succeeded) == (GangPhase.ENDING, None, False)
    api.delete(JOBS, "ml", "digits-fit-1")
    api.create(JOBS, "ml", {"metadata": metadata})
    cluster.delete_gang(found)
    again = cluster.gang(GangBackend.JOB, "ml", "digits-fit-1", "uid-1")
    assert again is not None, "another one had its name by then"
    cluster.delete_gang(again)
    cluster.delete_gang(again)
    assert cluster.gang(GangBackend.JOB, "ml", "digits-fit-1", "uid-1") is None
    conditions = [{"type": "Complete", "status": "True"}]
    api.create(JOBS, "ml", {"metadata": metadata, "status": {"conditions": conditions}})
    complete = cluster.gang(GangBackend.JOB, "ml", "digits-fit-1", "uid-1")
    assert (complete.stage, complete.succeeded) == (GangPhase.FINISHED, True)


def elastic_job(api, **status):
    """An elastic Job of four members, of which one is lost."""
    metadata = {"name": "digits-fit-1", "labels": {WORKFLOW_UID_LABEL: "uid-1"}}
    spec = {"completions": 4, "parallelism": 4, "maxFailedIndexes": 2, "backoffLimitPerIndex": 0}
    api.create(JOBS, "ml", {"metadata": metadata, "spec": spec, "status": {"failedIndexes": "3", **status}})


def test_an_elastic_job_grows_once_by_what_was_seen_of_it(api, cluster):
    elastic_job(api, active=3, ready=2)
    found = cluster.gang(GangBackend.JOB, "ml", "digits-fit-1", "uid-1")
    assert (found.made, found.remaining, found.has_waiting_pods) == (4, 3, True)
    cluster.grow_gang(found, 5, 2)
    grown = {"completions": 5, "parallelism": 5, "maxFailedIndexes": 3, "backoffLimitPerIndex": 0}
    assert api.get(JOBS, "ml", "digits-fit-1")["spec"] == grown
    cluster.grow_gang(found, 6, 2)
    assert api.get(JOBS, "ml", "digits-fit-1")["spec"] == grown, "it has changed since"
    api.delete(JOBS, "ml", "digits-fit-1")
    cluster.grow_gang(found, 5, 2)


def test_a_gated_pod_is_sent_to_one_node_once(api, cluster):
    spec = {"schedulingGates": [{"name": MEMBER_GATE}], "nodeSelector": {"pool": "gpu"}, "containers": []}
    labels = {ATTEMPT_LABEL: "1", RUN_LABEL: "digits"}
    api.create(PODS, "ml", {"metadata": {"name": "member", "labels": labels}, "spec": spec})
    [gated] = cluster.attempt_pods("ml")
    assert (gated.is_gated, gated.planned_host) == (True, "")
    cluster.place_pod(gated, "n1")
    cluster.place_pod(gated, "n2")
    [placed] = cluster.attempt_pods("ml")
    assert (placed.is_gated, placed.planned_host) == (False, "n1")
    assert api.get(PODS, "ml", "member")["spec"]["nodeSelector"] == {"pool": "gpu", "kubernetes.io/hostname": "n1"}
    api.delete(PODS, "ml", "member")
    cluster.place_pod(gated, "n1")


@pytest.mark.parametrize("backend", [GangBackend.JOBSET, GangBackend.TRAINJOB])
def test_the_first_failure_of_a_job_set_is_that_of_the_job_below_it(server, api, cluster, backend):
    metadata = {"name": "digits-fit-1", "labels": {WORKFLOW_UID_LABEL: "uid-1"}}
    made = api.create(GANG_RESOURCES[backend], "ml", {"metadata": metadata})
    assert cluster.gang(backend, "ml", "digits-fit-1", "uid-1").first_failure is None
    assert server.count("get", "jobs") == 0, "while it runs there is nothing to look for"
    failed = [{"type": "Failed", "status": "True", "message": "jobset failed"}]
    api.replace(GANG_RESOURCES[backend], "ml", {**made, "status": {"conditions": failed}})
    assert cluster.gang(backend, "ml", "digits-fit-1", "uid-1").first_failure is None, "its Job is gone"
    message = "Container main for pod ml/digits-fit-1-node-0-2-x1z5q failed with exit code 75 matching FailJob rule"
    conditions = [{"type": "Failed", "status": "True", "message": message}]
    api.create(JOBS, "ml", {"metadata": {"name": "digits-fit-1-node-0"}, "status": {"conditions": conditions}})
    found = cluster.gang(backend, "ml", "digits-fit-1", "uid-1").first_failure
    assert found == FirstFailure("digits-fit-1-node-0-2-x1z5q", 75, message)
    server.authorize = lambda request: request.plural != "jobs"
    with pytest.raises(ForbiddenError, match=r"jobs.*the values gangs\.\* of the chart"):
        cluster.gang(backend, "ml", "digits-fit-1", "uid-1")


def test_attempt_pods_are_those_of_the_served_namespaces(server, api, cluster):
    for namespace in ("ml", "vision", "foreign"):
        server.add_namespace(namespace)
        api.create(PODS, namespace, pod(name=f"in-{namespace}", namespace=namespace))
    plain = pod(name="plain")
    del plain["metadata"]["labels"]["tiphys.dev/attempt"]
    api.create(PODS, "ml", plain)
    assert {one.name for one in cluster.attempt_pods()} == {"in-ml", "in-vision"}
    assert {one.name for one in cluster.attempt_pods("vision")} == {"in-vision"}
    everywhere = KubernetesCluster(api, None, "kubernetes:abc")
    assert {one.name for one in everywhere.attempt_pods()} == {"in-ml", "in-vision", "in-foreign"}


def test_pending_attempt_pods_are_those_that_have_not_started(api, cluster):
    api.create(PODS, "ml", pod(waits("main", "ErrImagePull"), name="fails", phase="Pending"))
    api.create(PODS, "ml", pod(name="runs"))
    assert {one.name for one in cluster.attempt_pods(pending_only=True)} == {"fails"}


def test_namespace_that_is_not_served_is_not_looked_into(server, cluster):
    with pytest.raises(ConflictError, match="does not serve namespace foreign"):
        cluster.pods("foreign", "digits", "uid-1", "1")
    with pytest.raises(ConflictError, match="foreign"):
        cluster.workflow("foreign", "digits")
    assert server.count() == 0


def test_workflow_is_read_whole_and_anew(api, cluster):
    assert cluster.workflow("ml", "digits") is None
    workflow(api)
    assert cluster.workflow("ml", "digits")["spec"] == {"templates": []}
    change(api, status={"phase": "Failed"})
    assert cluster.workflow("ml", "digits")["status"]["phase"] == "Failed"


def test_a_workflow_is_read_every_five_seconds_at_most(server, api, cluster, clock):
    made = workflow(api)
    for _ in range(5):
        seen = cluster.workflow_summary("ml", "digits")
    assert seen == {
        "metadata": {"uid": made["metadata"]["uid"]},
        "spec": {"shutdown": None},
        "status": {"phase": "Running"},
    }
    assert server.count("get", "workflows") == 1
    change(api, spec={"shutdown": "Stop"})
    clock.now += 5
    assert cluster.workflow_summary("ml", "digits")["spec"]["shutdown"] == "Stop"


@pytest.mark.parametrize("over", [{"status": {"phase": "Failed"}}, {"spec": {"shutdown": "Stop"}}])
def test_workflow_that_is_over_may_be_woken_at_any_time(api, cluster, over):
    workflow(api)
    change(api, **over)
    cluster.workflow_summary("ml", "digits")
    change(api, spec={}, status={"phase": "Running"})
    seen = cluster.workflow_summary("ml", "digits")
    assert (seen["status"]["phase"], seen["spec"]["shutdown"]) == ("Running", None)


def test_workflow_that_was_not_there_is_looked_for_again(api, cluster):
    assert cluster.workflow_summary("ml", "digits") is None
    workflow(api)
    assert cluster.workflow_summary("ml", "digits") is not None


def test_api_server_in_trouble_is_said(server, cluster):
    server.fail_next(503, plural="pods")
    with pytest.raises(StoreError):
        cluster.pods("ml", "digits", "uid-1", "1")
    server.fail_next(403, plural="workflows", message="workflows is forbidden")
    with pytest.raises(ForbiddenError, match="workflows is forbidden"):
        cluster.workflow("ml", "digits")


def test_a_pod_is_ended_with_its_own_grace_period(server, api, cluster):
    api.create(PODS, "ml", pod(name="mine"))
    [found] = cluster.pods("ml", "digits-abc12", "uid-1", "1")
    cluster.delete_pod(found)
    assert api.get(PODS, "ml", "mine") is None
    cluster.delete_pod(found)
    assert server.count("delete", "pods") == 2


def on_node(api, name: str, host: str, *containers: dict, **fields: str) -> None:
    body = pod(*containers, name=name, **fields)
    body["spec"]["nodeName"] = host
    api.create(PODS, "ml", body)


def test_of_the_pods_on_a_node_only_attempts_and_agents_of_served_namespaces_are_listed(server, api, cluster):
    server.add_namespace("other")
    on_node(api, "attempt", "n1")
    on_node(api, "elsewhere", "n2")
    on_node(api, "ended", "n1", ended("wait", 0), ended("main", 0), phase="Succeeded")
    agent = {"name": "agent", "labels": {"workflows.argoproj.io/component": "agent"}}
    for metadata in (agent, {"name": "notebook"}):
        body = {"metadata": metadata, "spec": {"nodeName": "n1", "containers": []}, "status": {"phase": "Running"}}
        api.create(PODS, "ml", body)
    assert [one.name for one in cluster.pods_on_node("n1")] == ["agent", "attempt"]


def test_the_pod_of_a_lost_node_ends_as_failed_whatever_its_containers_show(api, cluster):
    on_node(api, "lost", "n1")
    api.patch(PODS, "ml", "lost", {"metadata": {"finalizers": ["workflows.argoproj.io/status"]}})
    [found] = cluster.pods_on_node("n1")
    cluster.end_lost_pod(found, "no Lease of n1 was renewed")
    [kept] = cluster.pods("ml", "digits-abc12", "uid-1", "1")
    assert (kept.phase, kept.reason, kept.message, kept.ending) == (
        "Failed",
        "NodeLost",
        "no Lease of n1 was renewed",
        True,
    )
    assert cluster.pods_on_node("n1") == []


def test_a_pod_that_took_the_name_of_one_on_a_lost_node_is_left_alone(api, cluster):
    on_node(api, "lost", "n1")
    [found] = cluster.pods_on_node("n1")
    api.delete(PODS, "ml", "lost")
    cluster.end_lost_pod(found, "it is gone")
    on_node(api, "lost", "n1")
    cluster.end_lost_pod(found, "it is another")
    [other] = cluster.pods_on_node("n1")
    assert (other.phase, other.ending) == ("Running", False)


def test_a_new_pod_of_the_same_name_is_not_deleted(api, cluster):
    api.create(PODS, "ml", pod(name="mine"))
    [found] = cluster.pods("ml", "digits-abc12", "uid-1", "1")
    api.delete(PODS, "ml", "mine")
    api.create(PODS, "ml", pod(name="mine"))
    cluster.delete_pod(found)
    assert api.get(PODS, "ml", "mine") is not None


def test_a_pod_of_a_namespace_that_is_not_served_is_left_alone(cluster):
    foreign = PodStatus(name="p", namespace="foreign", workflow_uid="u", node="n")
    with pytest.raises(ConflictError, match="does not serve namespace foreign"):
        cluster.delete_pod(foreign)
