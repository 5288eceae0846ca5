"""A hundred nodes that nobody has to pay for: the real scheduler sees them, real pods do not."""

import pytest
from cluster.client import Cluster, Json
from cluster.fixtures import FAKE, FakeNodes

MODEL = "NVIDIA-A100-SXM4-80GB"
DOMAIN = "tiphys.test/nvlink-domain"


def pod(name: str, **spec: object) -> Json:
    """A pod that wants all GPUs of a node; its image does not exist, so that no kubelet could run it."""
    container = {"name": "main", "image": "nowhere.test/none:1", "resources": {"limits": {"nvidia.com/gpu": "8"}}}
    body = {"restartPolicy": "Never", "containers": [container], **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": body}


def nodes(cluster: Cluster) -> dict[str, Json]:
    return {node["metadata"]["name"]: node for node in cluster.get("nodes")["items"]}


def test_a_hundred_nodes_are_ready_with_their_gpus_and_labels(cluster: Cluster, fake_nodes: FakeNodes) -> None:
    names = fake_nodes("wide", 100, gpus=8, model=MODEL, taints=["gpu=yes:NoSchedule"])
    found = nodes(cluster)
    for node in (found[name] for name in names):
        assert node["status"]["allocatable"]["nvidia.com/gpu"] == "8"
        assert node["metadata"]["labels"]["nvidia.com/gpu.product"] == MODEL
        assert {f"{each['key']}={each['value']}:{each['effect']}" for each in node["spec"]["taints"]} == {
            "kwok.x-k8s.io/node=fake:NoSchedule",
            "gpu=yes:NoSchedule",
        }
        (ready,) = (each for each in node["status"]["conditions"] if each["type"] == "Ready")
        assert ready["status"] == "True"
    assert len(names) == 100


def test_the_scheduler_finds_the_one_that_a_pod_selects_and_the_pod_goes_when_it_is_deleted(
    cluster: Cluster, namespace: str, fake_nodes: FakeNodes
) -> None:
    fake_nodes("first", 2, gpus=8, model=MODEL, labels={DOMAIN: "a"})
    (wanted,) = fake_nodes("second", 1, gpus=8, model=MODEL, labels={DOMAIN: "b"})
    selector = {"nvidia.com/gpu.product": MODEL, DOMAIN: "b"}
    cluster.apply(pod("here", nodeSelector=selector, tolerations=[FAKE]), namespace=namespace)
    cluster.wait("it runs", lambda: status(cluster, "here", namespace).get("phase") == "Running")
    assert cluster.get("pod", "here", namespace=namespace)["spec"]["nodeName"] == wanted

    cluster.apply(pod("no-room", nodeSelector=selector, tolerations=[FAKE]), namespace=namespace)
    cluster.apply(pod("real", nodeSelector=selector), namespace=namespace)
    cluster.wait("there is no room", lambda: "Insufficient nvidia.com/gpu" in refusal(cluster, "no-room", namespace))
    cluster.wait("it does not tolerate", lambda: "untolerated taint" in refusal(cluster, "real", namespace))

    cluster.kubectl("delete", "pod", "here", "--namespace", namespace, "--timeout=300s")
    cluster.wait("the next has its place", lambda: status(cluster, "no-room", namespace).get("phase") == "Running")


def test_a_removed_group_of_fake_nodes_leaves_no_nodes_and_no_pods(
    cluster: Cluster, namespace: str, request: pytest.FixtureRequest
) -> None:
    if not cluster.own:
        pytest.skip("only `make cluster` can be given fake nodes")
    cluster.harness("add-fake-nodes", "brief", "3", "--gpus=8")
    request.addfinalizer(lambda: cluster.harness("remove-fake-nodes", "brief"))
    cluster.apply(pod("here", tolerations=[FAKE]), namespace=namespace)
    cluster.wait("it runs", lambda: status(cluster, "here", namespace).get("phase") == "Running")
    cluster.harness("remove-fake-nodes", "brief")
    assert not [name for name in nodes(cluster) if name.startswith("brief-")]
    assert not cluster.get("pods", namespace=namespace)["items"]


def status(cluster: Cluster, name: str, namespace: str) -> Json:
    found: Json = cluster.get("pod", name, namespace=namespace)["status"]
    return found


def refusal(cluster: Cluster, name: str, namespace: str) -> str:
    """What the scheduler says of a pod that waits."""
    return " ".join(each.get("message", "") for each in status(cluster, name, namespace).get("conditions", []))
