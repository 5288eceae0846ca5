"""Nodes of Kubernetes as nodes of the inventory.

| what the cluster says | what follows |
|---|---|
| labels, allocatable GPUs | type, memory, place, number |
| no GPU, other labels than wanted, no host name | not of the inventory |
| cordoned, not ready, a fault, a notice | kept, and nothing new starts there; a fault or notice: what runs has to go |
| a GPU that the device plugin has taken out | counts as gone, and as a hint |
| pods of others | their GPUs are used |
| pods with the label of an attempt | GPUs beyond the lease of that attempt on this node are those of others |
| pods of trainings that could not start | hints |
| a resource of GPUs under another name | those of the first flavor that it fits; otherwise said, and not counted |
"""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from support.builders.cluster_nodes import MODEL, SPOT, condition, failed_pod, foreign_pod, labelled_pod, node
from support.builders.ledger import lease
from tiphys_plugin.cluster.interface import requested_resources
from tiphys_plugin.nodes.cluster_state import observe_nodes
from tiphys_plugin.nodes.health import NodeHealth
from tiphys_plugin.nodes.node import ObservedNode
from tiphys_plugin.quota.flavors import ClusterNodes, Flavor, FlavorSet, HealthSignal
from tiphys_plugin.quota.placement.model import GpuNode

NOW = datetime(2026, 1, 1, tzinfo=UTC)
USUAL = ClusterNodes()


def only(seen: list[ObservedNode]) -> ObservedNode:
    [one] = seen
    return one


def looked_at(found, *pods, settings: ClusterNodes = USUAL, now: datetime = NOW) -> ObservedNode:
    return only(observe_nodes([found], pods, settings, now))


def test_a_node_is_what_its_labels_say():
    labels = {
        "nvidia.com/gpu.memory": "81920",
        "nvidia.com/gpu.clique": "domain.0",
        "topology.kubernetes.io/zone": "z1",
        "topology.kubernetes.io/rack": "r1",
    }
    seen = looked_at(node("n1", 8, labels=labels))
    place = {"block": "z1", "rack": "r1", "nvlink_domain": "domain.0"}
    assert seen.node == GpuNode(name="n1", gpu_type=MODEL, gpus=8, memory_mb=81920, **place)
    assert seen.verdict.state is NodeHealth.HEALTHY


def test_labels_may_be_others_and_the_host_name_is_what_pods_are_sent_by():
    found = node("object", labels={"kubernetes.io/hostname": "host", "rack": "r7", "mb": "10", "pool": "training"})
    settings = ClusterNodes(rack_label="rack", memory_label="mb", selector={"pool": "training"})
    seen = looked_at(found, settings=settings)
    assert (seen.node.name, seen.object_name, seen.node.rack, seen.node.memory_mb) == ("host", "object", "r7", 10)


def test_a_node_outside_of_the_selection_is_left_out():
    others = [
        node("none", 0),
        node("other", labels={"pool": "web"}),
        node("nameless", labels={"kubernetes.io/hostname": ""}),
    ]
    assert observe_nodes(others, [], ClusterNodes(selector={"pool": "training"}), NOW) == []
    assert [one.node.name for one in observe_nodes(others, [], USUAL, NOW)] == ["other"]


def test_nodes_of_the_same_host_name_count_once():
    twice = [node("b", labels={"kubernetes.io/hostname": "h"}), node("a", labels={"kubernetes.io/hostname": "h"})]
    assert only(observe_nodes(twice, [], USUAL, NOW)).object_name == "a"


def test_gpus_of_no_type_serve_requests_without_a_type():
    assert looked_at(node("n1", labels={"nvidia.com/gpu.product": ""})).node.gpu_type == "unknown"


@pytest.mark.parametrize(
    ("found", "state", "broken", "going"),
    [
        (node("n1", 8, unschedulable=True), NodeHealth.HEALTHY, False, False),
        (node("n1", 8, condition("Ready", "False", "kubelet stopped")), NodeHealth.UNHEALTHY, False, False),
        (node("n1", 8, condition("Ready", "Unknown")), NodeHealth.UNHEALTHY, False, False),
        (node("n1", 8, condition("GpuThermalWatch", message="hot")), NodeHealth.UNHEALTHY, False, False),
        (node("n1", 8, condition("GpuMemWatch", message="ECC")), NodeHealth.UNHEALTHY, True, False),
        (node("n1", 8, condition("AcceleratedHardwareReady", "False")), NodeHealth.UNHEALTHY, True, False),
        (node("n1", 8, labels={"dgxc.nvidia.com/nvsentinel-state": "quarantined"}), NodeHealth.UNHEALTHY, True, False),
        (node("n1", 8, taints=(SPOT,)), NodeHealth.UNHEALTHY, False, True),
    ],
    ids=["cordoned", "not-ready", "lost", "hot", "fault", "fault-when-false", "label", "notice"],
)
def test_a_cordoned_or_faulty_node_takes_no_new_trainings(found, state, broken, going):
    seen = looked_at(found)
    assert seen.node.cordoned
    assert (seen.verdict.state, seen.verdict.is_broken, seen.verdict.is_departing) == (state, broken, going)
    assert seen.node.gpus == 8, "what runs there goes on"


def test_a_kubelet_that_never_reported_is_not_ready():
    found = node()
    found["status"]["conditions"] = []
    assert looked_at(found).verdict.message == "condition Ready: its kubelet has not reported yet"


def test_a_condition_that_is_well_says_nothing():
    well = (condition("GpuMemWatch", "False"), condition("AcceleratedHardwareReady"), condition("DiskPressure"))
    assert looked_at(node("n1", 8, *well)).verdict.evidence == ()


def test_settings_come_before_what_is_known_anyway():
    signs = (
        HealthSignal(kind="condition", name="GpuMemWatch", means="nothing"),
        HealthSignal(kind="label", name="health", values=("bad",)),
        HealthSignal(kind="taint", name="leaves", means="notice"),
    )
    settings = ClusterNodes(signs=signs)
    ill = node("n1", 8, condition("GpuMemWatch"))
    assert looked_at(ill, settings=settings).verdict.evidence == ()
    assert looked_at(node(labels={"health": "bad"}), settings=settings).node.cordoned
    assert not looked_at(node(labels={"health": "good"}), settings=settings).node.cordoned
    assert looked_at(node(taints=("leaves",)), settings=settings).verdict.is_departing


def test_gpus_that_the_device_plugin_took_out_are_gone_and_a_hint():
    seen = looked_at(node("n1", 7, installed=8))
    assert (seen.node.gpus, seen.node.cordoned) == (7, False)
    assert "1 of 8 GPUs are not offered" in seen.verdict.message
    assert looked_at(node("n1", 7, installed=8), failed_pod()).verdict.state is NodeHealth.SUSPECT


def test_gpus_of_others_are_used():
    pods = [
        foreign_pod("a", 2),
        foreign_pod("b", 1),
        foreign_pod("c", 4, phase="Succeeded"),
        foreign_pod("d", 1, on="n2"),
    ]
    pods += [foreign_pod("e", 2, on=""), foreign_pod("f", 0)]
    assert looked_at(node(), *pods).node.foreign_gpus == 3


LEASED = replace(lease(4, "u1", namespace="ml", members=2), nodes=("host-1", "host-2"))
"""Two GPUs each on two nodes, for attempt 1 of the Workflow u1."""


@pytest.mark.parametrize(
    ("pods", "foreign"),
    [
        ([labelled_pod("a", 2)], 0),
        ([labelled_pod("a", 1), labelled_pod("b", 1)], 0),
        ([labelled_pod("a", 2), labelled_pod("b", 2)], 2),
        ([labelled_pod("a", 8)], 6),
        ([labelled_pod("a", 8, phase="Failed")], 0),
        ([labelled_pod("a", 2, namespace="other")], 2),
        ([labelled_pod("a", 2, uid="u9")], 2),
        ([labelled_pod("a", 2, attempt="2")], 2),
        ([labelled_pod("a", 2), labelled_pod("b", 4, namespace="other"), foreign_pod("c", 1)], 5),
    ],
    ids=[
        *("leased", "two pods of it", "twice", "more than its lease", "over", "another namespace", "another Workflow"),
        *("another attempt", "beside it"),
    ],
)
def test_gpus_of_a_pod_beyond_the_lease_of_the_attempt_that_it_names_are_those_of_others(pods, foreign):
    labels = {"kubernetes.io/hostname": "host-1"}
    [seen] = observe_nodes([node(labels=labels)], pods, ClusterNodes(), NOW, leases=[LEASED])
    assert seen.node.foreign_gpus == foreign


def test_a_lease_without_nodes_covers_its_pods_on_each_node():
    [seen] = observe_nodes([node()], [labelled_pod("a", 4)], ClusterNodes(), NOW, leases=[lease(4, "u1")])
    assert seen.node.foreign_gpus == 0


def test_a_pod_needs_what_its_containers_need_at_the_worst_moment():
    def container(gpus, **fields):
        return {"resources": {"requests": {"nvidia.com/gpu": str(gpus)}}, **fields}

    def requested_gpus(spec):
        return requested_resources({"spec": spec})["nvidia.com/gpu"]

    assert requested_gpus({"containers": [container(2), container(1), {}]}) == 3
    assert requested_gpus({"containers": [container(2)], "initContainers": [container(4), container(1)]}) == 4
    beside = [container(1, restartPolicy="Always"), container(2)]
    assert requested_gpus({"containers": [container(1)], "initContainers": beside}) == 3


def test_a_pod_needs_each_resource_of_a_device_plugin_under_its_own_name():
    limits = {"amd.com/gpu": "4", "rdma/hca": "1k", "nvidia.com/mig-1g.10gb": "2", "cpu": "8", "hugepages-2Mi": "1Gi"}
    spec = {"containers": [{"resources": {"limits": {**limits, "batch.kubernetes.io/cpu": "7"}}}]}
    assert requested_resources({"spec": spec}) == {"amd.com/gpu": 4, "rdma/hca": 1000, "nvidia.com/mig-1g.10gb": 2}


AMD = Flavor(name="mi300x", gpu_type="MI300X", resource="amd.com/gpu", node_labels={"pool": "amd"})
SLICES = Flavor(
    name="slices", gpu_type="A100-1g", resource="nvidia.com/mig-1g.10gb", node_labels={"nvidia.com/gpu.product": MODEL}
)
OTHERS = FlavorSet((AMD, SLICES))


def seen_with(found, *pods, leases=(), flavors: FlavorSet = OTHERS) -> ObservedNode:
    return only(observe_nodes([found], pods, ClusterNodes(), NOW, flavors, leases=leases))


def test_a_node_counts_the_resource_of_its_flavor():
    amd = node("n1", 0, resources={"amd.com/gpu": "8"}, labels={"pool": "amd", "nvidia.com/gpu.product": ""})
    pods = [foreign_pod(gpus=3, resource="amd.com/gpu"), foreign_pod("else", gpus=2)]
    seen = seen_with(amd, *pods)
    assert (seen.node.gpu_type, seen.node.gpus, seen.node.foreign_gpus, seen.uncounted) == ("MI300X", 8, 3, ())
    assert OTHERS.gpu_kind_of(seen.node) == "mi300x"
    mig = node("n1", 0, resources={"nvidia.com/mig-1g.10gb": "14", "nvidia.com/mig-3g.40gb": "1"})
    mig["metadata"]["labels"]["nvidia.com/gpu.memory"] = "81920"
    seen = seen_with(mig)
    assert (seen.node.gpu_type, seen.node.gpus, seen.node.memory_mb) == ("A100-1g", 14, None)
    assert seen.uncounted == ("nvidia.com/mig-3g.40gb",)
    whole = seen_with(node("n1", 8)).node
    assert (whole.gpu_type, whole.gpus) == (MODEL, 8)


def test_gpus_of_a_lease_are_its_own_under_their_resource_only():
    amd = node("n1", 0, resources={"amd.com/gpu": "8"}, labels={"pool": "amd"})
    held = lease(4, "u1", gpu_type="MI300X", resource="amd.com/gpu")
    held = replace(held, nodes=("n1",))
    pods = [labelled_pod("a", 4, resource="amd.com/gpu")]
    assert seen_with(amd, *pods, leases=[held]).node.foreign_gpus == 0
    over = [labelled_pod("a", 6, resource="amd.com/gpu"), labelled_pod("b", 1)]
    assert seen_with(amd, *over, leases=[held]).node.foreign_gpus == 2


def test_gpus_that_no_flavor_counts_are_named_and_granted_to_no_step():
    amd = node("n1", 0, resources={"amd.com/gpu": "8"}, labels={"nvidia.com/gpu.product": ""})
    for flavors in (OTHERS, FlavorSet(())):
        seen = seen_with(amd, foreign_pod(gpus=3, resource="amd.com/gpu"), flavors=flavors)
        assert (seen.node.gpus, seen.node.foreign_gpus, seen.uncounted) == (0, 0, ("amd.com/gpu",))
    of_model = SLICES.model_copy(update={"gpu_type": MODEL})
    whole = seen_with(node("n1", 8), flavors=FlavorSet((of_model,)))
    assert (whole.node.gpus, whole.uncounted) == (0, ("nvidia.com/gpu",)), "whole GPUs are no slices"


def test_a_withdrawn_gpu_of_another_resource_is_a_hint():
    amd = node("n1", 0, resources={"amd.com/gpu": "8"}, labels={"pool": "amd"})
    amd["status"]["allocatable"]["amd.com/gpu"] = "7"
    seen = seen_with(amd)
    assert seen.node.gpus == 7
    assert "1 of 8 GPUs are not offered by the device plugin" in seen.verdict.message


def test_trainings_that_could_not_start_make_a_node_suspect_until_that_is_forgotten():
    pods = [failed_pod(step="fit"), failed_pod(step="tune", reason="StartError")]
    assert looked_at(node(), pods[0]).verdict.state is NodeHealth.HEALTHY, "one may have many causes"
    seen = looked_at(node(), *pods)
    assert (seen.verdict.state, seen.node.cordoned) == (NodeHealth.SUSPECT, True)
    assert "attempts of digits/tune: attempt 1 ended as StartError" in seen.verdict.message
    assert seen.verdict.valid_until == NOW + timedelta(hours=6)
    assert not looked_at(node(), *pods, now=NOW + timedelta(hours=6)).node.cordoned


@pytest.mark.parametrize("reason", ["Evicted", "OOMKilled", "Error", ""])
def test_a_training_that_failed_for_another_reason_says_nothing_of_its_node(reason):
    assert looked_at(node(), failed_pod(reason), failed_pod(reason, "tune")).verdict.evidence == ()
