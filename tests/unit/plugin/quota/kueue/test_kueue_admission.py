"""Kueue as the authority: life of a Workload, evictions, faults of the API server, and services that die.

| Workload | a repeated request | is it a lease |
|---|---|---|
| absent, or finished | creates it | no |
| waits | Deferred with Kueue's reason | no |
| admitted | grants it | from then on |
| evicted before the grant | gives the reservation back, Deferred | no |
| evicted after the grant | Admitted, as before | yes, marked as preempted |
"""

from datetime import timedelta

import pytest
from support.builders.ledger import ask, deferral
from support.fakes.kueue import FLAVOR, LABELS, FakeKueue, is_true
from support.processes.failpoints import dying_at
from support.servers.kube_server import KubeServer
from support.stories.plugin import Clock
from tiphys_plugin.quota.kueue.backend import KueueAdmission
from tiphys_plugin.quota.lease import AdmissionReason, Admitted, Deferred, Rejected

from tiphys.errors import StoreError
from tiphys.kube.resources import KUEUE_FLAVORS, KUEUE_LOCAL_QUEUES, KUEUE_WORKLOADS


@pytest.fixture
def kueue(server: KubeServer) -> FakeKueue:
    return FakeKueue(server.api("ml"), {"key": "gpu", "operator": "Exists"}, research=8)


@pytest.fixture
def backend(server: KubeServer, kueue: FakeKueue, clock: Clock) -> KueueAdmission:
    return KueueAdmission(server.api("ml"), ["ml"], clock)


def admitted(backend: KueueAdmission, kueue: FakeKueue, gpus: int = 8, **changes: object) -> Admitted:
    request = ask(gpus, **changes)
    assert isinstance(backend.request(request), Deferred)
    kueue.schedule()
    answer = backend.request(request)
    assert isinstance(answer, Admitted), answer
    return answer


def held(backend: KueueAdmission) -> list[tuple[str, int]]:
    return [(lease.request.uid, lease.request.gpus) for lease in backend.snapshot().leases]


def test_request_waits_until_kueue_admits_it_and_then_has_the_nodes_of_the_flavor(backend, kueue):
    answer = admitted(backend, kueue)
    assert (answer.pool, answer.members) == (FLAVOR, None)
    assert answer.flavor is not None
    assert answer.flavor.node_selector == LABELS
    assert [one.manifest() for one in answer.flavor.tolerations] == [{"key": "gpu", "operator": "Exists"}]
    assert held(backend) == [("u1", 8)]
    assert backend.snapshot().pending == ()


def test_request_for_gpus_of_another_resource_is_one_to_kueue_too(server, backend, kueue):
    backend.request(ask(8, gpu_type=None, resource="amd.com/gpu"))
    [workload] = kueue.workloads
    resources = workload["spec"]["podSets"][0]["template"]["spec"]["containers"][0]["resources"]
    assert resources == {side: {"amd.com/gpu": "8"} for side in ("requests", "limits")}
    typed = backend.request(ask(8, "u2", gpu_type="MI300X", resource="amd.com/gpu"))
    assert isinstance(typed, Rejected)
    assert "asks for amd.com/gpu of the type MI300X, and types are known to Kueue by the label" in typed.message


def test_workload_says_whose_it_is_and_asks_for_one_gpu_type(backend, kueue):
    backend.request(ask(8, priority=7))
    [workload] = kueue.workloads
    assert workload["metadata"]["labels"] == {
        "app.kubernetes.io/managed-by": "tiphys",
        "tiphys.dev/run": "run-u1",
        "tiphys.dev/step": "fit",
        "tiphys.dev/attempt": "1",
        "tiphys.dev/workflow-uid": "u1",
    }
    assert workload["spec"]["priority"] == 7
    assert workload["spec"]["queueName"] == "research"
    [pods] = workload["spec"]["podSets"]
    assert pods["template"]["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": "A100"}
    assert "ownerReferences" not in workload["metadata"], "its quota would be free while pods still save"


@pytest.mark.parametrize(
    ("levels", "slices", "nodes"),
    [
        (
            ["kubernetes.io/hostname"],
            [{"domainCount": 1, "podCounts": {"universal": 2}, "valuesPerLevel": [{"universal": "n-1"}]}],
            ("n-1", "n-1"),
        ),
        (
            ["rack", "kubernetes.io/hostname"],
            [
                {
                    "domainCount": 2,
                    "podCounts": {"individual": [2, 1]},
                    "valuesPerLevel": [
                        {"universal": "r1"},
                        {"individual": {"prefix": "n-", "roots": ["2", "3"], "suffix": ".lab"}},
                    ],
                },
                {"domainCount": 1, "podCounts": {"universal": 1}, "valuesPerLevel": [{"universal": "r2"}] * 2},
            ],
            ("n-2.lab", "n-2.lab", "n-3.lab", "r2"),
        ),
        (["rack"], [{"domainCount": 1, "podCounts": {"universal": 2}, "valuesPerLevel": [{"universal": "r"}]}], ()),
    ],
    ids=["one node", "two racks", "no nodes"],
)
def test_nodes_of_a_topology_assignment_are_those_of_the_members(backend, kueue, server, levels, slices, nodes):
    backend.request(ask(8))
    kueue.schedule()
    [workload] = kueue.workloads
    workload["status"]["admission"]["podSetAssignments"][0]["topologyAssignment"] = {"levels": levels, "slices": slices}
    server.api("ml").replace(KUEUE_WORKLOADS, "ml", workload, "status")
    answer = backend.request(ask(8))
    assert isinstance(answer, Admitted)
    assert answer.nodes == nodes
    assert backend.request(ask(8)) == answer
    assert backend.snapshot().leases[0].nodes == nodes


def test_gang_is_one_pod_set_that_is_admitted_as_a_whole(backend, kueue):
    answer = admitted(backend, kueue, 8, members=4)
    [workload] = kueue.workloads
    [pods] = workload["spec"]["podSets"]
    assert (pods["count"], pods.get("minCount")) == (4, None)
    assert pods["template"]["spec"]["containers"][0]["resources"]["requests"] == {"nvidia.com/gpu": "2"}
    assert answer.members is None


def test_elastic_gang_starts_with_the_members_that_kueue_admits_and_gives_lost_ones_back(backend, kueue):
    admitted(backend, kueue, 2, uid="u0")
    answer = admitted(backend, kueue, 2, members=1, min_members=1, max_members=4)
    assert answer.members == 3
    assert kueue.used("research") == 8
    backend.shrink(answer.lease, 2)
    backend.shrink(answer.lease, 2)
    assert kueue.used("research") == 6
    assert ("u1", 4) in held(backend)


def test_repeated_request_finds_the_same_workload(backend, kueue, server):
    first = admitted(backend, kueue)
    other_service = KueueAdmission(server.api("ml"), ["ml"])
    again = other_service.request(ask(8))
    assert isinstance(again, Admitted)
    assert again == first
    assert len(kueue.workloads) == 1


@pytest.mark.parametrize(
    "changes",
    [{"attempt": 2}, {"node": "u1.fit(1).admit"}, {"step": "eval"}, {"uid": "u2"}],
    ids=["attempt", "node", "step", "workflow"],
)
def test_every_attempt_has_a_workload_of_its_own(backend, kueue, changes):
    first = admitted(backend, kueue, 4)
    second = admitted(backend, kueue, 4, **changes)
    assert second.lease != first.lease
    assert len(held(backend)) == 2


def test_reason_and_position_are_those_of_kueue(backend, kueue):
    admitted(backend, kueue, 6)
    backend.request(ask(8, "u2", priority=1))
    kueue.schedule()
    backend.request(ask(4, "u3", priority=5))
    kueue.schedule()
    answer = backend.request(ask(8, "u2", priority=1))
    assert isinstance(answer, Deferred)
    assert (answer.reason, answer.position) == (AdmissionReason.WAITING_FOR_QUOTA, 2)
    assert answer.message == (
        "position 2 in LocalQueue research, counted by priority and age; Kueue: 2 GPUs are unused"
    )


def test_position_is_that_of_the_visibility_api_where_it_is_served(backend, kueue, server):
    backend.request(ask(8))
    [workload] = kueue.workloads
    place = {"metadata": {"name": workload["metadata"]["name"]}, "positionInLocalQueue": 1, "positionInClusterQueue": 4}
    server.subresources["pendingworkloads", "ml", "research"] = {"items": [place]}
    answer = backend.request(ask(8))
    assert isinstance(answer, Deferred)
    assert answer.position == 5
    assert answer.message.startswith("position 2 in LocalQueue research, 5 in its ClusterQueue; ")


def test_queue_on_hold_is_a_stopped_queue(backend, kueue):
    kueue.on_hold["research"] = "LocalQueue research is stopped"
    backend.request(ask(8))
    kueue.schedule()
    answer = backend.request(ask(8))
    assert deferral(answer) is AdmissionReason.QUEUE_STOPPED
    assert "LocalQueue research is stopped" in answer.message


@pytest.mark.parametrize(
    ("reason", "known"),
    [
        ("ExceedsMaxQuota", AdmissionReason.EXCEEDS_MAX_QUOTA),
        ("TopologyPlacementFailed", AdmissionReason.TOPOLOGY_PLACEMENT_FAILED),
        ("WaitingForPreemptedWorkloads", AdmissionReason.WAITING_FOR_PREEMPTED_CHECKPOINT),
        ("Inadmissible", AdmissionReason.MISCONFIGURED),
        ("ReasonOfAKueueToCome", AdmissionReason.PENDING_EVALUATION),
    ],
)
def test_every_reason_of_kueue_is_shown_with_its_sentence(backend, kueue, reason, known):
    backend.request(ask(8))
    kueue.set_condition(kueue.workloads[0], "QuotaReserved", False, reason, "the sentence of Kueue")
    answer = backend.request(ask(8))
    assert deferral(answer) is known
    assert "the sentence of Kueue" in answer.message


def test_reserved_quota_waits_for_admission_checks(backend, kueue, server):
    backend.request(ask(8))
    kueue.set_condition(kueue.workloads[0], "QuotaReserved", True, "QuotaReserved", "")
    [workload] = kueue.workloads
    status = {**workload["status"], "admissionChecks": [{"name": "capacity", "state": "Pending"}]}
    server.api("ml").replace(KUEUE_WORKLOADS, "ml", {**workload, "status": status}, "status")
    answer = backend.request(ask(8))
    assert deferral(answer) is AdmissionReason.ADMISSION_CHECK_PENDING
    assert "capacity is Pending" in answer.message


def test_release_returns_the_quota_and_may_be_repeated(backend, kueue):
    answer = admitted(backend, kueue)
    assert kueue.used("research") == 8
    backend.release(answer.lease)
    backend.release(answer.lease)
    assert kueue.used("research") == 0
    assert held(backend) == []


def test_released_attempt_that_asks_again_gets_a_new_workload(backend, kueue):
    first = admitted(backend, kueue)
    backend.release(first.lease)
    assert isinstance(backend.request(ask(8)), Deferred)
    kueue.schedule()
    assert isinstance(backend.request(ask(8)), Admitted)
    assert kueue.used("research") == 8


def test_lease_of_another_ledger_is_no_error(backend):
    backend.release("0123456789abcdef")
    backend.shrink("0123456789abcdef", 1)


def test_eviction_marks_the_lease_and_keeps_the_quota_until_the_pods_are_gone(backend, kueue):
    answer = admitted(backend, kueue)
    backend.request(ask(8, "u2", priority=9))
    preemptor = next(one for one in kueue.workloads if one["spec"]["priority"] == 9)
    kueue.evict(message=f"Preempted to accommodate a workload (UID: {preemptor['metadata']['uid']}, JobUID: UNKNOWN)")
    [lease] = backend.snapshot().leases
    assert lease.preemption is not None
    assert lease.preemption.preemptor == ("u2", "fit")
    kueue.schedule()
    assert deferral(backend.request(ask(8, "u2", priority=9))) is AdmissionReason.WAITING_FOR_QUOTA
    backend.release(lease.id)
    kueue.schedule()
    assert isinstance(backend.request(ask(8, "u2", priority=9)), Admitted)
    assert answer.lease == lease.id


def test_eviction_between_admission_and_grant_gives_the_reservation_back(backend, kueue):
    backend.request(ask(8))
    kueue.schedule()
    kueue.evict(message="for another")
    answer = backend.request(ask(8))
    assert deferral(answer) is AdmissionReason.WAITING_FOR_QUOTA
    assert "for another" in answer.message
    assert kueue.used("research") == 0
    assert held(backend) == []
    kueue.schedule()
    assert isinstance(backend.request(ask(8)), Admitted)


def test_eviction_during_the_grant_wins(backend, kueue, monkeypatch):
    """The service has read an admitted Workload, and writes the grant after Kueue has evicted it."""
    backend.request(ask(8))
    kueue.schedule()
    read_flavor = backend._read_flavor

    def evict_first(*arguments):
        monkeypatch.setattr(backend, "_read_flavor", read_flavor)
        kueue.evict()
        return read_flavor(*arguments)

    monkeypatch.setattr(backend, "_read_flavor", evict_first)
    assert isinstance(backend.request(ask(8)), Deferred)
    assert held(backend) == []
    assert kueue.used("research") == 0


def test_eviction_between_grant_and_claim_lets_the_attempt_start_and_go(backend, kueue):
    """Another service may have claimed the attempt by then, so its GPUs are never free before its pods are gone."""
    first = admitted(backend, kueue)
    kueue.evict()
    again = backend.request(ask(8))
    assert isinstance(again, Admitted)
    assert again.lease == first.lease
    assert backend.snapshot().leases[0].preemption is not None
    assert kueue.used("research") == 8


def test_reservation_that_was_cleared_under_a_running_attempt_counts_as_eviction(backend, kueue):
    admitted(backend, kueue)
    kueue.set_condition(kueue.workloads[0], "QuotaReserved", False, "Pending", "cleared by hand")
    assert backend.snapshot().leases[0].preemption is not None


@pytest.mark.parametrize(
    "point",
    ["kueue.before_create", "kueue.after_create", "kueue.before_grant", "kueue.after_grant"],
)
def test_service_that_dies_while_it_admits_loses_no_gpus(backend, kueue, point):
    if point.endswith("grant"):
        backend.request(ask(8))
        kueue.schedule()
    with dying_at(point):
        backend.request(ask(8))
    backend.request(ask(8))
    kueue.schedule()
    assert isinstance(backend.request(ask(8)), Admitted)
    assert len(kueue.workloads) == 1
    assert kueue.used("research") == 8


@pytest.mark.parametrize("point", ["kueue.before_finish", "kueue.after_finish"])
def test_service_that_dies_while_it_releases_loses_no_gpus(backend, kueue, point):
    answer = admitted(backend, kueue)
    with dying_at(point):
        backend.release(answer.lease)
    backend.release(answer.lease)
    assert kueue.used("research") == 0


@pytest.mark.parametrize("verb", ["create", "patch", "update"])
@pytest.mark.parametrize("done", [False, True])
def test_write_whose_answer_is_lost_is_found_by_the_repeated_request(backend, kueue, server, verb, done):
    def life() -> None:
        answer = backend.request(ask(8))
        kueue.schedule()
        answer = backend.request(ask(8))
        assert isinstance(answer, Admitted)
        backend.release(answer.lease)

    server.fail_next(503, verb=verb, plural="workloads", done=done)
    for _ in range(4):
        try:
            life()
            break
        except StoreError:
            assert sum(is_true(one, "Admitted") for one in kueue.workloads) <= 1
    assert kueue.used("research") == 0
    assert len(kueue.workloads) == 1


def test_cluster_without_kueue_is_an_error_that_says_what_to_do(server):
    server.unknown = {"workloads", "localqueues", "resourceflavors"}
    backend = KueueAdmission(server.api("ml"), ["ml"])
    for call in (lambda: backend.request(ask(8)), backend.snapshot):
        with pytest.raises(StoreError, match=r"kueue\.x-k8s\.io/v1beta2.*install Kueue 0\.15 or newer"):
            call()


def test_service_without_rights_is_an_error_that_says_what_to_do(backend, server):
    server.authorize = lambda request: request.plural != "workloads"
    with pytest.raises(StoreError, match=r"may not use Kueue in ml; upgrade the chart with `ledger\.kind: kueue`"):
        backend.request(ask(8))


def test_unknown_local_queue_is_rejected_with_those_that_exist(backend, server):
    answer = backend.request(ask(8, queue="reserch"))
    assert isinstance(answer, Rejected)
    assert answer.reason is AdmissionReason.QUEUE_UNKNOWN
    assert "namespace ml has no LocalQueue 'reserch'; it has: research" in answer.message
    assert server.count("create", "workloads") == 0


def test_queue_that_goes_while_the_request_waits_defers_it(backend, kueue, server):
    backend.request(ask(8))
    server.api("ml").delete(KUEUE_LOCAL_QUEUES, "ml", "research")
    kueue.set_condition(kueue.workloads[0], "QuotaReserved", False, "Inadmissible", "LocalQueue research doesn't exist")
    answer = backend.request(ask(8))
    assert deferral(answer) is AdmissionReason.MISCONFIGURED
    assert "LocalQueue research doesn't exist" in answer.message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"min_gpu_memory_mb": 40000}, "name a GPU type"),
        ({"members": 8, "tensor_parallel": 4}, "NVLink domain"),
        ({"members": 8, "within": "rack"}, "within one rack"),
    ],
)
def test_a_request_that_kueue_cannot_serve_is_refused_by_name(backend, server, changes, words):
    answer = backend.request(ask(8, **changes))
    assert isinstance(answer, Rejected)
    assert answer.reason is AdmissionReason.UNSUPPORTED_BY_KUEUE
    assert words in answer.message
    assert server.count("create", "workloads") == 0


SPOT_TAINT = {"key": "spot", "value": "true", "effect": "NoSchedule"}


def add_spot_flavor(server: KubeServer) -> None:
    spec = {"nodeLabels": {"pool": "spot"}, "nodeTaints": [SPOT_TAINT]}
    metadata = {"name": "a100-spot", "labels": {"tiphys.dev/spot": "true"}}
    server.api("ml").create(KUEUE_FLAVORS, None, {"metadata": metadata, "spec": spec})


@pytest.mark.parametrize("spot", ["no", "allowed", "only", "avoided"])
def test_only_steps_that_may_use_spot_nodes_tolerate_their_taints(backend, kueue, server, spot):
    add_spot_flavor(server)
    backend.request(ask(8, spot=spot))
    pod = kueue.workloads[0]["spec"]["podSets"][0]["template"]["spec"]
    assert pod.get("tolerations", []) == ([] if spot == "no" else [{**SPOT_TAINT, "operator": "Equal"}])
    required = pod.get("affinity", {}).get("nodeAffinity", {})
    assert ("spot" in str(required)) is (spot == "only")


def test_pods_tolerate_the_taints_of_the_spot_nodes_that_they_got(server, kueue):
    add_spot_flavor(server)
    kueue.flavor = "a100-spot"
    backend = KueueAdmission(server.api("ml"), ["ml"])
    answer = admitted(backend, kueue, spot="allowed")
    assert answer.flavor is not None
    assert answer.flavor.spot
    [toleration] = answer.flavor.tolerations
    assert toleration.manifest() == {"operator": "Equal", **SPOT_TAINT}


def test_step_that_must_use_spot_nodes_is_rejected_without_any(backend, server):
    answer = backend.request(ask(8, spot="only"))
    assert isinstance(answer, Rejected)
    assert "no ResourceFlavor has the label tiphys.dev/spot=true" in answer.message
    assert server.count("create", "workloads") == 0


def test_waiting_steps_share_one_list_of_positions(backend, kueue, server):
    admitted(backend, kueue, 8, uid="u0")
    requests = [ask(8, f"u{number}") for number in range(1, 6)]
    for request in requests:
        backend.request(request)
    kueue.schedule()
    before = server.count("list", "workloads")
    positions = [backend.request(request).position for request in requests]
    assert sorted(positions) == [1, 2, 3, 4, 5]
    assert server.count("list", "workloads") == before + 1


def test_withdrawn_requests_are_deleted_and_leases_are_kept(backend, kueue):
    admitted(backend, kueue, 4, step="fit")
    backend.request(ask(8, step="eval"))
    backend.request(ask(8, "u2"))
    backend.withdraw("u1")
    assert held(backend) == [("u1", 4)]
    assert [one.request.uid for one in backend.snapshot().pending] == ["u2"]


def test_request_that_is_granted_while_it_is_withdrawn_keeps_its_lease(backend, kueue, monkeypatch):
    backend.request(ask(8))
    kueue.schedule()
    delete = backend._delete

    def grant_first(workload):
        assert isinstance(backend.request(ask(8)), Admitted)
        delete(workload)

    monkeypatch.setattr(backend, "_delete", grant_first)
    backend.withdraw("u1")
    assert held(backend) == [("u1", 8)]


def test_named_dead_leases_are_released_before_the_next_check(backend, kueue, clock):
    admitted(backend, kueue, 4)
    admitted(backend, kueue, 4, uid="u2")
    backend.release_dead_leases(lambda _: False)
    named = [lease for lease in backend.snapshot().leases if lease.request.uid == "u1"]
    assert [lease.request.uid for lease in backend.release_dead_leases(lambda _: True, named)] == ["u1"]
    assert kueue.used("research") == 4


def test_dead_leases_are_released_after_a_check(backend, kueue, clock):
    admitted(backend, kueue, 4)
    admitted(backend, kueue, 4, uid="u2")
    gone = backend.release_dead_leases(lambda lease: lease.request.uid == "u2")
    assert [lease.request.uid for lease in gone] == ["u2"]
    assert kueue.used("research") == 4
    assert backend.release_dead_leases(lambda _: True) == [], "checked a moment ago"
    named = backend.snapshot().leases
    assert backend.release_dead_leases(lambda _: False, named) == []
    backend.release_workflow("u1")
    assert [lease.request.uid for lease in backend.release_dead_leases(lambda _: True)] == ["u1"]
    assert kueue.used("research") == 0


def test_lease_of_running_pods_is_restored_beyond_the_quota(backend, kueue, server):
    answer = admitted(backend, kueue)
    server.api("ml").delete(KUEUE_WORKLOADS, "ml", kueue.workloads[0]["metadata"]["name"])
    admitted(backend, kueue, 4, uid="u2")
    assert backend.restore(answer.lease, ask(8), FLAVOR) == 8
    assert backend.restore(answer.lease, ask(8), FLAVOR) == 8
    assert sorted(held(backend)) == [("u1", 8), ("u2", 4)]
    assert kueue.used("research") == 12
    assert len(kueue.workloads) == 2


def test_workload_whose_annotations_were_changed_is_no_lease_and_is_restored(backend, kueue, server):
    answer = admitted(backend, kueue)
    name = kueue.workloads[0]["metadata"]["name"]
    annotations = {"tiphys.dev/lease-request": '{"gpus": 800}'}
    server.api("ml").patch(KUEUE_WORKLOADS, "ml", name, {"metadata": {"annotations": annotations}})
    assert held(backend) == []
    assert backend.restore(answer.lease, ask(8), FLAVOR) == 8
    assert held(backend) == [("u1", 8)]


def test_tenant_cannot_speak_for_another_namespace(backend, kueue, server):
    admitted(backend, kueue)
    workload = kueue.workloads[0]
    copied = {"metadata": {**workload["metadata"], "namespace": "other"}, "spec": workload["spec"]}
    copied["metadata"] = {key: copied["metadata"][key] for key in ("name", "namespace", "labels", "annotations")}
    server.api("other").create(KUEUE_WORKLOADS, "other", copied)
    everywhere = KueueAdmission(server.api("ml"), None)
    assert sorted(lease.request.namespace for lease in everywhere.snapshot().leases) == ["ml", "other"]


def test_sweep_deletes_finished_and_abandoned_workloads(backend, kueue, clock):
    answer = admitted(backend, kueue, 2)
    kept = admitted(backend, kueue, 2, uid="u2")
    backend.request(ask(2, "u3"))
    backend.request(ask(8, "u4"))
    kueue.schedule()
    backend.release(answer.lease)
    backend.sweep()
    assert len(kueue.workloads) == 4
    clock.now += timedelta(minutes=11)
    backend.sweep()
    names = [lease.id for lease in backend.snapshot().leases]
    assert names == [kept.lease]
    assert [one.request.uid for one in backend.snapshot().pending] == ["u4"], "it holds nothing, so it may wait"
    assert kueue.used("research") == 2


def waiting_for_a_check(server, kueue, name: str = "provisioning") -> dict:
    """The one Workload, as Kueue leaves it until an admission check says yes."""
    kueue.schedule()
    [workload] = kueue.workloads
    workload["status"]["admissionChecks"] = [{"name": name, "state": "Pending"}]
    written = server.api("ml").replace(KUEUE_WORKLOADS, "ml", workload, "status")
    return kueue.set_condition(written, "Admitted", False, "NoChecks", "waits for its checks")


def test_quota_that_waits_for_an_admission_check_keeps_its_place(backend, kueue, clock, server):
    backend.request(ask(8))
    uid = waiting_for_a_check(server, kueue)["metadata"]["uid"]
    for _ in range(5):
        clock.now += timedelta(minutes=11)
        backend.sweep()
        answer = backend.request(ask(8))
        assert isinstance(answer, Deferred)
        assert deferral(answer) is AdmissionReason.ADMISSION_CHECK_PENDING
        assert "provisioning is Pending" in answer.message
    [workload] = kueue.workloads
    assert workload["metadata"]["uid"] == uid
    kueue.set_condition(workload, "Admitted", True, "Admitted", "")
    assert isinstance(backend.request(ask(8)), Admitted)


def hold(server: KubeServer, name: str, active: bool = False) -> None:
    server.api("ml").patch(KUEUE_WORKLOADS, "ml", name, {"spec": {"active": active}})


def test_a_step_that_an_administrator_holds_is_held_in_its_next_attempt_too(backend, kueue, server):
    first = admitted(backend, kueue)
    hold(server, first.lease.partition("/")[2])
    kueue.evict(message="The workload is deactivated")
    backend.release(first.lease)
    again = ask(8, attempt=2)
    assert isinstance(backend.request(again), Deferred)
    created = next(one for one in kueue.workloads if not is_true(one, "Finished"))
    assert created["spec"]["active"] is False
    answer = backend.request(again)
    assert deferral(answer) is AdmissionReason.QUEUE_STOPPED
    name = created["metadata"]["name"]
    assert f'kubectl patch workload -n ml {name} --type=merge -p \'{{"spec":{{"active":true}}}}\'' in answer.message
    hold(server, name, active=True)
    kueue.schedule()
    second = backend.request(again)
    assert isinstance(second, Admitted)
    kueue.evict(message="Preempted")
    backend.release(second.lease)
    backend.request(ask(8, attempt=3))
    assert [one["spec"]["active"] for one in kueue.workloads if not is_true(one, "Finished")] == [True]


def test_a_hold_lasts_however_late_the_next_attempt_asks(backend, kueue, server, clock):
    first = admitted(backend, kueue)
    hold(server, first.lease.partition("/")[2])
    kueue.evict(message="The workload is deactivated")
    backend.release(first.lease)
    clock.now += timedelta(days=1)
    backend.sweep()
    backend.request(ask(8, attempt=2))
    assert [one["spec"]["active"] for one in kueue.workloads if not is_true(one, "Finished")] == [False]


def test_a_request_that_waits_for_admission_checks_has_left_the_line(backend, kueue, server):
    backend.request(ask(4))
    waiting_for_a_check(server, kueue)
    backend.request(ask(8, "u2"))
    answer = backend.request(ask(4))
    assert deferral(answer) is AdmissionReason.ADMISSION_CHECK_PENDING
    assert answer.position == 1
    assert "position" not in answer.message


def test_a_different_step_of_the_workflow_is_not_held(backend, kueue, server):
    first = admitted(backend, kueue, 2)
    hold(server, first.lease.partition("/")[2])
    backend.request(ask(2, attempt=2, step="eval"))
    assert [
        one["spec"]["active"] for one in kueue.workloads if one["metadata"]["labels"]["tiphys.dev/step"] == "eval"
    ] == [True]


def test_a_waiting_request_is_not_reported_as_having_lost_its_gpus(backend, kueue, server):
    backend.request(ask(8))
    [workload] = kueue.workloads
    hold(server, workload["metadata"]["name"])
    kueue.set_condition(kueue.workloads[0], "Evicted", True, "Deactivated", "The workload is deactivated")
    answer = backend.request(ask(8))
    assert "took the GPUs back" not in answer.message
    assert "the Workload is inactive (Deactivated: The workload is deactivated)" in answer.message


@pytest.mark.parametrize(
    ("reason", "sentence", "meant"),
    [
        (
            "Pending",
            "couldn't assign flavors to pod set main: flavor t4 doesn't match node affinity",
            "NoMatchingGpuType",
        ),
        (
            "Pending",
            "couldn't assign flavors to pod set main: untolerated taint {a b c} in flavor t4",
            "NoMatchingGpuType",
        ),
        ("Pending", "insufficient unused quota for nvidia.com/gpu in flavor a, 2 more needed", "WaitingForQuota"),
        ("Pending", "current podset request (9) > maximum capacity (8)", "ExceedsMaxQuota"),
        (
            "Pending",
            "flavor t4 doesn't match node affinity, insufficient unused quota for x in flavor a, 2 more needed",
            "WaitingForQuota",
        ),
        (
            "Pending",
            "couldn't assign flavors to pod set main: insufficient unused quota for nvidia.com/gpu in flavor a, 8 more "
            "needed. Pending the preemption of 1 workload(s)",
            "WaitingForPreemptedCheckpoint",
        ),
        ("Inadmissible", "ClusterQueue all-research is stopped", "QueueStopped"),
        ("Inadmissible", "ClusterQueue all-research is inactive", "QueueStopped"),
        ("Inadmissible", "LocalQueue research doesn't exist", "Misconfigured"),
        ("Waiting", "waiting for all admitted workloads to be in PodsReady condition", "PendingEvaluation"),
        ("NoMatchingFlavor", "flavor t4 doesn't match node affinity", "NoMatchingGpuType"),
        ("WaitingForQuota", "insufficient unused quota", "WaitingForQuota"),
        ("OfTheFuture", "something else", "PendingEvaluation"),
    ],
)
def test_reasons_of_older_and_newer_kueues_mean_the_same(backend, kueue, reason, sentence, meant):
    backend.request(ask(8))
    kueue.set_condition(kueue.workloads[0], "QuotaReserved", False, reason, sentence)
    answer = backend.request(ask(8))
    assert deferral(answer).value == meant
    assert sentence in answer.message
