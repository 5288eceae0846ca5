"""What keeps a Workflow from going on is named with its remedy, from objects as a real cluster writes them."""

import gzip
import json
from base64 import b64encode
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from support.servers.kube_server import serving
from tiphys_controller.doctor.obstacles import Obstacle, distinct_obstacles, find_obstacles, observe_obstacles

from tiphys.errors import ForbiddenError
from tiphys.kube import Object
from tiphys.kube.resources import EVENTS, PODS, WORKFLOWS
from tiphys.protocol.workflow_nodes import NODE_NAME_ANNOTATION, WORKFLOW_LABEL

NOW = datetime(2026, 11, 27, 12, 0, tzinfo=UTC)
QUOTA = (
    'pods "digits-1-fit-run-1" is forbidden: exceeded quota: few, requested: requests.cpu=2, limited: requests.cpu=1'
)
ACCOUNT = 'pods "x" is forbidden: error looking up service account ml/nobody: serviceaccount "nobody" not found'
WEBHOOK = 'admission webhook "images.example.com" denied the request: no tags'


def ago(seconds: float) -> str:
    return (NOW - timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")


def workflow(*nodes: Object, name: str = "digits-1", phase: str = "Running", age: float = 300) -> Object:
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {
            "name": name,
            "namespace": "ml",
            "uid": f"uid-{name}",
            "creationTimestamp": ago(age),
            "labels": {"tiphys.dev/pipeline": "digits"},
        },
        "status": {"phase": phase, "nodes": {node["name"]: node for node in nodes}},
    }


def node(name: str, kind: str, phase: str, message: str = "", age: float = 100) -> Object:
    return {"name": f"digits-1.{name}", "type": kind, "phase": phase, "message": message, "startedAt": ago(age)}


def pod(status: Object, *, step: str = "fit.run(0)", age: float = 60, owner: str = "digits-1", **labels: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{owner}-{step.replace('.', '-').replace('(', '').replace(')', '')}",
            "namespace": "ml",
            "uid": f"pod-{step}",
            "creationTimestamp": ago(age),
            "labels": labels or {WORKFLOW_LABEL: owner},
            "annotations": {NODE_NAME_ANNOTATION: f"{owner}.{step}"},
        },
        "status": {"phase": "Pending", **status},
    }


def waiting(reason: str, message: str = "", container: str = "main", statuses: str = "containerStatuses") -> Object:
    state = {"waiting": {"reason": reason, "message": message}}
    return {statuses: [{"name": container, "image": "registry/trainer:1", "state": state}]}


def unscheduled(message: str) -> Object:
    return {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]}


def event(reason: str, message: str, step: str = "fit.run(0)") -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"event-{step}", "namespace": "ml"},
        "type": "Warning",
        "reason": reason,
        "message": message,
        "involvedObject": {"uid": f"pod-{step}"},
    }


def only(*found: Any) -> Obstacle:
    [one] = found
    return one


@pytest.mark.parametrize(
    ("status", "sentence", "remedy"),
    [
        (
            waiting("ErrImagePull", "not found"),
            "of image registry/trainer:1 does not start: ErrImagePull",
            "correct the",
        ),
        (waiting("InvalidImageName"), "does not start: InvalidImageName", "correct the image"),
        (waiting("ErrImagePull", 'Head "https://r/v2": dial tcp: no such host'), "dial tcp", "name of the registry"),
        (waiting("ImagePullBackOff", "pull access denied, authorization failed"), "denied", "image pull secret"),
        (waiting("CreateContainerConfigError", 'secret "keys" not found'), "ConfigError: secret", "create this Secret"),
        (waiting("CreateContainerConfigError", 'configmap "c" not found'), "configmap", "create this ConfigMap"),
        (
            waiting("CrashLoopBackOff", "back-off", "tiphys", "initContainerStatuses"),
            "container tiphys does not start: CrashLoopBackOff",
            "kubectl describe",
        ),
        (unscheduled("0/3 nodes are available: 3 Insufficient nvidia.com/gpu."), "no node takes its pod", "add nodes"),
        (unscheduled("0/1 nodes are available: 1 node(s) had untolerated taint {a: b}."), "taint", "toleration"),
        (
            unscheduled("0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims."),
            "PersistentVolumeClaims",
            "create the claim",
        ),
    ],
)
def test_a_pod_that_does_not_start(status: Object, sentence: str, remedy: str) -> None:
    found = only(*find_obstacles(workflow(), [pod(status)], [], NOW))
    assert (found.namespace, found.workflow, found.step) == ("ml", "digits-1", "fit.run(0)")
    assert sentence in found.sentence
    assert remedy in found.remedy
    assert str(found).startswith("ml/digits-1, fit.run(0): ")


def test_a_mount_that_fails_is_known_by_its_event_alone() -> None:
    stuck = pod(waiting("PodInitializing"))
    said = event("FailedMount", 'MountVolume.SetUp failed for volume "tiphys-store" : secret "tiphys-store" not found')
    found = only(*find_obstacles(workflow(), [stuck], [said], NOW))
    assert "FailedMount: MountVolume.SetUp failed" in found.sentence
    assert "create this Secret" in found.remedy
    assert not find_obstacles(workflow(), [stuck], [event("FailedMount", "x", step="other")], NOW)
    assert not find_obstacles(workflow(), [stuck], [event("BackOff", "x")], NOW)


@pytest.mark.parametrize(
    "harmless",
    [
        pod(unscheduled("0/1 nodes"), age=5),
        pod(unscheduled("0/1 nodes"), owner="digits-10"),
        pod({"phase": "Running"}),
        pod(waiting("ContainerCreating")),
        {**pod(unscheduled("0/1 nodes"), age=60), "metadata": {**pod({})["metadata"], "deletionTimestamp": ago(1)}},
    ],
    ids=["young", "of another Workflow", "runs", "is being made", "is being deleted"],
)
def test_a_pod_that_is_young_runs_or_ends_is_no_obstacle(harmless: Object) -> None:
    assert find_obstacles(workflow(), [harmless], [], NOW) == []


def test_a_pod_of_a_gang_belongs_to_its_workflow() -> None:
    member = pod(
        unscheduled("0/1 nodes are available: 1 Insufficient cpu."), **{"tiphys.dev/workflow-uid": "uid-digits-1"}
    )
    assert len(find_obstacles(workflow(), [member], [], NOW)) == 1


@pytest.mark.parametrize(
    ("message", "sentence", "remedy"),
    [
        (QUOTA, "Argo makes no pod: exceeded quota: few", "raise the quota"),
        (ACCOUNT, 'serviceaccount "nobody" not found', "create the service account"),
        (WEBHOOK, 'admission webhook "images.example.com" denied', "webhook"),
    ],
)
def test_a_pod_that_argo_cannot_make(message: str, sentence: str, remedy: str) -> None:
    tries = [node(f"fit.run({n})", "Pod", "Error", message, age=100 - n) for n in range(3)]
    found = only(*find_obstacles(workflow(*tries), [], [], NOW))
    assert (found.step, sentence in found.sentence, remedy in found.remedy) == ("fit.run(2)", True, True), found
    assert not find_obstacles(workflow(*tries, node("fit.run(3)", "Pod", "Running", age=1)), [], [], NOW)
    pending = node("fit.run(3)", "Pod", "Pending", message, age=1)
    assert only(*find_obstacles(workflow(*tries, pending), [], [], NOW)).step == "fit.run(3)"


def test_an_error_that_another_try_may_pass_is_none() -> None:
    assert not find_obstacles(workflow(node("fit.run(0)", "Pod", "Error", "pod deleted")), [], [], NOW)


def test_a_namespace_without_a_service_is_named_after_a_minute() -> None:
    admit = node("fit.admit", "Plugin", "Pending", age=70)
    found = only(*find_obstacles(workflow(admit), [], [], NOW))
    assert "no service of Tiphys answers for this namespace" in found.sentence
    assert "add ml to namespaces= of the chart" in found.remedy
    assert not find_obstacles(workflow(node("fit.admit", "Plugin", "Pending", age=50)), [], [], NOW)
    assert not find_obstacles(workflow(node("fit.admit", "Plugin", "Pending", "waits for 2 GPUs")), [], [], NOW)


def test_a_workflow_that_argo_does_not_see() -> None:
    found = only(*find_obstacles(workflow(phase=""), [], [], NOW))
    assert "workflow-controller has not looked at it" in found.sentence
    assert not find_obstacles(workflow(phase="", age=5), [], [], NOW)


def test_the_same_cause_is_reported_once() -> None:
    pods = [pod(unscheduled("0/1 nodes: 1 Insufficient cpu."), step=f"fit({n}:{n})") for n in range(50)]
    found = find_obstacles(workflow(), pods, [], NOW)
    assert len(distinct_obstacles(found)) == 1
    assert distinct_obstacles(found)[0].step == "fit(0:0)"
    assert len({obstacle.step for obstacle in found}) == 50, "whoever asks for one item is told"
    assert {obstacle.task for obstacle in found} == {"fit"}
    assert len(distinct_obstacles([*found, *(one._replace(workflow="digits-2") for one in found)])) == 2


def test_compressed_nodes_are_read_too() -> None:
    refused = workflow(node("fit.run(0)", "Pod", "Error", QUOTA))
    nodes = json.dumps(refused["status"].pop("nodes")).encode()
    refused["status"]["compressedNodes"] = b64encode(gzip.compress(nodes)).decode()
    assert "exceeded quota" in only(*find_obstacles(refused, [], [], NOW)).sentence


def test_the_newest_of_many_tries_counts_though_they_began_in_one_second() -> None:
    tries = [node(f"fit.run({n})", "Pod", "Error", QUOTA, age=9) for n in range(10)]
    tries += [node("fit.run(10)", "Pod", "Running", age=9)]
    assert not find_obstacles(workflow(*tries), [], [], NOW)


def test_the_cluster_is_asked_for_what_has_not_ended() -> None:
    with serving() as server:
        server.add_namespace("other")
        api = server.api()
        for one in (workflow(), workflow(name="over-1", phase="Failed"), workflow(name="digits-2")):
            api.create(WORKFLOWS, "ml", one)
        foreign = workflow(name="foreign-1")
        foreign["metadata"]["labels"] = {}
        api.create(WORKFLOWS, "ml", foreign)
        for owner in ("digits-1", "digits-2", "over-1", "foreign-1"):
            api.create(PODS, "ml", pod(unscheduled(f"0/1 nodes: 1 Insufficient {owner}."), owner=owner))
        api.create(EVENTS, "ml", event("FailedMount", "x"))
        later = NOW + timedelta(days=3650)  # the server sets the time at which an object was made
        assert {one.workflow for one in observe_obstacles(api, None, later)} == {"digits-1", "digits-2"}
        assert {one.workflow for one in observe_obstacles(api, "ml", later, {"digits-2"})} == {"digits-2"}
        assert observe_obstacles(api, "other", later) == []
        server.fail_next(403, plural="events")
        assert len(observe_obstacles(api, None, later)) == 2, "without events it tells what it can"
        server.fail_next(403, plural="workflows")
        with pytest.raises(ForbiddenError):
            observe_obstacles(api, None, later)
