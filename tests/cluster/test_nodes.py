"""The nodes of a real cluster as the inventory: a hundred of them that cost nothing, and what becomes of trainings.

| what the cluster says | what must hold |
|---|---|
| a hundred nodes in two racks | they are the inventory, with type, GPUs and rack |
| a pod of somebody else | its GPUs are not free |
| a node is cordoned, not ready, broken | nothing new goes there |
| a gang that just fits into what is left of a rack | it goes there, and its pods run where its lease says |
| a spot node's notice | what runs there is asked to save and go |
| a node without a Lease that anybody renews | the attempt there ends, and its pod, whatever finalizer it has |
| what a queue file says of nodes | is kept by the API server, or refused |
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from cluster.client import Cluster, Json
from cluster.fixtures import FAKE, FakeNodes
from hera.workflows import DAG
from hera.workflows.models import Toleration
from support.builders.argo_objects import NARRATED
from support.builders.ledger import ask
from support.fakes.memory_store import MemoryStore
from support.fakes.resource_templates import filled_in
from support.stories.plugin import QUICK, Flow, fit, outputs, phase, said, workflow
from tiphys_plugin import PluginCore
from tiphys_plugin.cluster.kubernetes_cluster import KubernetesCluster
from tiphys_plugin.nodes.evacuate import NodeEvacuation
from tiphys_plugin.nodes.node_watch import ClusterInventory
from tiphys_plugin.quota.flavors import ClusterNodes
from tiphys_plugin.quota.ledger.backend import MemoryLedger
from tiphys_plugin.quota.ledger.kubernetes_ledger import KubernetesLedger
from tiphys_plugin.quota.placement.model import GpuNode
from tiphys_plugin.quota.queues import Queues, load_queues, parse_queues
from tiphys_plugin.runtime.context import SingleStore
from tiphys_plugin.server.lost_nodes import LostNodeSweep
from tiphys_plugin.server.tenants import Tenants

from hera_pipelines import Pipeline, Train
from hera_pipelines.cli import main
from tiphys.errors import UsageError
from tiphys.kube import KubeApi
from tiphys.kube.resources import GPU_LEDGERS, JOBS, LEASES, NODE_LEASE_NAMESPACE, NODES, PODS, WORKFLOWS
from tiphys.protocol.gang import GANG_LABEL, WORKFLOW_UID_LABEL
from tiphys.protocol.step_spec import ATTEMPT_LABEL, RUN_LABEL, STEP_LABEL, STORE_ANNOTATION
from tiphys.records import Cause
from tiphys.store import Store, TenantStores, read_step_attempts

MODEL = "NVIDIA-A100-SXM4-80GB"
RACK, MEMORY, POOL = "tiphys.test/rack", "nvidia.com/gpu.memory", "tiphys.test/pool"
GANG = 4
SPOT = "aws-node-termination-handler/spot-itn"


@pytest.fixture
def inventory(api: KubeApi) -> Iterator[ClusterInventory]:
    with ClusterInventory(api) as made:
        yield made


@pytest.fixture
def ledger(api: KubeApi, namespace: str, inventory: ClusterInventory) -> KubernetesLedger:
    """It goes by the nodes of this test alone."""
    spec = {
        "queues": [{"name": "research", "gpus": {MODEL: 1000}}],
        "cluster_nodes": {"selector": {POOL: namespace}, "rack_label": RACK},
    }
    api.create(GPU_LEDGERS, namespace, {"metadata": {"name": "default"}, "spec": spec})
    return KubernetesLedger(api, namespace, rules=inventory.resolve_rules)


def nodes(ledger: KubernetesLedger) -> dict[str, GpuNode]:
    """Those that decisions go by now."""
    rules = ledger.snapshot().queues
    return {one.name: one for one in (rules.nodes or ())} if isinstance(rules, Queues) else {}


def labels(namespace: str, rack: str) -> dict[str, str]:
    return {POOL: namespace, RACK: rack, MEMORY: "81920"}


def foreign_pod(node: str) -> Json:
    container = {"name": "main", "image": "nowhere.test/none:1", "resources": {"limits": {"nvidia.com/gpu": "5"}}}
    spec = {"tolerations": [FAKE], "nodeSelector": {"kubernetes.io/hostname": node}, "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "notebook"}, "spec": spec}


def break_node(api: KubeApi, node: str) -> None:
    """Have a monitor say that its memory is broken."""
    known = (api.get(NODES, None, node) or {})["status"]["conditions"]
    reported = {"type": "GpuMemWatch", "status": "True", "reason": "Ecc", "message": "said by the test"}
    api.patch(NODES, None, node, {"status": {"conditions": [*known, reported]}}, subresource="status")


@pytest.fixture
def node_without_kubelet(api: KubeApi, namespace: str) -> Iterator[str]:
    """It is never ready."""
    name = f"lost-{namespace}"
    hardware = {"nvidia.com/gpu": "8", "cpu": "128", "memory": "1Ti", "pods": "110"}
    known = {"kubernetes.io/hostname": name, "nvidia.com/gpu.product": MODEL, **labels(namespace, "small")}
    status = {"allocatable": hardware, "capacity": hardware}
    api.create(NODES, None, {"metadata": {"name": name, "labels": known}, "status": status})
    yield name
    api.delete(NODES, None, name)


def pipeline(store: str) -> Json:
    with Pipeline("digits", store=store, entrypoint="main") as made:
        fit = Train(
            name="fit",
            image="nowhere.test/none:1",
            command=["python", "train.py"],
            gpus=8,
            gpu_type=MODEL,
            nodes=GANG,
            queue="research",
            tolerations=[Toleration(**FAKE)],
        )
        with DAG(name="main"):
            fit()
    return made.compile()


def test_a_hundred_nodes_are_the_inventory_and_a_gang_runs_where_its_lease_says(
    cluster: Cluster,
    api: KubeApi,
    namespace: str,
    ledger: KubernetesLedger,
    fake_nodes: FakeNodes,
    node_without_kubelet: str,
    run_store: Store,
) -> None:
    small = fake_nodes("small", GANG + 3, gpus=8, model=MODEL, labels=labels(namespace, "small"))
    fake_nodes("large", 99 - len(small), gpus=8, model=MODEL, labels=labels(namespace, "large"))
    cluster.wait("all nodes are seen", lambda: len(nodes(ledger)) == 100)
    expected = {"gpu_type": MODEL, "gpus": 8, "memory_mb": 81920, "rack": "small"}
    assert nodes(ledger)["small-1"] == GpuNode(name="small-1", **expected)

    used, cordoned, broken, *good = small
    cluster.apply(foreign_pod(used), namespace=namespace)
    cluster.kubectl("cordon", cordoned)
    break_node(api, broken)
    cluster.wait("a foreign pod is seen", lambda: nodes(ledger)[used].foreign_gpus == 5)
    out = {cordoned, node_without_kubelet, broken}
    cluster.wait("so is what is wrong", lambda: {one.name for one in nodes(ledger).values() if one.cordoned} == out)

    manifest = pipeline(run_store.url)
    manifest["metadata"] |= {"name": "digits", "namespace": namespace}
    manifest["metadata"]["annotations"] |= NARRATED
    made = api.create(WORKFLOWS, namespace, {**manifest, "status": {"phase": "Running"}})
    site = KubernetesCluster(api, None, "kubernetes:test")
    core = PluginCore(run_store, site, ledger, settings=QUICK)
    # Of a world, the core is enough.
    flow = Flow(SimpleNamespace(core=core), "digits", made["metadata"]["uid"], namespace=namespace)  # type: ignore[arg-type]
    try:
        admitted = flow.admit("fit")
    finally:
        core.close()
    assert phase(admitted) == "Succeeded", said(admitted)
    [held] = ledger.snapshot().leases
    assert sorted(held.nodes) == good, "the last place in the small rack, so that the large one stays whole"
    where = run_pods(cluster, api, manifest, outputs(admitted), made["metadata"]["uid"])
    assert where == good


def run_pods(cluster: Cluster, api: KubeApi, manifest: Json, answers: dict[str, str], uid: str) -> list[str]:
    """Create the Job as Argo's executor would; the nodes on which its pods run, all at one time."""
    [run] = [one for one in manifest["spec"]["templates"] if one["name"] == "fit-run"]
    given = {f"inputs.parameters.tiphys-{name}": value for name, value in answers.items()}
    node = "digits.fit(0).run"
    job = filled_in(run["resource"]["manifest"], {**given, "workflow.uid": uid, "node.name": node})
    name = api.create(JOBS, api.namespace, job)["metadata"]["name"]

    def placed() -> list[str]:
        pods = api.list(PODS, api.namespace, f"{GANG_LABEL}={name}").items
        return sorted(pod["spec"]["nodeName"] for pod in pods if pod["status"].get("phase") == "Running")

    cluster.wait("every pod runs", lambda: len(placed()) == GANG)
    return placed()


def test_a_training_on_a_node_that_will_go_is_evacuated(
    cluster: Cluster,
    api: KubeApi,
    namespace: str,
    ledger: KubernetesLedger,
    inventory: ClusterInventory,
    fake_nodes: FakeNodes,
) -> None:
    [goes, stays] = fake_nodes("spot", 2, gpus=8, model=MODEL, labels=labels(namespace, "spot"))
    cluster.wait("both are seen", lambda: len(nodes(ledger)) == 2)
    for node in (goes, stays):
        instance = f"wf-{node}.fit"
        request = ask(8, f"uid-{node}", instance=instance, namespace=namespace, gpu_type=MODEL, run=node)
        ledger.restore(f"lease-{node}", request, None, (node,))
        cluster.apply(training_pod(node, request.uid, instance), namespace=namespace)
    cluster.wait("both run", lambda: set(running(cluster, namespace)) == {goes, stays})
    evacuation = NodeEvacuation(
        ledger, KubernetesCluster(api, None, "kubernetes:test"), SingleStore(MemoryStore()), inventory
    )
    evacuation.run_once()
    cluster.kubectl("taint", "node", goes, f"{SPOT}=now:NoSchedule")

    def left() -> bool:
        nodes(ledger)
        evacuation.run_once()
        return running(cluster, namespace) == [stays]

    cluster.wait("only one goes on", left)


def training_pod(node: str, uid: str, instance: str) -> Json:
    """The pod of an attempt of a Workflow that is not there."""
    metadata = {
        "name": node,
        "labels": {ATTEMPT_LABEL: "1", RUN_LABEL: node, STEP_LABEL: "fit", WORKFLOW_UID_LABEL: uid},
        "annotations": {"workflows.argoproj.io/node-name": f"{instance}.run"},
    }
    container = {"name": "main", "image": "nowhere.test/none:1", "resources": {"limits": {"nvidia.com/gpu": "8"}}}
    spec = {"tolerations": [FAKE], "nodeSelector": {"kubernetes.io/hostname": node}, "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def test_the_training_of_a_node_that_renews_no_lease_ends_and_its_pod_with_it(
    cluster: Cluster, api: KubeApi, namespace: str, node_without_kubelet: str, tmp_path: Path
) -> None:
    """The node is judged beside those of the cluster, which renew; it takes a minute."""
    lease = {"metadata": {"name": node_without_kubelet}, "spec": {"renewTime": "2026-01-01T00:00:00.000000Z"}}
    api.create(LEASES, NODE_LEASE_NAMESPACE, lease)
    stores = TenantStores(f"file://{tmp_path}/{{namespace}}", (namespace,))
    body = workflow([fit()], "digits")
    annotations = {**body["metadata"]["annotations"], STORE_ANNOTATION: stores.url(namespace)}
    made = api.create(WORKFLOWS, namespace, {**body, "metadata": {"name": "digits", "annotations": annotations}})
    uid, site = made["metadata"]["uid"], KubernetesCluster(api, (namespace,), "kubernetes:test")
    tenants = Tenants(stores, site, MemoryLedger(None), QUICK)
    flow = Flow(SimpleNamespace(core=tenants.core(namespace)), "digits", uid, namespace=namespace)  # type: ignore[arg-type]
    assert phase(flow.admit("fit", 0)) == "Succeeded"
    pod = training_pod("digits", uid, "digits.fit(0)")
    pod["metadata"]["finalizers"] = ["tiphys.dev/test"]  # as that of Argo
    pod["spec"] = {"nodeName": node_without_kubelet, "containers": [{"name": "main", "image": "nowhere.test/none:1"}]}
    cluster.apply(pod, namespace=namespace)
    try:
        with ClusterInventory(api) as inventory, LostNodeSweep(api, site, tenants, inventory):
            cluster.wait("its pod has failed", lambda: (status(api) or {}).get("phase") == "Failed")
        assert (status(api) or {})["reason"] == "NodeLost"
        [_, last] = read_step_attempts(tenants.stores.store(namespace), "digits", "fit")[-1]
        assert last is not None
        assert (last.cause, last.evidence and last.evidence.node) == (Cause.INFRASTRUCTURE, node_without_kubelet)
    finally:
        api.patch(PODS, namespace, "digits", {"metadata": {"finalizers": None}})
        api.delete(LEASES, NODE_LEASE_NAMESPACE, node_without_kubelet)
        tenants.close()
    cluster.wait("nothing else keeps the pod", lambda: status(api) is None)


def status(api: KubeApi) -> Json | None:
    found = api.get(PODS, api.namespace, "digits")
    return None if found is None else found["status"]


def running(cluster: Cluster, namespace: str) -> list[str]:
    pods = cluster.get("pods", namespace=namespace)["items"]
    return sorted(one["metadata"]["name"] for one in pods if one["status"].get("phase") == "Running")


def test_every_node_field_of_a_queue_file_is_kept(cluster: Cluster, api: KubeApi, tmp_path: Path) -> None:
    sign = {"kind": "taint", "name": "example.com/maintenance", "values": ["soon"], "means": "notice"}
    labels = {f"{what}_label": f"example.com/{what}" for what in ("memory", "block", "rack", "nvlink")}
    read = {**labels, "selector": {"pool": "training"}, "signs": [sign], "suspect_hours": 1.5}
    assert read.keys() == ClusterNodes.model_fields.keys()
    file = tmp_path / "queues.yaml"
    file.write_text(yaml.safe_dump({"queues": [{"name": "research", "gpus": {"*": 8}}], "cluster_nodes": read}))
    place = ["-n", api.namespace, "--kubeconfig", str(cluster.kubeconfig)]
    assert main(["queues", "apply", "-f", str(file), *place]) == 0
    kept = (api.get(GPU_LEDGERS, api.namespace, "default") or {})["spec"]
    assert parse_queues(kept, "the ledger") == load_queues(file)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"cluster_nodes": {}, "inventory": {}}, "cluster_nodes takes the place of nodes and inventory"),
        ({"cluster_nodes": {}, "nodes": []}, "cluster_nodes takes the place of nodes and inventory"),
        ({"cluster_nodes": {"signs": [{"kind": "taint", "name": "x", "means": "fatal"}]}}, "supported values"),
        ({"cluster_nodes": {"suspect_hours": 0}}, "should be greater than 0"),
    ],
)
def test_an_invalid_node_setting_is_refused_by_the_server(api: KubeApi, spec: Json, says: str) -> None:
    body = {"metadata": {"name": "default"}, "spec": {"queues": [], **spec}}
    with pytest.raises(UsageError, match=says):
        api.create(GPU_LEDGERS, api.namespace, body)
