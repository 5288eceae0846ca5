"""A ledger that was lost: recovered leases hold what live pods show, and never what stored records claim.

| the records claim             | the pods of the attempt show        | the recovered lease holds                  |
|-------------------------------|-------------------------------------|--------------------------------------------|
| 100,000 GPUs                  | none                                | nothing, and it is said                    |
| 100,000 GPUs                  | 2 GPUs                              | 2 GPUs, and it is said                     |
| 8 GPUs                        | 8 GPUs                              | 8 GPUs                                     |
| any                           | 100,000 GPUs of a pod that waits    | what the quota has room for                |
| any                           | more GPUs than the quota, and runs  | these: they are in use                     |
| several attempts for one pod  | 2 GPUs                              | 2 GPUs, once                               |
| a queue of others             | 2 GPUs                              | nothing of that queue, and it is said      |
| a priority above the limit    | 2 GPUs                              | with the highest priority of the queue     |
| another namespace             | 2 GPUs                              | those of the namespace of the pods         |
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.builders.ledger import spec
from support.stories.plugin import fit, gpus, outputs, phase, said
from support.stories.plugin_installation import RELEASE, Site, Submitted, site
from tiphys_plugin.quota.queues import Queues

from tiphys.kube.resources import GPU_LEDGERS, PODS
from tiphys.protocol.step_spec import STEP_ANNOTATION
from tiphys.records import AttemptClaim, RunRecord, SubmissionBinding, json_digest
from tiphys.store import RunLayout, Store, read_record


@pytest.fixture
def here(tmp_path) -> Iterator[Site]:
    with site(tmp_path) as running:
        yield running


def declare(here: Site, *queues: dict[str, Any]) -> None:
    declared = spec(Queues.model_validate({"queues": queues}))
    here.api.patch(GPU_LEDGERS, RELEASE, "default", {"spec": declared})


def rewrite(store: Store, key: str, content: bytes) -> None:
    """What somebody can do who may write the storage of a tenant."""
    store.delete(key)
    store.create(key, content)


def forge_request(here: Site, run: str = "digits-abc12", namespace: str = "vision", **changes: Any) -> None:
    """Rewrite the request for GPUs in the stored run."""
    store, key = here.store(namespace), RunLayout(run).run_record
    record = read_record(store, key, RunRecord)
    manifest = record.model_dump(mode="json")["workflow"]
    [template] = [one for one in manifest["spec"]["templates"] if "metadata" in one]
    annotations = template["metadata"]["annotations"]
    step = fit(gpu=gpus(1)).model_validate_json(annotations[STEP_ANNOTATION])
    assert step.gpu is not None
    forged = step.model_copy(update={"gpu": step.gpu.model_copy(update=changes)})
    annotations[STEP_ANNOTATION] = forged.to_bytes().decode()
    changed = record.model_copy(update={"workflow": manifest, "digest": json_digest(manifest)})
    rewrite(store, key, changed.to_bytes())


def training(here: Site, namespace: str = "vision", name: str = "digits-abc12", count: int = 2) -> Submitted:
    """An attempt that was admitted."""
    flow = here.submit(namespace, fit(gpu=gpus(count)), name=name)
    assert outputs(flow.call("admit", "fit", 0))["run"] == "true"
    return flow


def recover(here: Site) -> list[dict[str, Any]]:
    """Lose the ledger and start the service again; what it logs."""
    declared = here.api.get(GPU_LEDGERS, RELEASE, "default")["spec"]
    here.lose_ledger()
    here.api.patch(GPU_LEDGERS, RELEASE, "default", {"spec": declared})
    with capture_logs() as logged:
        here.start()
    return [dict(one) for one in logged]


def held(here: Site) -> list[tuple[str, str, int]]:
    return [
        (one.request.namespace, one.request.queue, one.request.gpus) for one in here.tenants.ledger.snapshot().leases
    ]


def capped(here: Site, tenant: str = "vision") -> float:
    lines = [
        one for one in here.tenants.render().decode().splitlines() if one.startswith("tiphys_leases_capped_total{")
    ]
    return sum(float(one.rsplit(" ", 1)[1]) for one in lines if f'tenant="{tenant}"' in one)


def test_a_forged_record_and_a_pod_without_gpus_hold_nothing(here):
    flow = training(here)
    flow.run_pod("fit", gpus=0)
    forge_request(here, gpus=100_000)
    logged = recover(here)
    assert held(here) == []
    [note] = [one for one in logged if one["event"] == "lease.capped"]
    assert (note["recorded"], note["gpus"], note["run"], note["log_level"]) == (100_000, 0, "digits-abc12", "warning")
    assert capped(here) == 1
    assert capped(here, "ml") == 0
    assert outputs(here.submit("ml", fit(gpu=gpus(8))).call("admit", "fit", 0))["run"] == "true"


def test_a_forged_record_holds_what_its_pod_requests(here):
    flow = training(here)
    flow.run_pod("fit", gpus=2)
    forge_request(here, gpus=100_000)
    recover(here)
    assert held(here) == [("vision", "research", 2)]
    assert capped(here) == 1
    assert outputs(here.submit("ml", fit(gpu=gpus(6))).call("admit", "fit", 0))["run"] == "true"


def test_a_lease_that_was_lost_is_recovered_as_it_was(here):
    training(here, count=8).run_pod("fit", gpus=8)
    [before] = here.tenants.ledger.snapshot().leases
    logged = recover(here)
    [after] = here.tenants.ledger.snapshot().leases
    known = replace(before.request, first_start=None)  # storage does not tell since when it had waited
    assert (after.id, after.request, after.pool) == (before.id, known, before.pool)
    assert [one["event"] for one in logged if one["event"].startswith("lease.")] == ["lease.recovered"]
    assert capped(here) == 0
    waiting = here.submit("ml", fit(gpu=gpus(1))).call("admit", "fit", 0)
    assert "queue research holds 8 of 8 A100" in said(waiting)


@pytest.mark.parametrize(("requested", "recovered"), [("100k", 0), (9, 0), (8, 8)])
def test_a_pod_that_does_not_run_counts_only_within_the_quota(here, requested, recovered):
    flow = training(here)
    flow.run_pod("fit", gpus=requested, phase="Pending")
    forge_request(here, gpus=8)
    recover(here)
    assert sum(count for _, _, count in held(here)) == recovered


def test_pods_that_wait_take_no_more_than_the_quota_together(here):
    for number in range(3):
        name = f"digits-abc1{number}"
        training(here, name=name).run_pod("fit", gpus=4, phase="Pending")
        forge_request(here, name, gpus=4)
    recover(here)
    assert held(here) == [("vision", "research", 4)] * 2
    assert capped(here) == 1


def test_gpus_that_run_count_also_beyond_the_quota(here):
    training(here, count=8).run_pod("fit", gpus=8)
    declare(here, {"name": "research", "gpus": {"A100": 4}})
    recover(here)
    assert held(here) == [("vision", "research", 8)]
    assert phase(here.submit("ml", fit(gpu=gpus(1))).call("admit", "fit", 0)) == "Pending"


def test_a_pod_counts_for_one_attempt_only(here):
    flow = training(here)
    flow.run_pod("fit", gpus=2)
    store, layout = here.store("vision"), RunLayout("digits-abc12")
    claim = read_record(store, layout.attempt("fit", 1), AttemptClaim)
    for number in range(5):
        step = f"fit.0123456789ab.{number}"
        forged = claim.model_copy(update={"step": step, "lease": f"{number:016}", "node": f"node-{number}"})
        store.create(layout.attempt(step, 1), forged.to_bytes())
    recover(here)
    assert [count for _, _, count in held(here)] == [2]


def test_a_queue_of_others_is_not_used_up(here):
    owned = {"name": "ml", "gpus": {"A100": 8}, "namespaces": ["ml"]}
    declare(here, {"name": "research", "gpus": {"A100": 8}}, owned)
    flow = training(here)
    flow.run_pod("fit", gpus=2)
    forge_request(here, queue="ml")
    recover(here)
    assert [queue for _, queue, _ in held(here)] == []
    assert capped(here) == 1
    assert outputs(here.submit("ml", fit(gpu=gpus(8, queue="ml"))).call("admit", "fit", 0))["run"] == "true"


def test_the_namespace_is_that_of_the_pods(here):
    owned = {"name": "ml", "gpus": {"A100": 8}, "namespaces": ["ml"]}
    declare(here, {"name": "research", "gpus": {"A100": 8}}, owned)
    flow = training(here)
    flow.run_pod("fit", gpus=2)
    store, key = here.store("vision"), RunLayout("digits-abc12").submission_binding(1)
    bound = read_record(store, key, SubmissionBinding)
    rewrite(store, key, bound.model_copy(update={"namespace": "ml"}).to_bytes())
    forge_request(here, queue="ml")
    recover(here)
    assert held(here) == []


def test_a_priority_is_never_above_that_of_the_queue(here):
    declare(here, {"name": "research", "gpus": {"A100": 8}, "max_priority": 3})
    training(here).run_pod("fit", gpus=2)
    forge_request(here, priority=1_000_000)
    recover(here)
    [lease] = here.tenants.ledger.snapshot().leases
    assert (lease.request.gpus, lease.request.priority) == (2, 3)


def test_the_size_of_a_pod_may_be_any_quantity(here):
    flow = training(here)
    flow.run_pod("fit", gpus="many")
    other = training(here, "ml", "other-abc12")
    other.run_pod("fit", gpus=2)
    recover(here)
    assert held(here) == [("ml", "research", 2)]
    assert here.api.list(PODS, "vision", "").items
