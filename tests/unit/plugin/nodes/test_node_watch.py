"""The nodes of a cluster as the inventory that decisions go by.

| what happens | what follows |
|---|---|
| nobody asks for the nodes | nobody looks at them |
| they are not listed yet, or may not be | nothing new is granted, and the reason says so |
| nothing changes that counts | the very same queues |
| a node comes, changes, goes; a pod of others does | other queues |
| a pod carries the label of an attempt without its lease | its GPUs are those of others |
| the watch is lost | what was seen last goes on to count |
| GPUs that exist on no node of today | wait, and hold nobody up |
| a node is broken, or says that it will go | what runs there is asked to save and go |
| most nodes are said to be broken | rather the monitor is |
"""

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry
from support.builders.cluster_nodes import MODEL, SPOT, condition, failed_pod, foreign_pod, labelled_pod, node
from support.builders.ledger import NOW, ask, lease, waiting
from support.fakes.memory_store import MemoryStore
from support.processes.polling import until
from support.servers.kube_server import KubeServer
from support.stories.plugin import Clock
from tiphys_plugin.cluster.interface import PodStatus
from tiphys_plugin.nodes.cluster_state import observe_nodes
from tiphys_plugin.nodes.evacuate import NodeEvacuation, nodes_to_evacuate
from tiphys_plugin.nodes.metrics import NodesCollector
from tiphys_plugin.nodes.node_watch import ClusterInventory
from tiphys_plugin.quota.flavors import ClusterNodes
from tiphys_plugin.quota.lease import AdmissionReason, Admitted, Deferred, LedgerState, Rejected
from tiphys_plugin.quota.ledger.kubernetes_ledger import KubernetesLedger
from tiphys_plugin.quota.ledger.sqlite_ledger import SqliteLedger
from tiphys_plugin.quota.placement.model import GpuNode
from tiphys_plugin.quota.queues import MisconfiguredQueues, Queues, parse_queues
from tiphys_plugin.quota.scheduler.decide import decide_admission
from tiphys_plugin.runtime.context import SingleStore

from tiphys.errors import StoreError, UsageError
from tiphys.kube import KubeApi
from tiphys.kube.resources import GPU_LEDGERS, NODES, PODS
from tiphys.records import EvictionRecord
from tiphys.store import RunLayout, read_record

DECLARED = {"queues": [{"name": "research", "gpus": {"*": 64}}], "cluster_nodes": {}}
RULES = parse_queues(DECLARED, "the test")


@pytest.fixture
def api(server: KubeServer) -> KubeApi:
    return server.api("tiphys")


@pytest.fixture
def inventory(api: KubeApi, clock: Clock) -> Iterator[ClusterInventory]:
    with ClusterInventory(api, clock) as made:
        yield made


def add(api: KubeApi, found) -> None:
    body = {**found, "metadata": {key: value for key, value in found["metadata"].items() if key != "uid"}}
    if "containers" in body["spec"]:
        api.create(PODS, "tiphys", body)
    else:
        api.create(NODES, None, body)


def nodes(inventory: ClusterInventory, declared: Queues = RULES) -> tuple[GpuNode, ...]:
    """Those of today; none while they have not been listed."""
    rules = inventory.resolve_rules(declared)
    return rules.nodes or () if isinstance(rules, Queues) else ()


def names(inventory: ClusterInventory) -> list[str]:
    return [one.name for one in nodes(inventory)]


def test_queues_that_declare_what_there_is_cost_nothing(server, inventory):
    for document in (
        {"nodes": [{"name": "n", "gpu_type": MODEL, "gpus": 8}]},
        {"inventory": {MODEL: {"count": 8}}},
        {},
    ):
        declared = parse_queues({"queues": DECLARED["queues"], **document}, "the test")
        assert inventory.resolve_rules(declared) is declared
    assert inventory.resolve_rules(None) is None
    assert server.requests == []


def test_the_inventory_follows_the_cluster(api, inventory):
    add(api, node("n1"))
    until(lambda: names(inventory) == ["n1"])
    add(api, node("n2", 4))
    until(lambda: names(inventory) == ["n1", "n2"])
    add(api, foreign_pod(on="n2", gpus=3))
    until(lambda: nodes(inventory)[1].foreign_gpus == 3)
    api.delete(PODS, "tiphys", "notebook")
    until(lambda: nodes(inventory)[1].foreign_gpus == 0)
    api.patch(NODES, None, "n1", {"spec": {"unschedulable": True}})
    until(lambda: nodes(inventory)[0].cordoned)
    api.delete(NODES, None, "n1")
    until(lambda: names(inventory) == ["n2"])


def test_the_inventory_stays_the_same_object_until_a_relevant_change(api, inventory):
    add(api, node("n1"))
    until(lambda: names(inventory))
    first = inventory.resolve_rules(RULES)
    heartbeat = [{**condition("Ready"), "lastHeartbeatTime": "2026-01-01T00:05:00Z"}]
    api.patch(NODES, None, "n1", {"status": {"conditions": heartbeat, "images": [{"names": ["a"]}]}})
    add(api, foreign_pod("web", gpus=0))
    assert inventory.resolve_rules(parse_queues(DECLARED, "the test, read again")) is first
    add(api, node("n2"))
    until(lambda: len(names(inventory)) == 2)
    assert inventory.resolve_rules(RULES) is inventory.resolve_rules(RULES) is not first


def test_the_last_known_nodes_count_while_the_watch_is_lost(api, server, inventory):
    add(api, node("n1"))
    until(lambda: names(inventory) == ["n1"])
    server.pause()
    assert names(inventory) == ["n1"]
    server.resume()
    add(api, node("n2"))
    server.compact()
    until(lambda: names(inventory) == ["n1", "n2"])


def test_without_the_right_to_see_nodes_nothing_is_granted_and_the_reason_says_what_to_do(api, server, clock):
    server.authorize = lambda request: request.plural not in ("nodes", "pods")
    api.create(GPU_LEDGERS, "tiphys", {"metadata": {"name": "default"}, "spec": DECLARED})
    with ClusterInventory(api, clock) as inventory:
        ledger = KubernetesLedger(api, "tiphys", clock=clock, rules=inventory.resolve_rules)
        until(lambda: "nodes.observe: true" in ledger.request(ask(1, gpu_type=None)).message)
        answer = ledger.request(ask(1, gpu_type=None))
        assert isinstance(answer, Deferred)
        assert answer.reason is AdmissionReason.MISCONFIGURED
        server.authorize = lambda _: True
        add(api, node("n1"))
        until(lambda: isinstance(ledger.request(ask(1, gpu_type=None)), Admitted))
    [held] = ledger.snapshot().leases
    assert held.nodes == ("n1",)


@pytest.mark.parametrize("namespace", ["tiphys", "stranger"])
def test_a_pod_that_forges_the_label_of_an_attempt_hides_no_gpus(api, clock, inventory, namespace):
    api.create(GPU_LEDGERS, "tiphys", {"metadata": {"name": "default"}, "spec": DECLARED})
    add(api, node("n1"))
    ledger = KubernetesLedger(api, "tiphys", clock=clock, rules=inventory.resolve_rules)
    until(lambda: isinstance(ledger.request(ask(4, "u1", namespace="tiphys", gpu_type=None)), Admitted))
    api.create(PODS, "tiphys", labelled_pod("digits-1", 4, "tiphys"))
    api.create(PODS, namespace, labelled_pod("forged", 4, namespace))

    def answer():
        return ledger.request(ask(4, "u2", namespace="tiphys", gpu_type=None))

    def is_deferred():
        """Asked before the watch has shown the forged pod, it is admitted, and would stay so."""
        given = answer()
        if isinstance(given, Admitted):
            ledger.release(given.lease)
        return isinstance(given, Deferred)

    until(is_deferred)
    assert answer().reason is AdmissionReason.WAITING_FOR_INVENTORY
    assert [one.node.foreign_gpus for one in inventory.observed_nodes] == [4]
    ledger.hold_grants()
    ledger.snapshot()
    believed = [one.node.foreign_gpus for one in inventory.observed_nodes]
    assert believed == [0], "while leases are being recovered from pods, their labels are believed"
    ledger.end_recovery()
    api.delete(PODS, namespace, "forged")
    until(lambda: isinstance(answer(), Admitted))


def test_while_nodes_cannot_be_listed_nothing_is_granted(server, inventory):
    server.pause()
    rules = inventory.resolve_rules(RULES)
    assert isinstance(rules, MisconfiguredQueues)
    assert "which cannot be read" in rules.message


def test_failures_are_remembered_when_their_pods_are_gone_and_forgotten_in_time(api, clock, inventory):
    add(api, node("n1"))
    for step in ("fit", "tune"):
        add(api, failed_pod(step=step, at=clock().isoformat()))
    until(lambda: names(inventory) and nodes(inventory)[0].cordoned)
    for step in ("fit", "tune"):
        api.delete(PODS, "tiphys", f"digits-{step}-n1")
    add(api, node("n2"))
    until(lambda: len(names(inventory)) == 2)
    assert [one.cordoned for one in nodes(inventory)] == [True, False]
    clock.advance(6 * 3600 + 1)
    assert not any(one.cordoned for one in nodes(inventory))


def test_metrics_count_verdicts_and_gpus_only_where_nodes_are_used(api, inventory):
    registry = CollectorRegistry()
    registry.register(NodesCollector(lambda: inventory.observed_nodes))
    value = registry.get_sample_value
    assert value("tiphys_nodes", {"verdict": "healthy"}) is None
    for found in (
        node("n1"),
        node("n2", 4, unschedulable=True),
        node("n3", 8, condition("GpuMemWatch")),
        foreign_pod(),
    ):
        add(api, found)
    until(lambda: len(names(inventory)) == 3 and nodes(inventory)[0].foreign_gpus)
    assert [value("tiphys_nodes", {"verdict": one}) for one in ("healthy", "suspect", "unhealthy")] == [2, 0, 1]
    assert [value("tiphys_node_gpus", {"what": one}) for one in ("others", "cordoned", "usable")] == [2, 12, 6]


def decided(rules: Queues, request, *leases, waiting=()):
    return decide_admission(LedgerState(leases, waiting, queues=rules), request, 100, NOW)


def today(*gpus: int, foreign: int = 0) -> Queues:
    return RULES.with_nodes(
        [
            GpuNode(name=f"n{number}", gpu_type="A100", gpus=count, foreign_gpus=foreign)
            for number, count in enumerate(gpus, 1)
        ],
        are_current=True,
    )


def test_gpus_of_others_are_not_free():
    assert decided(today(8, 8, foreign=2), ask(6)).nodes == ("n1",)
    answer = decided(today(8, 8, foreign=2), ask(8))
    assert isinstance(answer, Deferred), "a pod of somebody else will end one day"
    assert "at most 6 on one node" in answer.message
    answer = decided(today(8, 8, foreign=2), ask(14, members=2))
    assert isinstance(answer, Deferred)
    assert answer.reason is AdmissionReason.WAITING_FOR_INVENTORY
    assert "4 of 16 A100 of the cluster are in use" in answer.message


def test_a_request_that_no_present_node_fits_waits_without_blocking_others():
    for request, reason in (
        (ask(16, "large"), AdmissionReason.GANG_FRAGMENTED),
        (ask(1, "other", gpu_type="H100"), AdmissionReason.NO_MATCHING_GPU_TYPE),
        (ask(32, "most", members=4), AdmissionReason.WAITING_FOR_INVENTORY),
    ):
        answer = decided(today(8, 8), request)
        assert isinstance(answer, Deferred)
        assert answer.reason is reason
        assert answer.message.startswith("for now, ")
        assert "never" not in answer.message
        ahead = waiting(request.gpus, 1, members=request.members, gpu_type=request.gpu_type)
        assert isinstance(decided(today(8, 8), ask(8), waiting=(ahead,)), Admitted)
    assert isinstance(decided(today(8, 8, 16), ask(16)), Admitted), "until such a node comes"


def test_a_request_above_the_quota_is_rejected_whatever_nodes_come():
    assert isinstance(decided(today(8), ask(65)), Rejected)
    assert isinstance(decided(RULES.with_nodes([GpuNode(name="n", gpu_type="A100", gpus=8)]), ask(16)), Rejected), (
        "declared ones stay"
    )


@pytest.mark.parametrize("beside", [{"inventory": {"A100": {"count": 1}}}, {"nodes": []}])
def test_nodes_are_declared_or_looked_at(beside):
    with pytest.raises(UsageError, match="cluster_nodes takes the place of nodes and inventory"):
        parse_queues({**DECLARED, **beside}, "queue file q.yaml")


def test_a_ledger_in_a_file_needs_declared_nodes(tmp_path):
    with pytest.raises(UsageError, match="declare `nodes`"):
        SqliteLedger(tmp_path / "ledger.db", RULES)


class Asked:
    """A cluster in which every attempt has one living pod."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def pods(self, namespace, run, uid, attempt):
        return [PodStatus(name=run, namespace=namespace, workflow_uid=uid, node=f"wf-{uid}.fit(0).run")]

    def delete_pod(self, pod):
        self.ended.append(pod.name)


class Unserved:
    def serves(self, _):
        return False


class Held:
    def __init__(self, *leases) -> None:
        self.leases = leases

    def snapshot(self):
        return self


def test_a_training_on_a_node_that_will_go_is_evacuated(api, inventory):
    add(api, node("n1", taints=(SPOT,)))
    add(api, node("n2", 8, condition("GpuMemWatch")))
    add(api, node("n3", 8, condition("GpuThermalWatch")))
    add(api, node("n4"))
    until(lambda: names(inventory) == ["n1", "n2", "n3", "n4"])
    held = [placed(uid, on) for uid, on in (("a", "n1"), ("b", "n2"), ("c", "n3"), ("d", "n4"))]
    cluster = Asked()
    store = MemoryStore()
    NodeEvacuation(Held(*held), cluster, SingleStore(store), inventory).run_once()
    assert cluster.ended == ["run-a", "run-b"]
    until(lambda: len(store.objects) == 2)
    for run, evidence in (("run-a", "n1: taint "), ("run-b", "n2: condition GpuMemWatch")):
        record = read_record(store, RunLayout(run).eviction("fit", 1), EvictionRecord)
        assert record.reason.startswith(f"Tiphys moved it away from its node ({evidence}")
    NodeEvacuation(Held(*held), cluster, Unserved(), inventory).run_once()
    assert cluster.ended == ["run-a", "run-b"], "the namespaces of others are theirs"


def test_a_store_that_does_not_answer_delays_no_eviction_and_gets_the_reason_later(api, inventory):
    for name in ("n1", "n2"):
        add(api, node(name, taints=(SPOT,)))
    until(lambda: names(inventory) == ["n1", "n2"])
    cluster, store, answers, asked = Asked(), MemoryStore(), threading.Event(), []

    def hang(operation: str, key: str) -> bool:
        asked.append(key)
        return not answers.wait(60)

    store.refuses = hang
    held = Held(placed("a", "n1"))
    evacuation = NodeEvacuation(held, cluster, SingleStore(store), inventory)
    evacuation.run_once()
    held.leases += (placed("b", "n2"),)
    evacuation.run_once()
    assert cluster.ended == ["run-a", "run-a", "run-b"]
    assert store.objects == {}
    until(lambda: asked)
    assert asked == [RunLayout("run-a").eviction("fit", 1)], "one thread waits for the store"

    answers.set()
    until(lambda: len(store.objects) == 1)

    def stored() -> bool:
        evacuation.run_once()
        return len(store.objects) == 2

    until(stored)


def test_an_eviction_that_the_cluster_refused_stores_no_reason(api, inventory):
    add(api, node("n1", taints=(SPOT,)))
    add(api, node("n2", taints=(SPOT,)))
    until(lambda: names(inventory) == ["n1", "n2"])

    class Refusing(Asked):
        def delete_pod(self, pod):
            if pod.name == "run-a":
                raise StoreError("the API server did not answer")
            super().delete_pod(pod)

    store = MemoryStore()
    NodeEvacuation(Held(placed("a", "n1"), placed("b", "n2")), Refusing(), SingleStore(store), inventory).run_once()
    until(lambda: store.objects)
    assert list(store.objects) == [RunLayout("run-b").eviction("fit", 1)]


def test_a_monitor_that_takes_most_nodes_for_broken_is_not_believed_but_a_notice_is():
    def left(*found):
        return nodes_to_evacuate(observe_nodes(found, (), ClusterNodes(), NOW))

    broken = [node(name, 8, condition("SysLogsXIDError")) for name in ("b1", "b2")]
    assert left(*broken, node("n1"), node("n2")).keys() == {"b1", "b2"}
    assert left(*broken, node("n1")) == {}
    assert left(*broken, node("s1", taints=(SPOT,))).keys() == {"s1"}


def placed(uid: str, node_name: str):
    return replace(lease(1, uid), nodes=(node_name,))


def test_nodes_of_the_cluster_belong_to_the_flavor_whose_labels_they_have(api, inventory):
    flavors = [{"name": pool, "gpu_type": MODEL, "node_labels": {"pool": pool}} for pool in ("own", "spot")]
    declared = parse_queues(
        {"queues": [{"name": "research", "gpus": {"own": 64}}], "flavors": flavors, "cluster_nodes": {}}, "the test"
    )
    add(api, node("n1", labels={"pool": "own", "changes": "often"}))
    add(api, node("n2", labels={"pool": "other"}))
    until(lambda: len(nodes(inventory, declared)) == 2)
    rules = inventory.resolve_rules(declared)
    assert [one.labels for one in rules.nodes] == [{"pool": "own"}, {"pool": "other"}], "no others count"
    assert {kind: one.count for kind, one in rules.gpu_inventory.items()} == {"own": 8}
    assert decided(rules, ask(8, gpu_type=MODEL)).nodes == ("n1",)
    later = decided(rules, ask(8, gpu_type=MODEL, spot="allowed", queue="research", members=2))
    assert later.nodes == ("n1", "n1")
