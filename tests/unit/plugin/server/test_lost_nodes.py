"""The trainings of a node that is lost: their attempts end, their pods go, and the next attempts start.

| what happens                                         | what follows                                              |
|------------------------------------------------------|-----------------------------------------------------------|
| lease and program are silent                         | end by infrastructure, pod gone, GPUs back, next attempt  |
| Argo's finalizer keeps the pod                       | it is Failed, which is the end that Argo waits for        |
| the program goes on with reports, or with output     | nothing, until that ends, too                             |
| the node comes back                                  | nothing                                                   |
| the service dies after the end is recorded           | the next one deletes the pod                              |
| the service is paused between look and act           | nothing is done on what it saw before                     |
| no checkpoints, no training, labels of another's     | Kubernetes decides                                        |
| a member of a gang is on the node                    | end, Job deleted, the others get five seconds             |
| an elastic gang can spare it                         | only its pod goes                                         |
| Argo's agent pod of a run is on the node             | it is deleted                                             |
| a store of another namespace does not answer         | this one is served                                        |
| the Leases may not be read                           | it is said once                                           |
"""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from support.builders.argo_pods import pod
from support.processes.polling import until
from support.stories.plugin import fit, gpus, outputs, phase, prep, records, said
from support.stories.plugin_installation import Site, Submitted, site
from tiphys_plugin.nodes.node_loss import LOST_SECONDS
from tiphys_plugin.nodes.node_watch import ClusterInventory
from tiphys_plugin.server.lost_nodes import LostNodeSweep

from tiphys.checkpoint.save.commit import check_fence
from tiphys.errors import FencedError, StoreError
from tiphys.kube import Object
from tiphys.kube.resources import JOBS, LEASES, NODE_LEASE_NAMESPACE, PODS, Resource
from tiphys.protocol.gang import GANG_LABEL, WORKFLOW_UID_LABEL, GangSpec
from tiphys.protocol.step_spec import ATTEMPT_LABEL, RUN_LABEL, STEP_LABEL
from tiphys.store import DirectoryStore, LineageLayout, RunLayout
from tiphys.store.program_output import chunk_key

NODES = ("n1", "n2", "n3")
ROUND = 5.0
LABELS = {RUN_LABEL: "digits-abc12", STEP_LABEL: "fit", ATTEMPT_LABEL: "1"}


class Cluster:
    """Kubelets that renew, and the sweep of one service."""

    def __init__(self, here: Site) -> None:
        self.here = here
        self.now = 0.0
        self.renewals = dict.fromkeys(NODES, 0)
        here.server.add_namespace(NODE_LEASE_NAMESPACE)
        for node in NODES:
            here.api.create(LEASES, NODE_LEASE_NAMESPACE, {"metadata": {"name": node}, "spec": {"renewTime": "0"}})
        self.inventory = ClusterInventory(here.api)
        self.start_service()

    def start_service(self) -> None:
        tenants = self.here.tenants
        self.sweep = LostNodeSweep(
            self.here.api,
            tenants.cluster,
            tenants,
            self.inventory,
            monotonic=lambda: self.now,  # type: ignore[arg-type]
        )

    def renew(self, *nodes: str) -> None:
        for node in nodes:
            self.renewals[node] += 1
            body = {"spec": {"renewTime": str(self.renewals[node])}}
            self.here.api.patch(LEASES, NODE_LEASE_NAMESPACE, node, body)

    def pass_time(self, seconds: float, *silent: str) -> None:
        for _ in range(round(seconds / ROUND)):
            self.now += ROUND
            self.renew(*(node for node in NODES if node not in silent))
            self.sweep.run_once()


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path) as running:
        yield running


@pytest.fixture
def cluster(here: Site) -> Cluster:
    return Cluster(here)


@pytest.fixture
def flow(here: Site, cluster: Cluster) -> Submitted:
    """A training of one pod on n3, in its first attempt."""
    started = here.submit("ml", fit(gpu=gpus(8)))
    assert outputs(started.call("admit", "fit", 0))["run"] == "true"
    started.run_pod("fit", host="n3")
    cluster.pass_time(30)
    return started


def live_pods(here: Site, namespace: str = "ml") -> list[str]:
    found = here.server.objects("pods", namespace)
    return [one["metadata"]["name"] for one in found if one["status"]["phase"] in ("Pending", "Running")]


def ends(here: Site) -> list[Object]:
    return [one for one in records(here.store("ml"), "control/runs/digits-abc12/attempts/") if "outcome" in one]


def report(here: Site, number: int) -> None:
    key = LineageLayout("digits-abc12/fit").training_progress_report(1, 1_700_000_000_000 + number)
    here.store("ml").create(key, b"{}")


def test_a_lost_node_ends_the_attempt_and_the_next_one_starts(here, cluster, flow):
    cluster.pass_time(45, "n3")
    assert (ends(here), live_pods(here)) == ([], ["digits-abc12-fit-1"]), "it is not lost yet"

    cluster.pass_time(5, "n3")

    [end] = ends(here)
    assert (end["outcome"], end["cause"], end["evidence"]["node"]) == ("failed", "infrastructure", "n3")
    assert "no Lease of n3 was renewed for 50 s, and its program stored nothing for" in end["message"]
    assert here.server.objects("pods", "ml") == []
    with pytest.raises(FencedError):
        check_fence(here.store("ml"), "digits-abc12", "fit", 1)
    verdict = flow.call("conclude", "fit", 0, status="Error", exit_code="-1")
    assert (phase(verdict), here.tenants.ledger.snapshot().leases) == ("Error", ()), "another try follows"
    assert "Attempt 2" in said(flow.call("admit", "fit", 1))


def test_a_pod_that_a_finalizer_keeps_is_failed_and_its_gpus_are_free(here, cluster):
    flow = here.submit("ml", fit(gpu=gpus(8)))
    flow.call("admit", "fit", 0)
    flow.run_pod("fit", host="n3")
    body = {"metadata": {"finalizers": ["workflows.argoproj.io/status"]}}
    here.api.patch(PODS, "ml", "digits-abc12-fit-1", body)
    cluster.pass_time(30)
    cluster.pass_time(60, "n3")

    [kept] = here.server.objects("pods", "ml")
    assert "deletionTimestamp" in kept["metadata"]
    assert (kept["status"]["phase"], kept["status"]["reason"]) == ("Failed", "NodeLost")
    assert phase(flow.call("conclude", "fit", 0, status="Failed")) == "Error"
    assert here.tenants.ledger.snapshot().leases == ()


@pytest.mark.parametrize("sign", ["report", "output"])
def test_a_program_that_goes_on_keeps_its_attempt_until_it_is_silent_too(here, cluster, flow, sign):
    with capture_logs() as logs:
        for number in range(20):
            if sign == "report":
                report(here, number)
            else:
                here.store("ml").create(chunk_key(RunLayout("digits-abc12"), "fit", 1, 0, number), b"epoch")
            cluster.pass_time(10, "n3")
    assert (ends(here), live_pods(here)) == ([], ["digits-abc12-fit-1"])
    assert [one["event"] for one in logs].count("training.cut_off") == 1

    cluster.pass_time(30, "n3")

    assert [end["cause"] for end in ends(here)] == ["infrastructure"]
    assert live_pods(here) == []


def test_a_node_that_comes_back_in_time_loses_nothing(here, cluster, flow):
    cluster.pass_time(45, "n3")
    cluster.pass_time(60)
    assert (ends(here), live_pods(here)) == ([], ["digits-abc12-fit-1"])


def test_a_lost_node_gets_no_new_pods_until_it_renews(here, cluster, flow):
    given = []
    cluster.inventory.set_external_evidence = lambda _, evidence: given.append(set(evidence))  # type: ignore[method-assign]
    cluster.pass_time(50, "n3")
    cluster.pass_time(5)
    assert [*filter(None, given), given[-1]] == [{"n3"}, set()]


def test_a_service_that_died_after_the_end_is_followed_by_one_that_deletes_the_pod(here, cluster, flow):
    here.server.fail_next(500, verb="patch", plural="pods", times=1)
    cluster.pass_time(50, "n3")
    assert (len(ends(here)), live_pods(here)) == (1, ["digits-abc12-fit-1"])
    waiting = flow.call("conclude", "fit", 0, status="Failed")
    assert phase(waiting) == "Pending", "GPUs of a pod that seems to live are not free"

    cluster.start_service()
    report(here, 1)  # nothing of an ended attempt counts, so it protects nothing
    cluster.pass_time(60, "n3")

    assert (len(ends(here)), live_pods(here)) == (1, [])


def test_a_service_that_was_paused_does_nothing_on_what_it_saw_before(here, cluster, flow, monkeypatch):
    cluster.pass_time(45, "n3")
    listed = here.tenants.cluster.pods_on_node

    def pause(node: str) -> list[object]:
        cluster.now += 600
        return listed(node)

    monkeypatch.setattr(here.tenants.cluster, "pods_on_node", pause)
    cluster.pass_time(5, "n3")
    monkeypatch.undo()
    assert (ends(here), live_pods(here)) == ([], ["digits-abc12-fit-1"])
    cluster.pass_time(60)  # the node came back during the pause
    assert (ends(here), live_pods(here)) == ([], ["digits-abc12-fit-1"])


def test_a_training_without_checkpoints_and_a_step_wait_for_kubernetes(here, cluster):
    plain = here.submit("ml", fit(checkpoints=None), name="plain")
    plain.call("admit", "fit", 0)
    plain.run_pod("fit", gpus=0, host="n3")
    step = here.submit("ml", prep(), name="step")
    step.call("admit", "prep")
    step.run_pod("prep", gpus=0, host="n3")
    cluster.pass_time(30)
    cluster.pass_time(300, "n3")
    assert live_pods(here) == ["plain-fit-1", "step-prep-1"]


def test_a_pod_that_names_the_attempt_of_another_workflow_ends_nothing(here, cluster, flow):
    body = pod(name="forged", node="digits-abc12.fit(0).run", workflow="other", uid="uid-other", labels=LABELS)
    body["spec"]["nodeName"] = "n2"
    here.api.create(PODS, "ml", body)
    elsewhere = pod(name="foreign", namespace="vision", node="digits-abc12.fit(0).run", uid=flow.uid, labels=LABELS)
    elsewhere["spec"]["nodeName"] = "n2"
    here.api.create(PODS, "vision", elsewhere)
    cluster.pass_time(60, "n2")
    assert ends(here) == []
    assert live_pods(here) == ["digits-abc12-fit-1", "forged"]
    assert live_pods(here, "vision") == ["foreign"]


def start_gang(here: Site, cluster: Cluster, **elastic: int) -> Submitted:
    """A training on n1, n2 and n3, and the pod of Argo that watches it on n1."""
    flow = here.submit("ml", fit(artifacts=(), gang=GangSpec(members=3, **elastic), gpu=gpus(3, members=3, **elastic)))
    name = outputs(flow.call("admit", "fit", 0))["gang"]
    labels = {GANG_LABEL: name, WORKFLOW_UID_LABEL: flow.uid, **LABELS}
    policy = {"backoffLimitPerIndex": 0, "completions": 3} if elastic else {}
    here.api.create(JOBS, "ml", {"metadata": {"name": name, "labels": labels}, "spec": policy})
    for rank, host in enumerate(NODES):
        index = {"batch.kubernetes.io/job-completion-index": str(rank)}
        body = pod(name=f"{name}-{rank}", node="digits-abc12.fit(0).run", labels={**labels, **index}, uid=flow.uid)
        body["spec"]["nodeName"] = host
        here.api.create(PODS, "ml", body)
    watcher = pod(name="watcher", node="digits-abc12.fit(0).run", labels=LABELS, uid=flow.uid)
    watcher["spec"]["nodeName"] = "n1"
    here.api.create(PODS, "ml", watcher)
    cluster.pass_time(30)
    return flow


def test_a_gang_ends_with_its_member_and_the_pod_that_watches_it_is_left_to_its_end(here, cluster, monkeypatch):
    flow = start_gang(here, cluster)
    graces, delete = {}, here.api.delete

    def note_grace(resource: Resource, namespace: str, name: str, **options: object) -> bool:
        graces[name[-1:]] = options.get("grace_seconds")
        return delete(resource, namespace, name, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(here.api, "delete", note_grace)
    cluster.pass_time(50, "n2")
    members = [(name, grace) for name, grace in graces.items() if name in "012"]
    assert members == [("0", 5), ("2", 5), ("1", 0)], (
        "that of the lost node last: by it the next round finds the others"
    )
    [end] = ends(here)
    assert end["cause"] == "infrastructure"
    assert end["message"].startswith("rank 1 of 3: ")
    assert here.server.objects("jobs", "ml") == []
    assert live_pods(here) == ["watcher"]
    here.api.delete(PODS, "ml", "watcher")
    assert phase(flow.call("conclude", "fit", 0, status="Failed")) == "Error"
    assert here.tenants.ledger.snapshot().leases == ()


@pytest.mark.parametrize(
    ("lost", "left"),
    [("n3", ["0", "1", "watcher"]), ("n2", ["0", "2", "watcher"]), ("n1", ["1", "2", "watcher"])],
)
def test_an_elastic_gang_goes_on_without_a_member(here, cluster, lost, left):
    start_gang(here, cluster, min_members=2)
    cluster.pass_time(60, lost)
    assert not ends(here)
    assert [name.rpartition("-")[2] for name in live_pods(here)] == left


def test_the_agent_pod_of_a_lost_node_is_deleted_so_that_argo_makes_another(here, cluster, flow):
    agents = (("elsewhere", "n2", "digits-abc12"), ("foreign", "n3", "other"), ("lost", "n3", "digits-abc12"))
    for name, host, workflow in agents:
        body = pod(name=name, node="", workflow=workflow, labels={"workflows.argoproj.io/component": "agent"})
        del body["metadata"]["labels"][ATTEMPT_LABEL]
        body["spec"]["nodeName"] = host
        here.api.create(PODS, "ml", body)
    cluster.pass_time(50, "n3")
    assert live_pods(here) == ["elsewhere", "foreign"], "the Workflow of another is not ours to answer twice"


def test_a_store_that_does_not_answer_delays_no_other_namespace(here, cluster, flow, monkeypatch):
    other = here.submit("vision", fit(), name="other")
    other.call("admit", "fit", 0)
    other.run_pod("fit", gpus=0, host="n3")
    released, listing = threading.Event(), DirectoryStore.list

    def hang(store: DirectoryStore, *given: object, **named: object) -> object:
        if store.url.endswith("vision"):
            released.wait(60)
            raise StoreError("it did not answer")
        return listing(store, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(DirectoryStore, "list", hang)
    cluster.sweep.every_seconds = 0.5
    cluster.pass_time(60, "n3")
    until(lambda: (len(ends(here)), live_pods(here)) == (1, []), 30)  # its thread may be slower than the rounds
    released.set()
    assert live_pods(here, "vision") == ["other-fit-1"]


def test_a_service_without_the_right_to_read_leases_says_so_once_and_starts_anew_with_it(here, cluster, flow):
    here.server.authorize = lambda request: request.plural != "leases"
    with capture_logs() as logs:
        for _ in range(3):
            cluster.sweep.run_once()
    said_of_it = [one for one in logs if one["event"] == "nodes.loss_not_detected"]
    assert [one["remedy"] for one in said_of_it] == ["set nodes.detectLoss: true in the values of the chart"]
    here.server.authorize = lambda _: True
    cluster.pass_time(LOST_SECONDS, "n3")
    assert len(ends(here)) == 1
