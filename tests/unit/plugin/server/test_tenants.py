"""What one namespace may see and do, and what it feels of the others: nothing.

| a caller of ml                                        | gets                                |
|-------------------------------------------------------|-------------------------------------|
| asks for its own workflow                             | an answer, from ml's store          |
| names another namespace                               | TrespassError, before anything is read |
| names a workflow that lives in another namespace      | a refusal                           |
| has a workflow that was compiled for another store    | a refusal with both URLs            |
| while the store of vision is broken                   | an answer as ever                   |
"""

import re
import threading
from datetime import timedelta
from functools import partial

import pytest
import structlog
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families
from support.builders.irregular_samples import Irregular
from support.processes.polling import until
from support.stories.plugin import fit, gpus, outputs, phase, prep, said
from support.stories.plugin_installation import RELEASE, Site, site
from tiphys_plugin.operations.pending_sweep import StoppedLeaseSweep
from tiphys_plugin.quota.admission_backend import LedgerLostError
from tiphys_plugin.quota.ledger import kubernetes_ledger
from tiphys_plugin.runtime.metrics import TenantsCollector
from tiphys_plugin.server import wiring
from tiphys_plugin.server.ledger_recovery import LedgerRecovery
from tiphys_plugin.server.tenants import MAX_CALLS_PER_TENANT, ForbiddenNamespaceError, TenantChecks
from tiphys_plugin.server.wiring import DeploymentSettings, build_tenants

from tiphys.errors import NotFoundError, StoreError, StoreFormatError, UsageError
from tiphys.kube.ledger_log import LOG_FORMAT
from tiphys.kube.resources import GPU_LEDGERS, PODS, WORKFLOWS
from tiphys.kube.whole_ledger import WholeLedgerReader
from tiphys.protocol.execute_api import NOT_MINE
from tiphys.records import AttemptEnd, AttemptEndOutcome, StoreFormatRecord, SubmissionBinding
from tiphys.store import RunLayout, TenantStores, claim_record
from tiphys.store.layout import FORMAT_MARKER


@pytest.fixture
def here(tmp_path):
    with site(tmp_path) as running:
        yield running


def keys(here: Site, namespace: str) -> list[str]:
    """All keys, without the times of those that lead to runs."""
    return [re.sub(r"(newest/|open/.+\.).*", r"\1", info.key) for info in here.store(namespace).list("")]


def leases(here: Site) -> list[tuple[str, int]]:
    return sorted((one.request.namespace, one.request.gpus) for one in here.tenants.ledger.snapshot().leases)


def test_a_namespace_keeps_its_runs_in_its_own_store(here):
    for namespace in ("ml", "vision"):
        flow = here.submit(namespace, prep(parameters=(), artifacts=()))
        assert outputs(flow.call("admit", "prep"))["run"] == "true"
        assert phase(flow.call("conclude", "prep", status="Succeeded")) == "Succeeded"
    assert keys(here, "ml") == keys(here, "vision") != []
    bound = [here.store(one).read(RunLayout("digits-abc12").submission_binding(1)) for one in ("ml", "vision")]
    assert bound[0] != bound[1]


def test_caller_that_names_another_namespace_is_turned_away_unread(here):
    flow = here.submit("vision", prep())
    before = here.server.count()
    with pytest.raises(
        ForbiddenNamespaceError, match="caller of namespace ml spoke for a workflow of namespace vision"
    ):
        here.tenants.execute("ml", flow.document("admit", "prep"))
    assert here.server.count() == before
    assert keys(here, "ml") == keys(here, "vision") == []


@pytest.mark.parametrize("index", ["9" * 22, "9" * 400, "9" * 4400, "-1", "٣"])
def test_index_that_no_item_has_reaches_no_ledger(here, index):
    flow = here.submit("ml", fit(gpu=gpus(8)))
    document = flow.document("admit", "fit", 0)
    document["template"]["plugin"]["tiphys"]["node"] = f"{flow.name}.fit({index}:x)(0).admit"
    assert phase(here.tenants.execute("ml", document)) == "Succeeded"
    [lease] = WholeLedgerReader(here.api, RELEASE, "default").read()["status"]["leases"]
    assert "itemIndex" not in lease["request"]


@pytest.mark.parametrize("workflow", [None, {}, {"metadata": {}}, {"metadata": {"namespace": 7}}])
def test_caller_that_names_no_namespace_is_turned_away(here, workflow):
    document = here.submit("ml", prep()).document("admit", "prep")
    with pytest.raises(ForbiddenNamespaceError):
        here.tenants.execute("ml", {**document, "workflow": workflow})


def test_template_of_another_plugin_is_not_ours_for_any_caller(here):
    assert here.tenants.execute("ml", {"template": {"plugin": {"slack": {}}}}) is NOT_MINE


def test_workflow_of_another_namespace_cannot_be_spoken_for(here):
    """Not even with a forged record in the caller's own store."""
    theirs = here.submit("vision", fit(gpu=gpus(8)))
    theirs.call("admit", "fit", 0)
    waiting = here.submit("vision", fit(gpu=gpus(8)), name="waits")
    assert phase(waiting.call("admit", "fit", 0)) == "Pending"
    here.submit("ml", fit(gpu=gpus(8)))
    forged = SubmissionBinding(
        run="waits",
        submission=1,
        cluster=here.tenants.cluster.name,
        namespace="ml",
        workflow_name="waits",
        uid=waiting.uid,
    )
    claim_record(here.store("ml"), RunLayout("waits").submission_binding(1), forged)
    document = waiting.document("admit", "fit", 0)
    document["workflow"]["metadata"]["namespace"] = "ml"
    document["template"]["plugin"]["tiphys"] = {
        "op": "finalize",
        "run": "waits",
        "submission": "",
        "uid": waiting.uid,
        "node": "waits.onExit",
        "status": "Failed",
        "failures": "null",
    }
    assert "is not in cluster" in said(here.tenants.execute("ml", document))
    assert len(here.tenants.ledger.snapshot().pending) == 1


def test_workflow_for_another_store_is_refused_with_both_urls(here):
    flow = here.submit("ml", prep(), store="s3://elsewhere/runs")
    message = said(flow.call("admit", "prep"))
    assert "s3://elsewhere/runs" in message
    assert f"file://{here.root}/stores/ml" in message
    assert keys(here, "ml") == []


def test_final_slash_of_a_store_makes_no_difference(here):
    flow = here.submit("ml", prep(), store=f"file://{here.root}/stores/ml/")
    assert phase(flow.call("admit", "prep")) == "Succeeded"


def test_workflow_for_another_store_is_refused_however_often_the_service_starts(here):
    flow = here.submit("ml", prep())
    flow.call("admit", "prep")
    here.start()
    found = here.api.get(WORKFLOWS, "ml", flow.name)
    found["metadata"]["annotations"]["tiphys.dev/store"] = "s3://elsewhere"
    here.api.replace(WORKFLOWS, "ml", found)
    assert "s3://elsewhere" in said(flow.call("conclude", "prep", status="Succeeded"))


def test_broken_store_is_waited_for_without_effect_on_other_tenants(here):
    here.break_store("vision")
    broken, well = here.submit("vision", prep()), here.submit("ml", prep())
    reply = broken.call("admit", "prep")
    assert (phase(reply), said(reply).startswith("Waiting: ")) == ("Pending", True)
    assert phase(well.call("admit", "prep")) == "Succeeded"
    here.mend_store("vision")
    assert phase(broken.call("admit", "prep")) == "Succeeded"


def test_runs_of_another_version_wait_and_the_service_does_not_start_on_their_store(here, tmp_path):
    here.store("vision").create(FORMAT_MARKER, StoreFormatRecord(format=1).to_bytes())
    other, well = here.submit("vision", prep()), here.submit("ml", prep())

    reply = other.call("admit", "prep")

    assert phase(reply) == "Pending"
    assert "has format 1, and this version of Tiphys reads format 3; nothing was changed: finish its runs" in said(
        reply
    )
    assert phase(well.call("admit", "prep")) == "Succeeded"
    stores = TenantStores(here.tenants.stores.url("{namespace}"), ("ml", "vision"))
    with pytest.raises(StoreFormatError, match="vision has format 1"):
        stores.check_formats()


def test_service_starts_although_a_store_does_not_answer(tmp_path):
    (tmp_path / "ml").write_text("no folder")

    TenantStores(f"{tmp_path}/{{namespace}}", ("ml", "vision")).check_formats()

    assert [path.name for path in tmp_path.iterdir()] == ["ml"]


def test_holder_whose_store_is_broken_keeps_its_gpus_and_stops_no_other(here):
    holder = here.submit("vision", fit(gpu=gpus(8)))
    holder.call("admit", "fit", 0)
    here.start()
    here.tenants.ledger.release_workflow(holder.uid)  # has its lease looked at now
    folder = here.root / "stores" / "vision"
    folder.rename(here.root / "away")
    here.break_store("vision")
    late = here.submit("ml", fit(gpu=gpus(8)))
    assert said(late.call("admit", "fit", 0)).startswith("Deferred")
    assert leases(here) == [("vision", 8)]


def test_lease_is_judged_by_the_store_of_its_own_namespace(here):
    """Runs of two namespaces may have the same name."""
    holder = here.submit("vision", fit(gpu=gpus(8)))
    holder.call("admit", "fit", 0)
    end = AttemptEnd(run=holder.name, step="fit", attempt=1, submission=1, outcome=AttemptEndOutcome.FAILED)
    claim_record(here.store("ml"), RunLayout(holder.name).attempt_end("fit", 1), end)
    here.tenants.ledger.release_workflow(holder.uid)
    late = here.submit("ml", fit(gpu=gpus(8)), name="other")
    assert phase(late.call("admit", "fit", 0)) == "Pending"
    claim_record(here.store("vision"), RunLayout(holder.name).attempt_end("fit", 1), end)
    here.tenants.ledger.release_workflow(holder.uid)
    assert phase(late.call("admit", "fit", 0)) == "Succeeded"
    assert leases(here) == [("ml", 8)]


def test_lease_of_a_namespace_that_is_served_no_more_is_kept(here):
    here.submit("vision", fit(gpu=gpus(8))).call("admit", "fit", 0)
    here.namespaces = ("ml",)
    here.start()
    for lease in here.tenants.ledger.snapshot().leases:
        here.tenants.ledger.release_workflow(lease.request.uid)
    assert phase(here.submit("ml", fit(gpu=gpus(8))).call("admit", "fit", 0)) == "Pending"


def test_lost_ledger_is_refilled_from_the_live_pods_of_every_namespace(here):
    for namespace in ("ml", "vision"):
        flow = here.submit(namespace, fit(gpu=gpus(3)))
        flow.call("admit", "fit", 0)
        flow.run_pod("fit", gpus=3)
    here.lose_ledger()
    here.start()
    assert leases(here) == [("ml", 3), ("vision", 3)]


def test_ledger_that_was_deleted_is_recovered_by_the_running_service(here):
    flows = [here.submit(namespace, fit(gpu=gpus(4))) for namespace in ("ml", "vision")]
    for flow in flows:
        flow.call("admit", "fit", 0)
        flow.run_pod("fit", gpus=4)
    late = here.submit("ml", fit(gpu=gpus(4)), name="late")
    recovery = LedgerRecovery(here.tenants.ledger, here.tenants)
    here.api.delete(GPU_LEDGERS, RELEASE, "default")

    with pytest.raises(LedgerLostError, match="was deleted"):
        recovery.run_once()
    waits = late.call("admit", "fit", 0)
    assert phase(waits) == "Pending"
    assert "was deleted while leases were kept in it" in said(waits)
    assert "tiphys queues apply -f FILE -n tiphys" in said(waits)

    here.make_ledger()
    recovery.run_once()

    assert leases(here) == [("ml", 4), ("vision", 4)]
    assert "WaitingForQuota" in said(late.call("admit", "fit", 0))


def test_recovery_that_cannot_list_the_pods_grants_nothing_and_tries_again(here):
    flow = here.submit("ml", fit(gpu=gpus(8)))
    flow.call("admit", "fit", 0)
    flow.run_pod("fit")
    recovery = LedgerRecovery(here.tenants.ledger, here.tenants)
    here.lose_ledger()
    here.server.fail_next(503, plural="pods")

    with pytest.raises(StoreError):
        recovery.run_once()
    late = here.submit("vision", fit(gpu=gpus(8)), name="late")
    assert "LedgerRecovering" in said(late.call("admit", "fit", 0))

    recovery.run_once()
    assert leases(here) == [("ml", 8)]


@pytest.fixture
def broken_vision(here):
    """The ledger is lost and the store of vision broken, while ml and vision have pods on 3 GPUs each."""
    for namespace in ("ml", "vision"):
        flow = here.submit(namespace, fit(gpu=gpus(3)))
        flow.call("admit", "fit", 0)
        flow.run_pod("fit", gpus=3)
    here.lose_ledger()
    (here.root / "stores" / "vision").rename(here.root / "away")
    here.break_store("vision")
    return here


def mend(here: Site) -> None:
    here.mend_store("vision")
    (here.root / "away").rename(here.root / "stores" / "vision")


@pytest.mark.parametrize("when", ["while the service runs", "before the service starts"])
def test_gpus_are_not_granted_while_the_store_of_live_pods_cannot_be_read(broken_vision, when):
    here = broken_vision
    if when == "before the service starts":
        with structlog.testing.capture_logs() as logs:
            here.start()
        [error] = [log for log in logs if log["log_level"] == "error"]
        assert error["event"] == "recovery.failed"
        assert "namespace vision" in error["error"]
    recovery = LedgerRecovery(here.tenants.ledger, here.tenants)
    late = here.submit("ml", fit(gpu=gpus(4)), name="late")
    checks = TenantChecks(here.tenants)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"namespace vision: .*stores/vision"):
            recovery.run_once()
        assert leases(here) == [("ml", 3)]
        waits = said(late.call("admit", "fit", 0))
        assert "LedgerRecovering" in waits
        assert "vision" not in waits
        checks.run_once()
        assert "leases of live pods are not recorded" in checks.status_document()["ledger"]["error"]

    mend(here)
    recovery.run_once()
    checks.run_once()

    assert leases(here) == [("ml", 3), ("vision", 3)]
    assert "WaitingForQuota" in said(late.call("admit", "fit", 0))
    assert checks.status_document()["status"] == "ok"


@pytest.mark.parametrize("held", [True, False])
def test_broken_store_of_one_namespace_stops_the_others_for_a_minute_at_most(broken_vision, monkeypatch, held):
    here = broken_vision
    assert timedelta(0) < kubernetes_ledger.LONGEST_HOLD < kubernetes_ledger.FORGET_AFTER
    if not held:
        monkeypatch.setattr(kubernetes_ledger, "LONGEST_HOLD", timedelta(0))
    recovery = LedgerRecovery(here.tenants.ledger, here.tenants)
    late = here.submit("ml", fit(gpu=gpus(4)), name="late")
    for _ in range(2):
        with pytest.raises(StoreError, match="namespace vision"):
            recovery.run_once()
    assert ("LedgerRecovering" in said(late.call("admit", "fit", 0))) is held
    checks = TenantChecks(here.tenants)
    checks.run_once()
    assert "namespace vision" in checks.status_document()["ledger"]["error"], "it is still missing"

    mend(here)
    recovery.run_once()

    assert ("vision", 3) in leases(here)


def test_damaged_replacement_of_the_ledger_is_recovered_once_it_is_repaired(here):
    flow = here.submit("ml", fit(gpu=gpus(8)))
    flow.call("admit", "fit", 0)
    flow.run_pod("fit")
    recovery = LedgerRecovery(here.tenants.ledger, here.tenants)
    here.api.delete(GPU_LEDGERS, RELEASE, "default")
    here.make_ledger()
    damage = {"status": {"version": LOG_FORMAT, "log": 7}}
    here.api.patch(GPU_LEDGERS, RELEASE, "default", damage, subresource="status")
    for _ in range(2):
        with pytest.raises(StoreError):
            recovery.run_once()
    here.api.delete(GPU_LEDGERS, RELEASE, "default")
    here.make_ledger()

    recovery.run_once()

    assert leases(here) == [("ml", 8)]


def test_pods_of_a_namespace_that_is_not_served_hold_nothing_up(here, monkeypatch):
    here.submit("vision", fit(gpu=gpus(8))).run_pod("fit")
    core = here.tenants.core

    def refuse(namespace: str):
        if namespace == "vision":
            raise NotFoundError("namespace vision is not served")
        return core(namespace)

    monkeypatch.setattr(here.tenants, "core", refuse)
    recovery = LedgerRecovery(here.tenants.ledger, here.tenants)
    here.api.delete(GPU_LEDGERS, RELEASE, "default")
    with pytest.raises(LedgerLostError):
        recovery.run_once()
    here.make_ledger()
    with structlog.testing.capture_logs() as logs:
        recovery.run_once()
    assert [log["event"] for log in logs if log["log_level"] == "error"] == ["recovery.failed"]
    assert phase(here.submit("ml", fit(gpu=gpus(8))).call("admit", "fit", 0)) == "Succeeded"


def test_broken_store_of_live_pods_is_waited_for_only_as_long_as_they_live(broken_vision):
    here = broken_vision
    recovery = LedgerRecovery(here.tenants.ledger, here.tenants)
    with pytest.raises(StoreError):
        recovery.run_once()
    here.api.delete(PODS, "vision", "digits-abc12-fit-1")

    recovery.run_once()

    late = here.submit("ml", fit(gpu=gpus(4)), name="late")
    assert phase(late.call("admit", "fit", 0)) == "Succeeded"


def test_broken_store_of_pods_that_are_not_on_gpus_holds_nothing_up(here):
    for step, pods in (("fit", {"gpus": 8, "phase": "Pending"}), ("prep", {"gpus": 0})):
        here.submit("vision", prep(), name=f"digits-{step}").run_pod(step, **pods)
    here.lose_ledger()
    here.break_store("vision")
    here.start()
    assert phase(here.submit("ml", fit(gpu=gpus(8))).call("admit", "fit", 0)) == "Succeeded"


def test_service_that_starts_without_an_api_server_grants_nothing_before_it_knows_the_pods(here):
    flow = here.submit("vision", fit(gpu=gpus(8)))
    flow.call("admit", "fit", 0)
    flow.run_pod("fit")
    here.lose_ledger()
    here.server.fail_next(503, plural="pods")
    here.start()
    late = here.submit("ml", fit(gpu=gpus(8)), name="late")
    assert "LedgerRecovering" in said(late.call("admit", "fit", 0))
    LedgerRecovery(here.tenants.ledger, here.tenants).run_once()
    assert leases(here) == [("vision", 8)]


def test_service_starts_although_nothing_is_in_reach(here):
    here.server.fail_next(503, plural="gpuledgers")
    with structlog.testing.capture_logs() as logs:
        here.start()
    assert [log["event"] for log in logs if log["log_level"] == "error"] == ["recovery.failed"]
    assert phase(here.submit("ml", prep()).call("admit", "prep")) == "Succeeded"


def test_cluster_in_trouble_is_an_error_that_the_sidecar_waits_out(here):
    flow = here.submit("ml", prep())
    here.server.fail_next(503, times=4, plural="workflows")
    for _ in range(4):
        with pytest.raises(StoreError):
            flow.call("admit", "prep")
    assert phase(flow.call("admit", "prep")) == "Succeeded"


def test_a_tenant_cannot_occupy_all_threads(here, monkeypatch):
    go = threading.Event()
    began = threading.Semaphore(0)
    slow = here.tenants.core("vision")

    def hang(document):
        began.release()
        assert go.wait(60)
        return NOT_MINE

    monkeypatch.setattr(slow, "execute_document", hang)
    flow = here.submit("vision", prep())
    callers = [threading.Thread(target=flow.call, args=("admit", "prep")) for _ in range(MAX_CALLS_PER_TENANT)]
    for caller in callers:
        caller.start()
    for _ in callers:
        assert began.acquire(timeout=60)
    assert said(flow.call("admit", "prep")) == "24 calls of namespace vision are being answered"
    assert phase(here.submit("ml", prep()).call("admit", "prep")) == "Succeeded"
    go.set()
    for caller in callers:
        caller.join(60)


def test_requests_of_one_admitted_training_step(here):
    """What the class documents, and the ledger's own reads and writes beside it."""
    flow = here.submit("ml", fit(gpu=gpus(8), artifacts=()))
    here.tenants.core("ml").recover_leases()
    here.server.requests.clear()
    flow.call("admit", "fit", 0)
    assert phase(flow.call("conclude", "fit", 0, status="Succeeded", exit_code="0")) == "Succeeded"
    mine = [f"{one.verb} {one.plural}" for one in here.server.requests if one.plural != "gpuledgers"]
    assert mine == ["get workflows", "list pods"]
    assert here.server.count(plural="gpuledgers") <= 6


def test_metrics_tell_tenants_apart(here):
    for namespace in ("ml", "vision"):
        here.submit(namespace, fit(gpu=gpus(3))).call("admit", "fit", 0)
    text = here.tenants.render().decode()
    seen = {family.name: family for family in text_string_to_metric_families(text)}
    answers = {(one.labels["tenant"], one.labels["op"]): one.value for one in seen["tiphys_plugin_answers"].samples}
    assert answers == {("ml", "admit"): 1.0, ("vision", "admit"): 1.0}
    assert [one.value for one in seen["tiphys_gpus_held"].samples] == [6.0]
    buckets = [one for one in seen["tiphys_plugin_answer_seconds"].samples if one.name.endswith("_count")]
    assert len(buckets) == 2


def test_tenant_of_a_metric_is_the_namespace_of_its_core_whatever_the_core_calls_it():
    first, second = Irregular().namespaces(2)
    registries = {first: CollectorRegistry(), second: CollectorRegistry()}
    for namespace, other, calls in ((first, second, 1), (second, first, 2)):
        counter = Counter("calls", "Calls.", ("tenant", "op"), registry=registries[namespace])
        counter.labels(tenant=other, op="admit").inc(calls)
    [family] = TenantsCollector(lambda: registries).collect()
    calls_of = {one.labels["tenant"]: one.value for one in family.samples if one.name == "calls_total"}
    assert calls_of == {first: 1, second: 2}


def test_checks_name_the_store_that_is_broken_and_why(here):
    here.break_store("vision")
    checks = TenantChecks(here.tenants)
    assert checks.status_document()["status"] == "unknown"
    checks.run_once()
    state = checks.status_document()
    assert state["status"] == "degraded"
    assert state["ledger"] == {"error": ""}
    assert [one["namespace"] for one in state["tenants"]] == ["ml", "vision"]
    assert state["tenants"][0]["error"] == ""
    assert str(here.root / "stores" / "vision") in state["tenants"][1]["error"]
    assert 'tiphys_store_up{tenant="vision"} 0.0' in here.tenants.render().decode()
    here.mend_store("vision")
    checks.run_once()
    assert checks.status_document()["status"] == "ok"


def test_checks_name_queues_that_grant_nothing(here):
    checks = TenantChecks(here.tenants)
    here.server.authorize = lambda request: request.plural != "nodes"
    here.api.patch(GPU_LEDGERS, RELEASE, "default", {"spec": {"cluster_nodes": {}}})
    checks.run_once()
    state = checks.status_document()
    assert state["status"] == "degraded"
    assert "`nodes.observe: true` in the values of the chart" in state["ledger"]["error"]
    here.api.patch(GPU_LEDGERS, RELEASE, "default", {"spec": {"cluster_nodes": None}})
    checks.run_once()
    assert checks.status_document()["status"] == "ok"


def test_checks_name_a_ledger_out_of_reach(here):
    checks = TenantChecks(here.tenants)
    here.server.fail_next(503, times=2, plural="gpuledgers", message="etcd is away")
    checks.run_once()
    assert "etcd is away" in checks.status_document()["ledger"]["error"]
    assert checks.status_document()["status"] == "degraded"


@pytest.mark.parametrize("strategy", ["Stop", "Terminate"])
def test_service_releases_the_gpus_of_a_stopped_workflow_with_its_last_pod(here, monkeypatch, strategy):
    monkeypatch.setattr(wiring, "StoppedLeaseSweep", partial(StoppedLeaseSweep, every_seconds=0.05))
    here.start()
    stopped = here.submit("ml", fit(gpu=gpus(4)))
    goes_on = here.submit("vision", fit(gpu=gpus(4)), name="möhre.v2")
    for flow in (stopped, goes_on):
        assert outputs(flow.call("admit", "fit", 0))["run"] == "true"
        flow.run_pod("fit", gpus=4)
    here.api.patch(WORKFLOWS, "ml", "digits-abc12", {"spec": {"shutdown": strategy}})
    looks = here.server.count("list", "pods")
    until(lambda: here.server.count("list", "pods") > looks + 2, 120)
    assert len(leases(here)) == 2
    here.api.delete(PODS, "ml", "digits-abc12-fit-1")
    until(lambda: len(leases(here)) == 1, 120)
    assert [namespace for namespace, _ in leases(here)] == ["vision"]


@pytest.mark.parametrize(
    ("url", "namespaces", "says"),
    [
        ("s3://ml-runs/tiphys", ("ml", "vision"), r"s3://ml-runs/tiphys/\{namespace\}"),
        ("s3://ml-runs/tiphys", None, "more than one namespace"),
        ("s3://ml-runs/{run}", ("ml",), "placeholder other than"),
        ("s3://ml-runs", (), "no namespace is served"),
    ],
)
def test_choice_that_would_mix_tenants_is_refused(here, url, namespaces, says):
    with pytest.raises(UsageError, match=says):
        build_tenants(here.api, DeploymentSettings(url, namespaces, release_namespace=RELEASE))


def test_every_namespace_is_served_where_that_is_asked_for(tmp_path):
    with site(tmp_path, None) as here:
        flow = here.submit("vision", prep())
        assert phase(flow.call("admit", "prep")) == "Succeeded"
        assert here.tenants.known_namespaces == ["vision"]
