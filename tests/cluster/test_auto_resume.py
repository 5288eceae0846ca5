"""Runs that go on by themselves on a real API server and a real S3 server, under the rights that the chart gives.

| what happens | what must hold |
|---|---|
| a Workflow fails from outside | the controller makes the next one, pruned, and says so |
| the next one is deleted while nobody watches | whoever leads then makes a third |
| Alertmanager says that a run has failed | the same, once |
"""

import http.client
import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster.client import Cluster, Store
from cluster.rights import new_account
from support.builders.compiled_workflows import History, gated, pipeline_of
from support.processes.controller import ControllerProcess
from tiphys_controller import start_run
from tiphys_controller.kubernetes import KubernetesSubmitter

from tiphys.kube import KubeApi, identify_cluster
from tiphys.kube.resources import EVENTS, WORKFLOWS
from tiphys.protocol.auto_resume_policy import AUTO_RESUME_ANNOTATION, AutoResumePolicy
from tiphys.protocol.step_spec import PIPELINE_ANNOTATION
from tiphys.records import Cause
from tiphys.store import Store as RunStore

RUN = "digits-1"
TOKEN = "a-secret-token"
RULES = [
    {"apiGroups": ["argoproj.io"], "resources": ["workflows"], "verbs": ["list", "watch", "patch", "get", "create"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch", "delete"]},
    {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["kube-root-ca.crt"], "verbs": ["get"]},
    {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]},
    {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create", "get", "update"]},
]


@pytest.fixture
def controller(
    cluster: Cluster, namespace: str, services_store: Store, tmp_path: Path
) -> Callable[[], ControllerProcess]:
    """Starts controllers with an account of their own."""
    file = new_account(cluster, namespace, "controller", RULES, tmp_path)
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "rules.json").write_text(json.dumps({"RunFailed": "resume"}))
    given = [
        f"--store={services_store.url}",
        f"--namespace={namespace}",
        f"--lease-namespace={namespace}",
        "--auto-resume=on",
        "--absent-seconds=5",
        f"--token-file={tmp_path / 'token'}",
        f"--alert-rules={tmp_path / 'rules.json'}",
    ]
    return lambda: ControllerProcess(given, {**services_store.environment, "KUBECONFIG": str(file)})


def started(api: KubeApi, store: RunStore, policy: AutoResumePolicy | None) -> History:
    """A run whose first step is done."""
    manifest = pipeline_of(gated("prep"), gated("fit", depends="prep"))
    manifest["metadata"]["labels"] = {PIPELINE_ANNOTATION: "digits"}
    if policy is not None:
        manifest["metadata"]["annotations"][AUTO_RESUME_ANNOTATION] = policy.model_dump_json()
    start_run(store, KubernetesSubmitter(api, identify_cluster(api)), manifest, RUN, namespace=api.namespace)
    history = History(store, RUN)
    history.done("prep")
    return history


def end(api: KubeApi, name: str) -> None:
    api.patch(WORKFLOWS, api.namespace, name, {"status": {"phase": "Failed"}})


def names(api: KubeApi) -> list[str]:
    return sorted(one["metadata"]["name"] for one in api.list(WORKFLOWS, api.namespace).items)


def tasks(api: KubeApi, name: str) -> list[str]:
    found = api.get(WORKFLOWS, api.namespace, name) or {"spec": {"templates": [{"dag": {"tasks": []}}]}}
    return [task["name"] for task in found["spec"]["templates"][0]["dag"]["tasks"]]


def reasons(api: KubeApi) -> set[str]:
    return {one["reason"] for one in api.list(EVENTS, api.namespace).items}


def test_a_run_goes_on_by_itself_and_under_the_next_controller(
    cluster: Cluster, api: KubeApi, run_store: RunStore, controller: Callable[[], ControllerProcess]
) -> None:
    history = started(api, run_store, AutoResumePolicy(cooldown_seconds=0))
    with controller() as first:
        cluster.wait("it leads", lambda: first.said("leader.elected"))
        history.failed("fit", 1, Cause.PREEMPTION, "the node was taken away")
        end(api, RUN)
        cluster.wait("the next Workflow is there", lambda: names(api) == [RUN, f"{RUN}-2"])
        assert tasks(api, f"{RUN}-2") == ["fit"]
        cluster.wait("it is told", lambda: "AutoResumed" in reasons(api))
        first.send(signal.SIGKILL)
        first.ended()
    api.delete(WORKFLOWS, api.namespace, f"{RUN}-2")
    with controller() as second:
        cluster.wait("the third is there", lambda: names(api) == [RUN, f"{RUN}-3"])
        second.send(signal.SIGTERM)
        assert second.ended() == 0


def test_an_alert_has_a_run_resumed_once(
    cluster: Cluster, api: KubeApi, run_store: RunStore, controller: Callable[[], ControllerProcess]
) -> None:
    started(api, run_store, None)
    end(api, RUN)
    alert = {
        "status": "firing",
        "labels": {"alertname": "RunFailed", "namespace": api.namespace, "workflow": RUN},
        "startsAt": "2026-05-04T11:00:00.000Z",
        "fingerprint": "ab12",
    }
    with controller() as process:
        cluster.wait("it leads", lambda: process.said("leader.elected"))
        for _ in range(3):
            assert post(process, "/v1/alerts", {"version": "4", "alerts": [alert]}) == 202
        cluster.wait("the run goes on", lambda: names(api) == [RUN, f"{RUN}-2"])
        cluster.wait("it is told", lambda: "AlertHandled" in reasons(api))
        process.send(signal.SIGTERM)
        assert process.ended() == 0


def post(process: ControllerProcess, path: str, body: object) -> int:
    connection = http.client.HTTPConnection(process.url.removeprefix("http://"), timeout=60)
    try:
        connection.request("POST", path, json.dumps(body), {"Authorization": f"Bearer {TOKEN}"})
        return connection.getresponse().status
    finally:
        connection.close()
