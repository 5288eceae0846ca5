"""A request that takes any of several GPU types, the preferred one first.

| what is there | what the request gets |
|---|---|
| the preferred type | that |
| only another of its types | that |
| only types that it does not name | it waits, or is rejected if it names none that the cluster has |
| quota of ``*`` | nodes of its types only |
| flavors | those of its types, in its order |
| a speed for each type | the fastest type that has room; of equal ones the preferred one |
"""

import json
from dataclasses import replace

import pytest
from support.builders.ledger import NOW, ask, lease, ledger_api, queues, waiting
from tiphys_plugin.quota.kueue.workload import build_workload
from tiphys_plugin.quota.lease import (
    AdmissionReason,
    Admitted,
    Deferred,
    Lease,
    LeaseRequest,
    LedgerState,
    Rejected,
    StepAttempt,
)
from tiphys_plugin.quota.ledger.kubernetes_ledger import KubernetesLedger
from tiphys_plugin.quota.ledger.sqlite_ledger import SqliteLedger
from tiphys_plugin.quota.ledger.status_codec import decode_state, encode_state
from tiphys_plugin.quota.placement.model import GangRequest, PodRequest
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler.decide import decide_admission
from tiphys_plugin.quota.simulation.jobs import TraceJob, build_lease_request

from tiphys.protocol.step_spec import GpuRequest

ATTEMPT = StepAttempt("u", "ml", "w", "r", "fit", "i", "n", 1)
BOTH = queues(research={"A100": 8, "H100": 8, "T4": 8})


def either(gpus: int, *types: str, uid: str = "u1") -> LeaseRequest:
    return ask(gpus, uid, gpu_type=None, gpu_types=types)


def decided(rules: Queues, request: LeaseRequest, *leases, pending=()):
    return decide_admission(LedgerState(leases, pending, queues=rules), request, 100, NOW)


def test_the_preferred_type_is_taken_and_then_the_next():
    wanted = either(8, "H100", "A100")
    assert decided(BOTH, wanted) == Admitted("", "H100")
    assert decided(BOTH, wanted, lease(1, pool="H100", gpu_type="H100")) == Admitted("", "A100")


@pytest.mark.parametrize(
    ("speed", "taken"),
    [
        ({}, "A100 H100 T4"),
        ({"H100": 2.5, "A100": 1, "T4": 0.2}, "H100 A100 T4"),
        ({"T4": 3}, "T4 A100 H100"),
        ({"A100": 0.5}, "H100 T4 A100"),
        ({"A100": 4, "H100": 4, "T4": 5}, "T4 A100 H100"),
    ],
)
def test_a_type_with_room_and_the_highest_speed_is_taken(speed, taken):
    gpu = GpuRequest(gpus=8, gpu_types=("A100", "H100", "T4"), speed=speed, queue="research")
    held: tuple[Lease, ...] = ()
    for kind in taken.split():
        answer = decided(BOTH, LeaseRequest.from_gpu_request(gpu, ATTEMPT), *held)
        assert answer == Admitted("", kind)
        held = (*held, lease(8, kind, kind, gpu_type=kind))
    answer = decided(BOTH, LeaseRequest.from_gpu_request(gpu, ATTEMPT), *held)
    assert isinstance(answer, Deferred)
    assert taken.replace(" ", " or ") in answer.message


def test_the_quota_of_the_queue_comes_before_the_faster_type_of_another():
    lab = [{"name": "research", "gpus": {"A100": 8, "H100": 0}}, {"name": "other", "gpus": {"H100": 8}}]
    rules = Queues.model_validate({"queues": [{**one, "cohort": "lab"} for one in lab]})
    gpu = GpuRequest(gpus=8, gpu_types=("A100", "H100"), speed={"H100": 3}, queue="research")
    request = LeaseRequest.from_gpu_request(gpu, ATTEMPT)
    assert decided(rules, request) == Admitted("", "A100")
    assert decided(rules, request, lease(8, "a", "A100")) == Admitted("", "H100")


def test_no_other_type_is_taken():
    full = (lease(8, "a", "A100"), lease(8, "h", "H100", gpu_type="H100"))
    answer = decided(BOTH, either(1, "H100", "A100"), *full)
    assert isinstance(answer, Deferred)
    assert answer.reason is AdmissionReason.WAITING_FOR_QUOTA
    assert "H100 or A100" in answer.message


def test_a_blocked_request_reserves_only_types_that_it_can_use():
    queue = {"name": "research", "gpus": {"A100": 8, "H100": 8, "T4": 8}, "backfill": "strict"}
    strict = Queues.model_validate({"queues": [queue]})
    full = (lease(8, "a", "A100"), lease(8, "h", "H100", gpu_type="H100"))
    line = (waiting(8, 1, gpu_type=None, gpu_types=("H100", "A100")),)
    assert decided(strict, ask(1, gpu_type="T4"), *full, pending=line) == Admitted("", "T4")
    assert isinstance(decided(strict, ask(1, gpu_type="A100"), full[1], lease(7, "b", "A100"), pending=line), Deferred)


def test_a_type_that_no_node_has_is_passed_over_and_none_at_all_is_refused():
    rules = queues({"A100": {"count": 8}}, research={"A100": 8, "H100": 8})
    assert decided(rules, either(8, "H100", "A100")) == Admitted("", "A100")
    answer = decided(rules, either(8, "H100", "B200"))
    assert isinstance(answer, Rejected)
    assert answer.message == "the cluster has no H100 or B200; it has: A100"


def test_a_queue_without_its_types_refuses_it():
    answer = decided(queues(research={"T4": 8}), either(1, "H100", "A100"))
    assert isinstance(answer, Rejected)
    assert answer.message == "queue research has no H100 or A100; it has: T4"


def test_under_a_quota_for_all_types_only_nodes_of_its_types_are_used():
    nodes = [{"name": f"n-{kind}", "gpu_type": kind, "gpus": 8} for kind in ("A10", "A100", "H100")]
    rules = Queues.model_validate({"queues": [{"name": "research", "gpus": {"*": 24}}], "nodes": nodes})
    assert decided(rules, either(8, "H100")).nodes == ("n-H100",)
    for types in (("H100", "A100"), ("A100", "H100")):
        assert decided(rules, either(8, *types)).nodes == (f"n-{types[0]}",), (
            "the preferred one, as under quotas by type"
        )
    held = replace(lease(8, "h", "*", gpu_type=None, gpu_types=("H100", "A100")), nodes=("n-H100",))
    answer = decided(rules, either(8, "H100", "A100"), held)
    assert answer == Admitted("", "*", nodes=("n-A100",))


def test_flavors_are_tried_in_the_order_of_the_types():
    flavors = [
        {"name": f"{kind.lower()}-own", "gpu_type": kind, "node_labels": {"pool": "own"}} for kind in ("A100", "H100")
    ]
    queue = {"name": "research", "gpus": {"a100-own": 8, "h100-own": 8, "*": 8}}
    rules = Queues.model_validate({"queues": [queue], "flavors": flavors})
    assert decided(rules, either(8, "H100", "A100")).pool == "h100-own"
    assert decided(rules, either(8, "A100", "H100")).pool == "a100-own"
    refused = decided(rules, either(8, "T4", "L4"))
    assert isinstance(refused, Rejected)


@pytest.mark.parametrize("kind", ["kubernetes", "sqlite"])
def test_a_ledger_keeps_the_choice(tmp_path, kind):
    def opened():
        return KubernetesLedger(api, "tiphys") if kind == "kubernetes" else SqliteLedger(tmp_path / "l.db", BOTH)

    api, wanted = ledger_api(BOTH), either(8, "H100", "A100")
    assert opened().request(wanted).pool == "H100"
    assert opened().request(either(8, "H100", "A100", uid="u2")).pool == "A100"
    assert isinstance(opened().request(either(8, "H100", "A100", uid="u3")), Deferred)
    snapshot = opened().snapshot()
    assert {one.request.gpu_types for one in (*snapshot.leases, *snapshot.pending)} == {("H100", "A100")}


def test_the_stored_form_of_other_requests_is_as_it_was():
    state = LedgerState((lease(1),), (waiting(1, 1, gpu_type=None, gpu_types=("H100", "A100")),))
    stored = encode_state(state)
    assert "gpuTypes" not in json.dumps(stored["leases"])
    assert stored["waiting"][0]["request"]["gpuTypes"] == ["H100", "A100"]
    assert decode_state(json.loads(json.dumps(stored))) == state


def test_kueue_chooses_among_the_types():
    pod = build_workload(either(2, "H100", "A100"), is_running=False)["spec"]["podSets"][0]["template"]["spec"]
    [term] = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"][0]["values"] == ["H100", "A100"]
    assert "nodeSelector" not in pod


@pytest.mark.parametrize(
    ("spec", "gpu_type", "gpu_types"),
    [
        (None, None, ()),
        ("T4", "T4", ()),
        ("V100M16|V100M32|V100M32", None, ("V100M16", "V100M32")),
        ("T4|T4", "T4", ()),
    ],
)
def test_a_trace_separates_types_by_a_bar(spec, gpu_type, gpu_types):
    request = build_lease_request(TraceJob("j", 0, 1, 1, queue="q", gpu_type=spec), 1)
    assert (request.gpu_type, request.gpu_types) == (gpu_type, gpu_types)


def test_a_pod_of_several_types_fits_on_each_of_them_alone():
    pod = GangRequest(PodRequest(1, gpu_types=("A100", "H100"))).pod
    assert [pod.accepts_type(kind) for kind in ("A100", "H100", "T4")] == [True, True, False]
    assert PodRequest(1).accepts_type("T4")
    assert not PodRequest(1, "A100").accepts_type("T4")
