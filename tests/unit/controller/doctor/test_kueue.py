"""`tiphys doctor --cluster` where Kueue grants the GPUs.

| seen | state |
|---|---|
| the ledger of Tiphys | nothing about Kueue |
| Kueue may not be read | unknown |
| no Kueue, or one without `v1beta2` | failed |
| a workflow namespace without a LocalQueue | warning |
| no Deployment of Kueue; one without a ready pod | warning; failed |
"""

from collections.abc import Iterator

import pytest
from support.servers.kube_server import KubeServer, serving
from tiphys_controller.doctor import CheckStatus
from tiphys_controller.doctor.checks_kueue import check_kueue, check_local_queues
from tiphys_controller.doctor.observe import observe_cluster
from tiphys_controller.doctor.observed import ClusterObservation

from tiphys.kube.ledger_log import LOG_FORMAT
from tiphys.kube.resources import DEPLOYMENTS, GPU_LEDGERS, KUEUE_LOCAL_QUEUES

KINDS = ("workloads", "workloads/status", "localqueues", "resourceflavors")


@pytest.fixture
def server() -> Iterator[KubeServer]:
    with serving() as running:
        api = running.api("tiphys")
        running.add_namespace("ml")
        install(running, "--ledger-kind=kueue")
        api.create(KUEUE_LOCAL_QUEUES, "ml", {"metadata": {"name": "research"}})
        install_kueue(running)
        running.paths["/apis/kueue.x-k8s.io/v1beta2"] = {"resources": [{"name": name} for name in KINDS]}
        yield running


def install_kueue(server: KubeServer, ready: int = 1) -> None:
    labels = {"app.kubernetes.io/name": "kueue"}
    body = {"metadata": {"name": "kueue-controller-manager", "labels": labels}, "status": {"readyReplicas": ready}}
    api = server.api("kueue-system")
    server.add_namespace("kueue-system")
    api.delete(DEPLOYMENTS, "kueue-system", "kueue-controller-manager")
    api.create(DEPLOYMENTS, "kueue-system", body)
    api.patch(DEPLOYMENTS, "kueue-system", "kueue-controller-manager", {"status": body["status"]})


def test_controller_that_is_not_ready_or_not_there_is_found(server):
    install_kueue(server, ready=0)
    [found, _] = check_kueue(observed(server))
    assert found.state is CheckStatus.FAILED
    assert "no pod of Kueue's Deployment kueue-system/kueue-controller-manager is ready" in found.sentence
    server.api("kueue-system").delete(DEPLOYMENTS, "kueue-system", "kueue-controller-manager")
    [found, _] = check_kueue(observed(server))
    assert (found.state, "every step with GPUs waits" in found.sentence) == (CheckStatus.WARNING, True)


def install(server: KubeServer, *arguments: str) -> None:
    labels = {"app.kubernetes.io/name": "tiphys", "app.kubernetes.io/component": "plugin"}
    container = {"args": ["tiphys_plugin", "serve", *arguments]}
    spec = {"template": {"spec": {"containers": [container]}}}
    body = {"metadata": {"name": "tiphys-plugin", "labels": labels}, "spec": spec}
    api = server.api("tiphys")
    api.delete(DEPLOYMENTS, "tiphys", "tiphys-plugin")
    api.create(DEPLOYMENTS, "tiphys", body)


def observed(server: KubeServer, *namespaces: str) -> ClusterObservation:
    return observe_cluster(server.api("tiphys"), namespaces or ("ml",))


def test_kueue_and_its_queues_are_named(server):
    [found] = check_kueue(observed(server))
    assert (found.state, found.sentence) == (CheckStatus.OK, "Kueue grants the GPUs; LocalQueues: ml/research")


def test_ledger_of_tiphys_needs_no_kueue(server):
    install(server)
    assert check_kueue(observed(server)) == []


@pytest.mark.parametrize(
    ("arguments", "head", "damage"),
    [
        ((), {"id": "ab", "number": 3, "entries": [{"n": 3}]}, "default.ab.000000000001 is missing"),
        ((), {"id": "ab", "number": 3, "entries": [{"n": 1}]}, "log.entries"),
        ((), {"id": "ab", "number": 1, "entries": [{"n": 1}]}, ""),
        (("--ledger-kind=kueue",), {"id": "ab", "number": 3, "entries": [{"n": 3}]}, ""),
    ],
    ids=["a record is gone", "the head is damaged", "well", "Kueue grants the GPUs"],
)
def test_damage_of_the_log_of_the_ledger_is_observed(server, arguments, head, damage):
    install(server, *arguments)
    status = {"version": LOG_FORMAT, "summary": {}, "log": head}
    api = server.api("tiphys")
    created = api.create(GPU_LEDGERS, "tiphys", {"metadata": {"name": "default"}})
    api.replace(GPU_LEDGERS, "tiphys", {**created, "status": status}, "status")
    found = observed(server).ledger_damage
    assert damage in found
    assert bool(found) is bool(damage)


@pytest.mark.parametrize("kinds", [(), ("workloads", "localqueues")], ids=["not installed", "older"])
def test_missing_kueue_fails_with_the_remedy(server, kinds):
    server.paths["/apis/kueue.x-k8s.io/v1beta2"] = {"resources": [{"name": name} for name in kinds]}
    if not kinds:
        del server.paths["/apis/kueue.x-k8s.io/v1beta2"]
    [found] = check_kueue(observed(server))
    assert found.state is CheckStatus.FAILED
    assert "every step with GPUs waits" in found.sentence
    assert "install Kueue 0.15 or newer" in found.remedy


def test_namespace_without_a_local_queue_is_a_warning(server):
    server.add_namespace("vision")
    [warning] = check_local_queues(observed(server, "ml", "vision"))
    assert warning.state is CheckStatus.WARNING
    assert "namespace vision has no LocalQueue" in warning.sentence


def test_a_kueue_that_may_not_be_read_is_unknown(server):
    server.authorize = lambda request: request.plural != "localqueues"
    [found] = check_kueue(observed(server))
    assert found.state is CheckStatus.UNKNOWN
