"""An installation whose GPUs Kueue grants: what Argo sees of a training from its request to the next attempt."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fakes.kueue import FLAVOR, LABELS, FakeKueue, is_true
from support.stories.plugin import fit, gpus, outputs
from support.stories.plugin_installation import Site, Submitted, site
from tiphys_plugin.eviction.loop import PreemptionLoop
from tiphys_plugin.operations.lease_reclaim import find_unleased_pods
from tiphys_plugin.server.kueue_upkeep import KueueUpkeep
from tiphys_plugin.server.tenants import TenantChecks
from tiphys_plugin.server.wiring import LedgerKind

from tiphys.kube.resources import KUEUE_WORKLOADS, PODS, WORKFLOWS
from tiphys.protocol.execute_api import ExecuteReply


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path, ("ml",), LedgerKind.KUEUE) as running:
        yield running


@pytest.fixture
def kueue(here: Site) -> FakeKueue:
    return FakeKueue(here.server.api("ml"), research=8)


def admitted(flow: Submitted, kueue: FakeKueue) -> ExecuteReply:
    assert flow.call("admit", "fit", 0).phase == "Pending"
    kueue.schedule()
    return flow.call("admit", "fit", 0)


def preempt(here: Site) -> None:
    PreemptionLoop(here.tenants.ledger, here.tenants.cluster, here.tenants.stores).run_once()


def upkeep(here: Site) -> KueueUpkeep:
    return KueueUpkeep(here.tenants.ledger, here.tenants)  # type: ignore[arg-type]


def test_the_node_says_why_kueue_does_not_admit_the_step(here, kueue):
    first = here.submit("ml", fit(gpu=gpus(8)), name="first")
    second = here.submit("ml", fit(gpu=gpus(4)), name="second")
    admitted(first, kueue)
    second.call("admit", "fit", 0)
    kueue.schedule()
    assert second.call("admit", "fit", 0).message == (
        "Deferred: WaitingForQuota: position 1 in LocalQueue research, counted by priority and age; "
        "Kueue: 0 GPUs are unused"
    )


def test_pods_go_to_the_nodes_of_the_assigned_flavor(here, kueue):
    flow = here.submit("ml", fit(gpu=gpus(8)))
    reply = admitted(flow, kueue)
    assert f"8 {FLAVOR} of queue research" in reply.message
    patch = json.loads(outputs(reply)["pod-patch"])
    assert patch["nodeSelector"] == LABELS
    here.start()
    again = flow.call("admit", "fit", 0)
    assert outputs(again)["pod-patch"] == outputs(reply)["pod-patch"], "another service says the same"


def test_evicted_training_saves_and_goes_before_kueue_has_its_gpus_back(here, kueue):
    flow = here.submit("ml", fit(gpu=gpus(8)))
    admitted(flow, kueue)
    flow.run_pod("fit")
    preempt(here)
    assert here.server.objects("pods", "ml"), "nothing evicts it yet"
    kueue.evict()
    preempt(here)
    assert here.server.objects("pods", "ml") == []
    assert kueue.used("research") == 8, "its end is not recorded yet"
    verdict = flow.call("conclude", "fit", 0, status="Failed", exit_code="143")
    assert verdict.phase == "Error", "it is tried again"
    assert "to save and go (Kueue: Preempted: Preempted to accommodate a workload)" in verdict.message
    assert kueue.used("research") == 0
    assert flow.call("admit", "fit", 1).phase == "Pending"
    kueue.schedule()
    assert "Attempt 2" in flow.call("admit", "fit", 1).message


def test_missing_kueue_is_reported_in_the_node_and_to_doctor(here):
    here.server.unknown = {"workloads", "localqueues", "resourceflavors"}
    flow = here.submit("ml", fit(gpu=gpus(8)))
    reply = flow.call("admit", "fit", 0)
    assert reply.phase == "Pending"
    assert "install Kueue 0.15 or newer" in reply.message
    with TenantChecks(here.tenants) as checks:
        checks.run_once()
        assert "install Kueue 0.15 or newer" in checks.status_document()["ledger"]["error"]


def test_step_of_an_unknown_local_queue_fails_with_the_queues_of_its_namespace(here, kueue):
    flow = here.submit("ml", fit(gpu=gpus(8, queue="reserch")))
    reply = flow.call("admit", "fit", 0)
    assert "Rejected: QueueUnknown: namespace ml has no LocalQueue 'reserch'; it has: research" in reply.message
    assert flow.call("conclude", "fit", 0).phase == "Failed"
    assert kueue.workloads == []


def test_workload_that_was_deleted_under_running_pods_is_recorded_again(here, kueue):
    flow = here.submit("ml", fit(gpu=gpus(8)))
    admitted(flow, kueue)
    flow.run_pod("fit")
    [workload] = kueue.workloads
    here.api.delete(KUEUE_WORKLOADS, "ml", workload["metadata"]["name"])
    assert kueue.used("research") == 0
    upkeep(here).run_once()
    assert kueue.used("research") == 8
    assert not find_unleased_pods(here.tenants.cluster, here.tenants.ledger)


def test_kueue_is_informed_once_all_pods_run(here, kueue):
    flow = here.submit("ml", fit(gpu=gpus(8)))
    admitted(flow, kueue)
    upkeep(here).run_once()
    assert not is_true(kueue.workloads[0], "PodsReady")
    flow.run_pod("fit")
    upkeep(here).run_once()
    assert is_true(kueue.workloads[0], "PodsReady")
    written = here.server.count("update", "workloads")
    upkeep(here).run_once()
    assert here.server.count("update", "workloads") == written


def test_lease_of_a_workflow_that_is_gone_is_released_when_its_pods_are(here, kueue):
    flow = here.submit("ml", fit(gpu=gpus(8)), name="first")
    admitted(flow, kueue)
    flow.run_pod("fit")
    here.api.delete(WORKFLOWS, "ml", "first")
    waiting = here.submit("ml", fit(gpu=gpus(8)), name="second")
    waiting.call("admit", "fit", 0)
    assert kueue.used("research") == 8, "a pod of it lives"
    for one in here.server.objects("pods", "ml"):
        here.api.delete(PODS, "ml", one["metadata"]["name"])
    here.start()
    waiting.call("admit", "fit", 0)
    assert kueue.used("research") == 0
    assert [is_true(one, "Finished") for one in kueue.workloads].count(True) == 1
