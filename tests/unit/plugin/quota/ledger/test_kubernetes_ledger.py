"""The ledger as one object of a cluster: what it costs, what it survives, and what it refuses to believe.

| what happens                                   | what follows                                     |
|------------------------------------------------|--------------------------------------------------|
| another service was faster                     | decided again on what is there now               |
| it is faster every time                        | `StoreError`, nothing granted                    |
| the answer of a write got lost                 | the next call gets the lease that was granted    |
| nothing changed but a sign of life             | no write, until it is old                        |
| object missing at the start                    | made empty, or `StoreError` with what to do      |
| deleted, exchanged or emptied later            | refused until it is recovered                    |
| status damaged or of another version           | refused in words                                 |
| spec edited, wrong                             | counts at once; nothing new is granted           |
| no room                                        | who comes waits outside, with the reason         |
"""

import json

import pytest
from support.builders.ledger import LedgerApi, ask, deferral, ledger_api, ledger_status, queues, spec
from support.servers.kube_server import serving
from support.servers.kube_store import Collection, Place
from support.stories.plugin import Clock
from tiphys_plugin.quota.admission_backend import LedgerLostError
from tiphys_plugin.quota.lease import (
    AdmissionReason,
    Admitted,
    Deferred,
    Lease,
    LedgerState,
    PendingRequest,
    PreemptionNotice,
    Rejected,
)
from tiphys_plugin.quota.ledger import ledger_object, room
from tiphys_plugin.quota.ledger.kubernetes_ledger import KubernetesLedger
from tiphys_plugin.quota.ledger.status_codec import decode_state, encode_state
from tiphys_plugin.quota.scheduler.pending_queues import PendingQueues

from tiphys.errors import ConflictError, ForbiddenError, StoreError
from tiphys.kube.resources import GPU_LEDGERS

EIGHT = queues(research={"A100": 8})
PLACE = Place(Collection("tiphys.dev", "gpuledgers"), "tiphys", "default")


@pytest.fixture
def api() -> LedgerApi:
    return ledger_api(EIGHT)


@pytest.fixture
def ledger(api, clock) -> KubernetesLedger:
    return service(api, clock)


def service(api: LedgerApi, clock: Clock | None = None, **options) -> KubernetesLedger:
    return KubernetesLedger(api, "tiphys", clock=clock or Clock(), pause=lambda _: None, **options)


def edit(api: LedgerApi, part: str = "", **changes) -> None:
    """Somebody with an editor changes the object, or its subresource ``part``."""
    before = api.store.get(PLACE)
    after = {key: value for key, value in {**before, **changes}.items() if value is not None}
    api.store.write(PLACE, part, lambda _: after)


def fault_once(api: LedgerApi, fault: str) -> None:
    faults = iter([fault])
    api.meanwhile = lambda: next(faults, "")


def calls_of(api: LedgerApi, action) -> list[str]:
    api.calls.clear()
    action()
    return list(api.calls)


def test_decision_costs_one_read_and_one_write(api, ledger):
    assert calls_of(api, lambda: ledger.request(ask(8, "u1"))) == ["get", "replace"]
    assert calls_of(api, lambda: ledger.request(ask(8, "u1"))) == ["get"]
    assert calls_of(api, lambda: ledger.request(ask(1, "u2"))) == ["get", "replace"]
    assert calls_of(api, lambda: ledger.request(ask(9, "u3"))) == ["get"], "what can never be had leaves no trace"
    assert calls_of(api, lambda: ledger.withdraw("nobody")) == ["get"]
    assert calls_of(api, lambda: ledger.release("nothing")) == ["get"]
    assert calls_of(api, ledger.snapshot) == ["get"]


def test_a_service_that_starts_looks_at_the_line_before_its_first_decision_and_not_in_it(api, ledger, monkeypatch):
    for number in range(100):
        ledger.request(ask(8, f"u{number}"))
    fresh, entries = service(api), []
    build = PendingQueues._build_entry
    monkeypatch.setattr(PendingQueues, "_build_entry", lambda *of: (entries.append(of), build(*of))[1])
    assert "replace" not in calls_of(api, fresh.build_indexes)
    assert len(entries) >= 99
    entries.clear()
    assert fresh.request(ask(1, "late")).position == 100
    assert 0 < len(entries) < 10


def test_asking_again_is_written_only_when_the_last_sign_of_life_is_old(api, ledger, clock):
    ledger.request(ask(8, "u1"))
    ledger.request(ask(1, "u2"))
    for _ in range(3):
        clock.advance(13)
        assert calls_of(api, lambda: ledger.request(ask(1, "u2"))) == ["get"]
    clock.advance(1)
    assert calls_of(api, lambda: ledger.request(ask(1, "u2"))) == ["get", "replace"]
    assert ledger.snapshot().pending[0].seen_at == clock.now


def test_a_write_stores_the_last_seen_times_of_all_requests_of_the_service(api, ledger, clock):
    for uid in ("u1", "u2", "u3", "u4"):
        ledger.request(ask(8, uid))
    clock.advance(30)
    for uid in ("u2", "u3"):
        ledger.request(ask(8, uid))
    clock.advance(10)
    ledger.request(ask(8, "u4"))
    ages = [(clock.now - one.seen_at).total_seconds() for one in ledger.snapshot().pending]
    assert ages == [10, 10, 0]


def test_a_request_seen_by_one_service_is_not_dropped_by_another(api, clock):
    one, other = service(api, clock), service(api, clock)
    holder = one.request(ask(8, "u1"))
    assert isinstance(holder, Admitted)
    one.request(ask(8, "u2"))
    for _ in range(10):
        clock.advance(30)
        one.request(ask(8, "u2"))
    one.release(holder.lease)
    assert deferral(other.request(ask(1, "u3"))) is AdmissionReason.BEHIND_EARLIER_REQUEST


def test_faster_service_is_noticed_and_the_decision_made_again(api, clock):
    one, other = service(api, clock), service(api, clock)
    one.snapshot()
    api.meanwhile = lambda: (setattr(api, "meanwhile", lambda: ""), other.request(ask(8, "u2")))[0] or ""
    assert deferral(one.request(ask(8, "u1"))) is AdmissionReason.WAITING_FOR_QUOTA
    assert [lease.request.uid for lease in one.snapshot().leases] == ["u2"]


def test_service_that_is_always_slower_says_so_and_grants_nothing(api, ledger):
    api.meanwhile = lambda: "conflict"
    with pytest.raises(StoreError, match=r"GPULedger tiphys/default was changed by others 16 times"):
        ledger.request(ask(8))
    api.meanwhile = lambda: ""
    assert ledger.snapshot().leases == ()


@pytest.mark.parametrize("fault", ["lost", "refused"])
def test_lease_whose_answer_was_lost_is_found_and_not_given_twice(api, ledger, clock, fault):
    fault_once(api, fault)
    with pytest.raises(StoreError):
        ledger.request(ask(4, "u1"))
    restarted = service(api, clock)
    for asked in (ledger, restarted, ledger):
        answer = asked.request(ask(4, "u1"))
        assert isinstance(answer, Admitted)
        assert answer.lease == ledger.snapshot().leases[0].id
    assert sum(lease.request.gpus for lease in ledger.snapshot().leases) == 4


def test_release_whose_answer_was_lost_frees_no_second_lease(api, ledger):
    first = ledger.request(ask(8, "u1"))
    assert isinstance(first, Admitted)
    fault_once(api, "lost")
    with pytest.raises(StoreError):
        ledger.release(first.lease)
    ledger.request(ask(8, "u2"))
    ledger.release(first.lease)
    assert [lease.request.uid for lease in ledger.snapshot().leases] == ["u2"]


def test_object_that_is_missing_at_the_start_is_made_and_limits_nothing():
    api = LedgerApi()
    assert isinstance(service(api).request(ask(1000)), Admitted)
    assert api.store.get(PLACE)["kind"] == GPU_LEDGERS.kind


def test_services_that_make_the_object_at_once_share_it(monkeypatch):
    api = LedgerApi()
    other = service(api)
    create = api.create

    def slower(*arguments):
        monkeypatch.setattr(api, "create", create)
        other.request(ask(8, "u2"))
        return create(*arguments)

    monkeypatch.setattr(api, "create", slower)
    one = service(api)
    one.request(ask(8, "u1"))
    assert len(one.snapshot().leases) == len(other.snapshot().leases) == 2


def test_account_that_may_not_make_the_object_reads_which_command_does(monkeypatch):
    api = LedgerApi()

    def forbidden(*_):
        raise ForbiddenError("cannot create resource gpuledgers")

    monkeypatch.setattr(api, "create", forbidden)
    with pytest.raises(StoreError, match=r"cannot create resource.*tiphys queues apply -f FILE -n tiphys.*chart"):
        service(api).snapshot()


def test_cluster_without_the_kind_is_pointed_to_the_chart():
    with serving() as server:
        server.unknown.add("gpuledgers")
        with pytest.raises(StoreError, match=r"install the chart of Tiphys, which brings the kind GPULedger"):
            KubernetesLedger(server.api("tiphys"), "tiphys").snapshot()


def test_object_that_is_deleted_while_in_use_is_not_begun_anew(api, ledger, clock):
    ledger.request(ask(8, "u1"))
    api.store.delete(PLACE, {})
    with pytest.raises(LedgerLostError, match=r"was deleted while leases were kept in it.*tiphys queues apply"):
        ledger.request(ask(8, "u2"))
    with pytest.raises(LedgerLostError, match="was deleted"):
        ledger.begin_recovery()
    api.create(GPU_LEDGERS, "tiphys", {"metadata": {"name": "default"}, "spec": spec(EIGHT)})
    with pytest.raises(LedgerLostError, match="is another object of the same name"):
        ledger.request(ask(8, "u2"))


def test_object_that_was_made_again_is_recovered_before_anything_is_granted(api, ledger):
    held = ledger.request(ask(8, "u1"))
    assert isinstance(held, Admitted)
    api.store.delete(PLACE, {})
    api.create(GPU_LEDGERS, "tiphys", {"metadata": {"name": "default"}, "spec": spec(EIGHT)})

    ledger.begin_recovery()

    meanwhile = ledger.request(ask(8, "u2"))
    assert isinstance(meanwhile, Deferred)
    assert meanwhile.reason is AdmissionReason.LEDGER_RECOVERING
    assert ledger.restore(held.lease, ask(8, "u1"), "A100") == 8
    ledger.end_recovery()
    assert isinstance(ledger.request(ask(8, "u2")), Deferred)
    assert [one.id for one in ledger.snapshot().leases] == [held.lease]


def test_object_without_queues_does_not_replace_one_with_queues(api, ledger):
    ledger.request(ask(8, "u1"))
    api.store.delete(PLACE, {})
    api.create(GPU_LEDGERS, "tiphys", {"metadata": {"name": "default"}})

    with pytest.raises(LedgerLostError, match="without queues"):
        ledger.begin_recovery()

    with pytest.raises(LedgerLostError):
        ledger.request(ask(8, "u2"))


def test_a_removed_status_is_not_an_empty_state(api, ledger):
    ledger.request(ask(8, "u1"))
    api.store._objects[PLACE] = {
        key: value for key, value in api.store.get(PLACE).items() if key != "status"
    }  # no write of the API does it, a restored backup may
    api.touch(PLACE)
    with pytest.raises(StoreError, match="has lost its status"):
        ledger.request(ask(8, "u2"))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ({}, "it has format None, and this Tiphys reads 7"),
        ({"leases": [], "waiting": []}, "it has format None, and this Tiphys reads 7"),
        ({"version": "7", "log": {"id": "a"}}, "it has format '7', and this Tiphys reads 7"),
        ({"version": 6, "leases": [], "waiting": [], "history": []}, "it has format 6, and this Tiphys reads 7"),
        ({"version": 8, "log": {"id": "a"}}, "it has format 8, and this Tiphys reads 7; upgrade Tiphys"),
        ({"version": 7, "leases": [], "waiting": []}, "log: KeyError"),
        ({"version": 7, "log": None}, "log: TypeError"),
        ({"version": 7, "log": {}}, "log: Field required"),
    ],
)
def test_damaged_status_is_refused_in_words(api, clock, damage, says):
    edit(api, "status", status=damage)
    ledger = service(api, clock)
    for ask_again in (lambda: ledger.request(ask(1)), ledger.begin_recovery):
        with pytest.raises(StoreError, match=rf"status of GPULedger tiphys/default is damaged: {says}.*kubectl edit"):
            ask_again()
    assert api.store.get(PLACE)["status"] == damage


def test_a_status_of_another_format_is_refused_by_a_service_that_knew_the_leases(api, ledger):
    ledger.request(ask(8, "u1"))
    log = api.store.get(PLACE)["status"]
    edit(api, "status", status={"version": 5, **encode_state(LedgerState())})
    for ask_again in (lambda: ledger.request(ask(8, "u2")), ledger.begin_recovery):
        with pytest.raises(StoreError, match=r"it has format 5.*Nothing is granted.*tiphys queues apply -f FILE -n ti"):
            ask_again()
    edit(api, "status", status=log)
    ledger.end_recovery()
    assert isinstance(ledger.request(ask(8, "u2")), Deferred)
    assert [one.request.uid for one in ledger.snapshot().leases] == ["u1"]


def with_lease(**changes) -> dict:
    status = ledger_status(LedgerState((Lease("one", ask(8), "A100", Clock().now, Clock().now),)))
    lease = status["log"]["entries"][0]["leases"][0]
    lease |= {**changes, "request": {**lease["request"], **changes.get("request", {})}}
    return status


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (with_lease(request={"gpus": "8"}), r"lease\.request\.gpus"),
        (with_lease(request={"gpus": -8}), r"lease\.request\.gpus"),
        (with_lease(request={"firstStart": float("nan")}), r"lease\.request\.firstStart"),
        (with_lease(grantedAt="2026-01-01T00:00:00"), r"lease\.grantedAt: .*timezone"),
        (with_lease(fence=3), r"lease\.fence: Unexpected keyword"),
        (with_lease(grantedAt="yesterday"), r"lease\.grantedAt"),
    ],
)
def test_lease_that_is_no_lease_is_refused(api, clock, status, says):
    edit(api, "status", status=status)
    with pytest.raises(StoreError, match=rf"the log of GPULedger tiphys/default is damaged: .*{says}.*No GPUs are gra"):
        service(api, clock).request(ask(1))


def test_edited_quota_counts_from_the_next_decision_on(api, ledger):
    assert isinstance(ledger.request(ask(4, "u1")), Admitted)
    edit(api, spec=spec(queues(research={"A100": 4})))
    assert deferral(ledger.request(ask(4, "u2"))) is AdmissionReason.WAITING_FOR_QUOTA
    edit(api, spec=spec(queues(research={"A100": 16})))
    assert isinstance(ledger.request(ask(4, "u2")), Admitted)
    edit(api, spec=spec(queues(nightly={"A100": 16})))
    assert isinstance(ledger.request(ask(4, "u3")), Rejected)


def test_quota_that_is_edited_during_a_decision_counts_for_it(api, ledger):
    def lowered() -> str:
        api.meanwhile = lambda: ""
        edit(api, spec=spec(queues(research={"A100": 4})))
        return ""

    api.meanwhile = lowered
    answer = ledger.request(ask(8))
    assert isinstance(answer, Rejected)


def test_spec_that_is_wrong_grants_nothing_new_and_keeps_what_is_held(api, ledger):
    first = ledger.request(ask(4, "u1"))
    edit(api, spec={"queues": [{"name": "research"}]})
    answer = ledger.request(ask(1, "u2"))
    assert isinstance(answer, Deferred)
    assert answer.reason is AdmissionReason.MISCONFIGURED
    assert "queues.0.gpus: Field required" in answer.message
    assert "tiphys queues apply -f FILE -n tiphys" in answer.message
    assert isinstance(first, Admitted)
    assert ledger.request(ask(4, "u1")) == Admitted(first.lease, "A100")
    ledger.release(first.lease)
    edit(api, spec=spec(EIGHT))
    assert isinstance(ledger.request(ask(8, "u3")), Deferred), "who asked meanwhile kept its place"
    assert isinstance(ledger.request(ask(1, "u2")), Admitted)


def test_full_ledger_admits_no_request_and_says_so(api, clock, monkeypatch):
    edit(api, spec={**spec(EIGHT), "ledger_share": 1})
    ledger = service(api, clock)
    ledger.request(ask(8, "u1"))
    ledger.request(ask(8, "u2"))
    monkeypatch.setattr(room, "ROOM_ENTRIES", 2)
    answer = ledger.request(ask(8, "u3"))
    assert isinstance(answer, Deferred)
    assert (answer.reason, answer.position) == (AdmissionReason.LEDGER_FULL, 2)
    assert "1 leases and 1 waiting requests are 2 of 2 entries" in answer.message
    assert [one.request.uid for one in ledger.snapshot().pending] == ["u2"]
    ledger.release(ledger.snapshot().leases[0].id)
    assert isinstance(ledger.request(ask(8, "u2")), Admitted), "there is room for the lease of who waits"


def test_status_has_a_stable_form_and_a_summary_for_people():
    book = LedgerState(
        (Lease("one", ask(8, priority=3), "A100", Clock().now, Clock().now),),
        (PendingRequest(ask(2, "u2", gpu_type=None, queue="nightly"), 4, Clock().now, Clock().now),),
    )
    stored = encode_state(book)
    assert decode_state(stored) == book
    assert ledger_status(book)["summary"] == {"leases": 1, "gpus": 8, "held": "research 8", "waiting": 1}
    assert stored["leases"][0]["grantedAt"] == "2026-01-01T00:00:00Z"
    assert tuple(stored["leases"][0]["request"][key] for key in ("gpuType", "priority")) == ("A100", 3)
    assert not {"gpuType", "priority", "minGpuMemoryMb"} & set(stored["waiting"][0]["request"])


@pytest.mark.parametrize(
    "changes",
    [{"priority": 1}, {"members": 2}, {"tensor_parallel": 2, "members": 2}, {"spot": "allowed"}, {"attained": 0.5}],
)
def test_a_lease_that_differs_from_the_default_in_one_field_reads_back(changes):
    book = LedgerState((Lease("one", ask(8, **changes), "A100", Clock().now, Clock().now),))
    assert decode_state(json.loads(json.dumps(encode_state(book)))) == book


def test_nodes_and_a_preemption_are_written_and_read():
    now = Clock().now
    gang = Lease("two", ask(8, "u2", members=2), "A100", now, now, nodes=("n1", "n2"))
    asked = Lease(
        "three", ask(8, "u3"), "A100", now, now, preemption=PreemptionNotice("u9", "fit", now, now, moves=True)
    )
    for lease in (gang, asked):
        stored = encode_state(LedgerState((lease,)))
        assert decode_state(json.loads(json.dumps(stored))) == LedgerState((lease,))


def test_write_on_an_old_version_is_refused_by_the_server_over_http():
    with serving() as server:
        api = server.api("tiphys")
        one, other = (ledger_object.LedgerObject(api, "tiphys", "default") for _ in range(2))
        old = one.read()
        lease = Lease("one", ask(8), "A100", Clock().now, Clock().now)
        other.write(other.read(), LedgerState((lease,)))
        with pytest.raises(ConflictError):
            one.write(old, LedgerState())
        assert one.read().state == LedgerState((lease,))


def test_entries_unchanged_by_another_service_stay_the_same_objects(api, clock):
    one, other = service(api, clock), service(api, clock)
    one.request(ask(4, "u1"))
    one.request(ask(8, "u2"))
    before = one.snapshot()
    other.request(ask(5, "u3"))
    other.request(ask(6, "u4"))
    after = one.snapshot()
    assert len(after.pending) == 3
    assert after.leases[0] is before.leases[0]
    assert after.pending[0] is before.pending[0]
    assert after.queues is before.queues, "much is remembered for these objects"
