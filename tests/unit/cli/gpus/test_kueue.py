"""`tiphys why` and `tiphys queues show` where Kueue grants the GPUs."""

import json

import pytest
from support.builders.cluster_nodes import MODEL, foreign_pod, labelled_pod, node
from support.builders.ledger import ask
from support.fakes.kueue import FLAVOR, FakeKueue
from support.servers.kube_server import serving
from support.stories.kubeconfig_folder import Desk
from tiphys_plugin.quota.kueue.backend import KueueAdmission

from tiphys.kube.resources import NODES, PODS


@pytest.fixture
def desk(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("TIPHYS_STORE", raising=False)
    with serving() as server:
        yield Desk(server, tmp_path, capsys)


@pytest.fixture
def kueue(desk):
    return FakeKueue(desk.server.api("ml"), research=8)


def admit(desk: Desk, kueue: FakeKueue, *requests) -> KueueAdmission:
    backend = KueueAdmission(desk.server.api("ml"), ["ml"])
    for request in requests:
        backend.request(request)
        kueue.schedule()
        backend.request(request)
    return backend


def test_why_gives_the_reason_and_position_of_kueue(desk, kueue):
    admit(desk, kueue, ask(6, "u1"), ask(4, "u2"))
    code, out, _ = desk.tiphys("why", "run-u2/fit")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].endswith("for 4 A100 of queue research")
    assert lines[1] == (
        "  WaitingForQuota: position 1 in LocalQueue research, counted by priority and age; Kueue: 2 GPUs are unused"
    )
    assert lines[2].startswith("  position 1; ")
    assert len(lines) == 3, "Kueue chooses victims, so none are foretold"


def test_why_shows_a_holder_and_that_it_is_evicted(desk, kueue):
    admit(desk, kueue, ask(6, "u1"))
    assert desk.tiphys("why", "run-u1")[1].startswith(f"run-u1/fit holds 6 {FLAVOR} of queue research since 20")
    kueue.evict()
    assert "; preempted at " in desk.tiphys("why", "run-u1")[1]


def test_why_as_json_has_the_reason_and_no_victims(desk, kueue):
    admit(desk, kueue, ask(6, "u1"), ask(4, "u2"))
    _, out, _ = desk.tiphys("why", "run-u2", "-o", "json")
    [waiting] = json.loads(out)["waiting"]
    assert waiting["reasons"][0]["reason"] == "WaitingForQuota"
    assert "preemption" not in waiting


def test_unknown_run_is_looked_for_in_kueue(desk, kueue):
    admit(desk, kueue, ask(6, "u1"))
    code, _, err = desk.tiphys("why", "run-u7")
    assert code != 0
    assert "run-u7 neither holds GPUs nor waits for any in Kueue" in err


def test_queues_show_counts_the_gpus_of_local_queues(desk, kueue):
    admit(desk, kueue, ask(6, "u1"), ask(4, "u2"))
    code, out, err = desk.queues("show")
    assert code == 0
    assert [line.split() for line in out.splitlines()][1:] == [["ml", "research", "6", "4"]]
    assert "kubectl get clusterqueues" in err
    _, out, _ = desk.queues("show", "-o", "json")
    assert json.loads(out)["queues"] == [{"namespace": "ml", "name": "research", "held": 6, "waiting": 4}]


def test_nodes_count_the_pods_of_what_kueue_admitted_as_held_and_all_others_as_others(desk, kueue):
    admit(desk, kueue, ask(6, "u1"))
    desk.api.create(NODES, None, node("n1", 8))
    for pod in (labelled_pod("own", 4, uid="u1"), labelled_pod("claims-to-be", 2, uid="u2"), foreign_pod(gpus=1)):
        desk.api.create(PODS, "ml", pod)
    code, out, err = desk.tiphys("nodes")
    assert (code, err) == (0, "")
    assert out.splitlines()[1].split()[:6] == ["n1", MODEL, "8", "4", "3", "1"]


def test_an_account_of_one_namespace_sees_the_requests_of_that_namespace(desk, kueue):
    admit(desk, kueue, ask(6, "u1"))
    desk.server.authorize = lambda request: bool(request.namespace)
    assert desk.tiphys("why", "run-u1")[0] == 0


def test_cluster_with_neither_says_how_to_create_a_ledger(desk):
    code, _, err = desk.queues("show")
    assert code != 0
    assert "there is no GPULedger ml/default" in err
