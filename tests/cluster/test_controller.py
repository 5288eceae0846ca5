"""The controller on a real API server, under an account with the rights that the chart gives it, and no more.

| what happens | what must hold |
|---|---|
| an agent pod fails under a live workflow | it is deleted, and the workflow says so |
| a run goes on | Events and annotations follow |
| the leader is killed | the next one goes on, and tells nothing twice |
| a Workflow is created twice, stopped under a wrong uid, watched | as the controller takes it for granted |
| doctor looks at the cluster | clocks and rights are told as they are |
"""

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster.client import Cluster, Store
from cluster.rights import grant, new_account
from support.builders.argo_objects import NARRATED
from support.builders.compiled_workflows import History
from support.processes.controller import ControllerProcess
from tiphys_controller.doctor import CheckStatus, Finding, check_cluster, observe_cluster
from tiphys_controller.kubernetes import KubernetesSubmitter

from tiphys.errors import ConflictError
from tiphys.kube import KubeApi, Object, identify_cluster
from tiphys.kube.resources import EVENTS, PODS, WORKFLOWS
from tiphys.protocol.step_spec import PIPELINE_ANNOTATION, RUN_PARAMETER, STORE_ANNOTATION
from tiphys.records import Cause, SubmissionBinding, SubmissionClaim, SubmissionKind
from tiphys.store import RunLayout
from tiphys.store import Store as RunStore

RUN = "digits-1"
RULES = [
    {"apiGroups": ["argoproj.io"], "resources": ["workflows"], "verbs": ["list", "watch", "patch"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch", "delete"]},
    {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]},
    {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create", "get", "update"]},
]


@pytest.fixture
def controller(
    cluster: Cluster, namespace: str, services_store: Store, tmp_path: Path
) -> Callable[[], ControllerProcess]:
    """Starts controllers with an account of their own."""
    file = new_account(cluster, namespace, "controller", RULES, tmp_path)
    given = [f"--store={services_store.url}", f"--namespace={namespace}", f"--lease-namespace={namespace}"]
    return lambda: ControllerProcess(given, {**services_store.environment, "KUBECONFIG": str(file)})


def submitted(api: KubeApi, store: RunStore) -> Object:
    """A Workflow that its first admit has bound to the run."""
    parameters = [{"name": RUN_PARAMETER, "value": RUN}]
    manifest: Object = {
        "metadata": {
            "name": RUN,
            "namespace": api.namespace,
            "labels": {PIPELINE_ANNOTATION: "digits"},
            "annotations": {PIPELINE_ANNOTATION: "digits", STORE_ANNOTATION: store.url, **NARRATED},
        },
        "spec": {"entrypoint": "main", "arguments": {"parameters": parameters}},
        "status": {"phase": "Running"},
    }
    made = api.create(WORKFLOWS, api.namespace, manifest)
    claimed = SubmissionClaim(
        run=RUN, submission=1, kind=SubmissionKind.ORIGINAL, workflow_name=RUN, namespace=api.namespace
    )
    bound = SubmissionBinding(
        run=RUN,
        submission=1,
        cluster=identify_cluster(api),
        namespace=api.namespace,
        workflow_name=RUN,
        uid=made["metadata"]["uid"],
    )
    store.create(RunLayout(RUN).submission(1), claimed.to_bytes())
    store.create(RunLayout(RUN).submission_binding(1), bound.to_bytes())
    return made


def failed_agent(api: KubeApi, owner: Object) -> None:
    """A pod that no node takes, marked as Failed."""
    reference = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": RUN}
    pod: Object = {
        "metadata": {
            "name": f"{RUN}-agent",
            "labels": {"workflows.argoproj.io/component": "agent"},
            "ownerReferences": [{**reference, "uid": owner["metadata"]["uid"]}],
        },
        "spec": {"schedulerName": "nobody", "containers": [{"name": "main", "image": "none"}]},
    }
    api.create(PODS, api.namespace, pod)
    status = {"status": {"phase": "Failed", "reason": "Evicted", "message": "low on memory"}}
    api.patch(PODS, api.namespace, f"{RUN}-agent", status, subresource="status")


def posted_events(api: KubeApi, owner: Object) -> list[str]:
    """Reasons of the Events of one Workflow."""
    uid = owner["metadata"]["uid"]
    return sorted(one["reason"] for one in api.list(EVENTS, api.namespace, fields=f"involvedObject.uid={uid}").items)


def annotation(api: KubeApi, name: str) -> str:
    found = api.get(WORKFLOWS, api.namespace, RUN) or {"metadata": {"annotations": {}}}
    return str(found["metadata"]["annotations"].get(f"workflows.argoproj.io/{name}"))


def test_a_controller_heals_and_tells_and_the_next_one_goes_on(
    cluster: Cluster, api: KubeApi, run_store: RunStore, controller: Callable[[], ControllerProcess]
) -> None:
    history = History(run_store, RUN)
    with controller() as first:
        cluster.wait("it is ready", lambda: first.get("/readyz")[0] == 200 and first.said("leader.elected"))
        owner = submitted(api, run_store)
        failed_agent(api, owner)
        cluster.wait("the pod is gone", lambda: api.get(PODS, api.namespace, f"{RUN}-agent") is None)
        history.failed("fit", 1, Cause.PREEMPTION, "the node was taken away")
        api.patch(WORKFLOWS, api.namespace, RUN, {"status": {"progress": "1/2"}})
        cluster.wait("both are told", lambda: posted_events(api, owner) == ["AgentPodDeleted", "AttemptFailed"])
        cluster.wait("the title follows", lambda: annotation(api, "title") == RUN)
        first.send(signal.SIGKILL)
        first.ended()
    history.opened("fit", 2)
    api.patch(WORKFLOWS, api.namespace, RUN, {"spec": {"shutdown": "Stop"}, "status": {"phase": "Failed"}})
    with controller() as second:
        expected = ["AgentPodDeleted", "AttemptFailed", "AttemptStarted", "RunFailed", "WorkflowStopped"]
        cluster.wait("the next one tells the rest, and nothing twice", lambda: posted_events(api, owner) == expected)
        cluster.wait("it says how to go on", lambda: f"tiphys resume {RUN}" in annotation(api, "description"))
        second.send(signal.SIGTERM)
        assert second.ended() == 0


def test_a_missing_right_is_named(cluster: Cluster, api: KubeApi, controller: Callable[[], ControllerProcess]) -> None:
    lacking = json.dumps({"rules": [rule for rule in RULES if rule["resources"] != ["pods"]]})
    cluster.kubectl("patch", "role", "controller", "-n", api.namespace, "--type=merge", f"--patch={lacking}")
    with controller() as process:
        found = cluster.wait(
            "it says what it may not do",
            lambda: (answer := process.get("/readyz")) and "cannot watch pods" in answer[1] and answer,
        )
        cluster.wait("its log says why", lambda: process.said("watch.lost"))
    assert found[0] == 503
    assert api.namespace not in found[1]


def test_workflows_are_created_once_stopped_by_uid_and_watched(cluster: Cluster, api: KubeApi) -> None:
    submitter = KubernetesSubmitter(api, identify_cluster(api))
    manifest: Object = {"metadata": {"name": RUN, "namespace": api.namespace}, "spec": {"entrypoint": "main"}}
    live = submitter.create(manifest)
    assert live.running
    with pytest.raises(ConflictError):
        submitter.create(manifest)
    with pytest.raises(ConflictError):
        submitter.stop(live._replace(uid="00000000-0000-0000-0000-000000000000"))
    submitter.stop(live)
    phases = []
    for document in submitter.watch(live, threading.Event()):
        assert document["spec"]["shutdown"] == "Stop"
        phases.append((document.get("status") or {}).get("phase"))
        if phases == [None]:
            api.patch(WORKFLOWS, api.namespace, RUN, {"status": {"phase": "Failed"}})
    assert phases == [None, "Failed"]


RULES_OF_ACCOUNTS = {
    "tiphys-executor": [
        {"apiGroups": ["argoproj.io"], "resources": ["workflowtaskresults"], "verbs": ["create", "patch"]},
    ],
    "tiphys-workflow": [
        {"apiGroups": ["argoproj.io"], "resources": ["workflowtasksets"], "verbs": ["list", "watch"]},
        {"apiGroups": ["argoproj.io"], "resources": ["workflowtasksets/status"], "verbs": ["patch"]},
    ],
}


def test_doctor_sees_clocks_and_rights_as_they_are(cluster: Cluster, api: KubeApi) -> None:
    for account in RULES_OF_ACCOUNTS:
        grant(cluster, api.namespace, account, [])

    def findings() -> list[Finding]:
        return check_cluster(observe_cluster(api, [api.namespace]))

    def rights() -> list[Finding]:
        return [one for one in findings() if one.name == f"{api.namespace}/rights"]

    before = {one.name: one for one in findings()}
    assert before["clocks"].state is CheckStatus.OK, before["clocks"].sentence
    assert before["argo-kinds"].state is CheckStatus.OK
    assert before["api-server"].state is CheckStatus.OK
    executor, agent = rights()
    assert "tiphys-executor may not create workflowtaskresults" in executor.sentence
    assert "tiphys-workflow may not watch workflowtasksets" in agent.sentence
    for account, rules in RULES_OF_ACCOUNTS.items():
        grant(cluster, api.namespace, account, rules)
    cluster.wait("the rights are seen", lambda: {one.state for one in rights()} == {CheckStatus.OK})
