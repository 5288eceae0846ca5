"""``tiphys nodes``: what a person sees of the nodes."""

import json
from dataclasses import replace

import pytest
from support.builders.cluster_nodes import MODEL, SPOT, condition, foreign_pod, member, node
from support.builders.ledger import lease, ledger_status, waiting
from support.servers.kube_server import serving
from support.stories.kubeconfig_folder import Desk
from tiphys_plugin.quota.lease import LedgerState

from tiphys.kube.resources import GPU_LEDGERS, NODES, PODS
from tiphys.records import utc_now
from tiphys.store import DirectoryStore, LineageLayout
from tiphys.store.layout import STEP_TIME_WINDOW_SECONDS, RankStepTime

BY_NODES = "queues: [{name: research, gpus: {'*': 64}}]\ncluster_nodes: {}\n"


@pytest.fixture
def desk(tmp_path, capsys):
    with serving() as server:
        made = Desk(server, tmp_path, capsys)
        rack = {"topology.kubernetes.io/rack": "r1"}
        for found in (
            node("n1", 8, labels=rack),
            node("n2", 8, unschedulable=True),
            node("n3", 8, condition("GpuMemWatch", message="a double bit error")),
            node("n4", 8, taints=(SPOT,)),
        ):
            made.api.create(NODES, None, found)
        made.api.create(PODS, "ml", foreign_pod(on="n1", gpus=3))
        yield made


def hold(desk: Desk) -> None:
    """Two members of a gang, two GPUs each, on the first node; and one that waits for more than there is."""
    held = replace(lease(4, members=2, gpu_type=MODEL), nodes=("n1", "n1"))
    book = LedgerState((held,), (waiting(6, 1, uid="u7", gpu_type=MODEL),))
    desk.api.patch(GPU_LEDGERS, "ml", "default", {"status": ledger_status(book)}, subresource="status")


def test_every_node_is_shown_with_what_is_used_and_why_it_is_not(desk):
    desk.queues("apply", text=BY_NODES)
    hold(desk)
    code, out, err = desk.tiphys("nodes")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["NODE", "TYPE", "GPUS", "HELD", "OTHERS", "FREE", "BLOCK", "RACK", "NVLINK", "VERDICT"]
    assert rows[1] == ["n1", MODEL, "8", "4", "3", "1", "-", "r1", "-", "healthy"]
    assert rows[2] == ["n2", MODEL, "8", "0", "0", "0", "-", "-", "-", "cordoned"]
    assert rows[3][9:] == ["unhealthy", "condition", "GpuMemWatch:", "a", "double", "bit", "error"]
    assert rows[4][9:] == ["leaving", "taint", SPOT]


def test_a_program_gets_the_evidence(desk):
    desk.queues("apply", text=BY_NODES)
    code, out, _ = desk.tiphys("nodes", "-o", "json")
    found = {one["name"]: one for one in json.loads(out)["nodes"]}
    assert code == 0
    assert [one["getsNothingNew"] for one in found.values()] == [False, True, True, True]
    assert (found["n2"]["cordoned"], found["n2"]["verdict"]) == (True, "healthy")
    said = {"source": "condition GpuMemWatch", "message": "a double bit error", "means": "fault"}
    assert found["n3"]["evidence"] == [said]
    assert [one["broken"] for one in found.values()] == [False, False, True, False]
    assert [one["leaving"] for one in found.values()] == [False, False, False, True]


def test_gpus_that_no_flavor_counts_are_said_once_for_all_nodes(desk):
    for name in ("m1", "m2"):
        amd = node(name, 0, resources={"amd.com/gpu": "8"}, labels={"nvidia.com/gpu.product": ""})
        desk.api.create(NODES, None, amd)
    desk.queues("apply", text=BY_NODES)
    code, out, err = desk.tiphys("nodes")
    assert code == 0
    assert err.count("amd.com/gpu, and no flavor counts it there") == 1
    assert "2 nodes offer" in err
    row = next(line for line in out.splitlines() if line.startswith("m1"))
    assert row.split()[:6] == ["m1", "unknown", "0", "0", "0", "0"]
    flavor = "{name: mi300x, gpu_type: MI300X, resource: amd.com/gpu}"
    text = f"queues: [{{name: research, gpus: {{mi300x: 64, '*': 8}}}}]\nflavors: [{flavor}]\ncluster_nodes: {{}}\n"
    desk.queues("apply", text=text)
    code, out, err = desk.tiphys("nodes")
    assert "no flavor counts" not in err
    row = next(line for line in out.splitlines() if line.startswith("m1"))
    assert row.split()[:6] == ["m1", "mi300x", "8", "0", "0", "8"]


def test_nodes_are_shown_by_flavor(desk):
    flavors = f"flavors: [{{name: far, gpu_type: {MODEL}, node_labels: {{topology.kubernetes.io/rack: r1}}}}]"
    desk.queues("apply", text=f"queues: [{{name: research, gpus: {{far: 64}}}}]\n{flavors}\ncluster_nodes: {{}}\n")
    code, out, _ = desk.tiphys("nodes")
    assert code == 0
    rows = out.splitlines()
    assert rows[1].split()[:3] == ["n1", "far", "8"]
    assert f"{MODEL}, no flavor" in rows[2]
    code, out, _ = desk.tiphys("nodes", "-o", "json")
    assert [one["flavor"] for one in json.loads(out)["nodes"]] == ["far", "", "", ""]


def test_queues_that_ignore_nodes_are_named_beside_the_nodes(desk):
    desk.queues("apply")
    code, out, err = desk.tiphys("nodes")
    assert code == 0
    assert "n1" in out
    assert "the queues ignore the nodes of the cluster" in err


def test_why_goes_by_the_nodes_that_there_are(desk):
    desk.queues("apply", text=BY_NODES)
    hold(desk)
    _, out, _ = desk.tiphys("why", "run-u7")
    assert "1 NVIDIA-A100 is free" in out
    assert "24 more are free on cordoned nodes" in out
    desk.server.authorize = lambda request: request.plural not in ("nodes", "pods")
    _, out, err = desk.tiphys("why", "run-u7")
    assert "this account may not read them" in err
    assert "the GPUs are free" in out, "as far as quotas tell"


def told_slow(folder, member: int = 1) -> str:
    """A store in which one of four members of the gang that `hold_gang` makes works longer than the others."""
    store = DirectoryStore(folder)
    newest = int(utc_now().timestamp()) // STEP_TIME_WINDOW_SECONDS
    for window in range(newest - 4, newest + 1):  # the minute may turn in between
        for one in range(4):
            pace = RankStepTime(window, one, one, 1.5 if one == member else 1.0)
            store.create(LineageLayout("run-gang/fit").step_time(1, pace), b"")
    return str(folder)


def test_nodes_of_slow_ranks_are_shown_where_a_store_is_given(desk, tmp_path):
    desk.queues("apply", text=BY_NODES)
    gang = replace(lease(8, "gang", members=4, gpu_type=MODEL), nodes=("n1", "n1", "n2", "n2"))
    desk.api.patch(GPU_LEDGERS, "ml", "default", {"status": ledger_status(LedgerState((gang,)))}, subresource="status")
    for rank, host in enumerate(("n2", "n1", "n2", "n1")):
        desk.api.create(PODS, "ml", member("run-gang", rank, host))
    url = told_slow(tmp_path / "store")
    code, out, _ = desk.tiphys("nodes", "--store", url)
    assert code == 0
    rows = out.splitlines()
    assert "member 1 of 4 works 1.50 times as long" in rows[1]
    assert "healthy" in rows[1], "a hint alone cordons nothing"
    assert "works" not in rows[2]
    assert "works" not in desk.tiphys("nodes")[1]
    code, out, _ = desk.tiphys("why", "run-gang", "-n", "ml", "--store", url)
    assert code == 0
    assert "SlowRank: member 1 of 4 works 1.50 times as long" in out
