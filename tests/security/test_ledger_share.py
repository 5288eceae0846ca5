"""The GPU ledger is one object of limited size: no namespace can fill it for the others.

| a namespace                                  | its request                          | requests of others |
|----------------------------------------------|--------------------------------------|--------------------|
| with long names of nodes                     | takes no more room than any other    | go on              |
| has used its share                           | a new one is deferred, with a reason | go on              |
| has used its share, and asks again           | keeps its lease and its place        | go on              |
| has used its share, and GPUs come free       | who waits in the ledger gets them    | go on              |
| has room again                               | a new one is taken                   | go on              |
| is alone, and `ledger_share` is 1            | may use all of the room              |                    |
"""

import json
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from support.kube_store import Collection, Place
from support.ledger import LedgerApi, ask, lease, ledger_api, waiting
from support.world import Clock
from tiphys_plugin.quota.lease import AdmissionReason, Admitted, Deferred, PreemptionNotice
from tiphys_plugin.quota.ledger import room
from tiphys_plugin.quota.ledger.kubernetes_ledger import KubernetesLedger
from tiphys_plugin.quota.ledger.state import LedgerState
from tiphys_plugin.quota.ledger.status_codec import encode_status
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.runtime.metrics import LedgerCollector

PLACE = Place(Collection("tiphys.dev", "gpuledgers"), "tiphys", "default")
SHARE = 0.02


def queues(**settings: Any) -> Queues:
    settings = {"ledger_share": SHARE, **settings}
    return Queues.model_validate({"queues": [{"name": "research", "gpus": {"A100": 8}}], **settings})


def service(api: LedgerApi) -> KubernetesLedger:
    return KubernetesLedger(api, "tiphys", clock=Clock(), pause=lambda _: None)


@pytest.fixture
def api() -> LedgerApi:
    return ledger_api(queues())


@pytest.fixture
def ledger(api: LedgerApi) -> KubernetesLedger:
    return service(api)


def fill(ledger: KubernetesLedger, namespace: str = "vision", most: int = 500) -> Deferred:
    """New requests until one is deferred because of the share; its answer."""
    for number in count():
        answer = ledger.request(ask(4, f"{namespace}-{number}", namespace=namespace))
        if isinstance(answer, Deferred) and answer.reason is AdmissionReason.LEDGER_SHARE_EXCEEDED:
            return answer
        assert number < most, "nothing stops it"
    raise AssertionError


def kept_bytes(api: LedgerApi, namespace: str) -> int:
    status = api.store.get(PLACE)["status"]
    entries = [one for one in (*status["leases"], *status["waiting"]) if one["namespace"] == namespace]
    return sum(len(json.dumps(one, separators=(",", ":"))) for one in entries)


def test_a_long_name_of_a_node_takes_no_more_room_than_a_short_one(ledger, api):
    ledger.request(ask(8, "short-00"))
    short = kept_bytes(api, "ml")
    for number in range(10):
        name = f"wf-{number}.sweep(0:{'x' * 5000})"
        node = f"{name}[0].attempts(0)[0].admit"
        ledger.request(ask(8, f"long-{number:03}", node=node, instance=name, namespace="vision"))
    assert kept_bytes(api, "vision") < 12 * short
    assert "xxx" not in json.dumps(api.store.get(PLACE))


def test_a_namespace_that_has_used_its_share_waits_and_the_others_go_on(ledger, api):
    refused = fill(ledger)
    assert "namespace vision" in refused.message
    assert "share of the GPU ledger" in refused.message
    pending = len(ledger.snapshot().pending)
    assert refused.position == pending + 1
    assert kept_bytes(api, "vision") <= SHARE * room.ROOM_BYTES
    for number in range(10):
        answer = ledger.request(ask(1, f"ml-{number}"))
        assert isinstance(answer, Deferred)
        assert answer.reason is AdmissionReason.WAITING_FOR_QUOTA
    assert len(ledger.snapshot().pending) == pending + 10
    for one in ledger.snapshot().leases:
        ledger.release(one.id)
    for uid in {one.request.uid for one in ledger.snapshot().pending if one.request.namespace == "vision"}:
        ledger.withdraw(uid)
    assert isinstance(ledger.request(ask(1, "ml-0")), Admitted)


def test_who_is_in_the_ledger_keeps_lease_and_place_and_gets_its_turn(ledger):
    fill(ledger)
    before = ledger.snapshot()
    held = ledger.request(before.leases[0].request)
    assert isinstance(held, Admitted)
    first = before.pending[0].request
    waits = ledger.request(first)
    assert isinstance(waits, Deferred)
    assert (waits.reason, waits.position) == (AdmissionReason.WAITING_FOR_QUOTA, 1)
    ledger.release(held.lease)
    assert isinstance(ledger.request(first), Admitted), "a lease in the place of a request takes no new room"
    new = ledger.request(ask(4, "vision-new", namespace="vision"))
    assert isinstance(new, Deferred)
    assert new.reason is not AdmissionReason.LEDGER_SHARE_EXCEEDED, "one has gone, so there is room for one"


def test_the_share_counts_over_all_services(api):
    fill(service(api))
    refused = service(api).request(ask(1, "vision-late", namespace="vision"))
    assert isinstance(refused, Deferred)
    assert refused.reason is AdmissionReason.LEDGER_SHARE_EXCEEDED


@pytest.mark.parametrize("declared", [None, queues(ledger_share=0.25)])
def test_a_quarter_is_the_default_also_without_queues(declared):
    book = LedgerState(tuple(lease(8, f"u{number:05}", namespace="vision") for number in range(400)))
    part = room.measure_shares(None if declared is None else Queues(queues=declared.queues), book)["vision"]
    assert part == pytest.approx(4 * room.measure_shares(queues(ledger_share=1), book)["vision"])


def test_one_namespace_alone_may_be_given_all_of_the_room():
    ledger = service(ledger_api(queues(ledger_share=1)))
    for number in range(100):
        answer = ledger.request(ask(4, f"u{number}"))
        assert isinstance(answer, Admitted) or answer.reason is not AdmissionReason.LEDGER_SHARE_EXCEEDED


def test_the_share_of_each_namespace_is_a_metric(ledger):
    fill(ledger)
    ledger.request(ask(1, "ml-0"))
    registry = CollectorRegistry()
    registry.register(LedgerCollector(ledger.snapshot, measures_room=True))
    lines = dict(line.rsplit(" ", 1) for line in generate_latest(registry).decode().splitlines() if line[0] != "#")
    assert 0.9 < float(lines['tiphys_ledger_share_used{tenant="vision"}']) <= 1
    assert 0 < float(lines['tiphys_ledger_share_used{tenant="ml"}']) < 0.1
    assert 0.9 * SHARE < float(lines["tiphys_ledger_room_used"]) < 1.2 * SHARE


LATE = datetime(2026, 11, 22, 13, 14, 15, 161718, tzinfo=UTC)
names = st.text("abc-.", min_size=1, max_size=60)


@given(uid=names, step=names, workflow=names, members=st.integers(1, 20), gpu_type=st.sampled_from([None, "A100"]))
def test_an_entry_is_counted_with_at_least_its_bytes(uid, step, workflow, members, gpu_type):
    fields = {"step": step, "workflow": workflow, "members": members, "gpu_type": gpu_type, "min_members": 1}
    fields |= {"spot": "allowed", "attained": 1.123456789, "first_start": 1767225600.123456, "seconds": 10**9}
    notice = PreemptionNotice(uid, step, LATE, LATE, keeps=members) if members % 2 else None
    held = replace(lease(20, uid, **fields), nodes=(workflow,) * members, preemption=notice, granted_at=LATE)
    waits = replace(waiting(20, 10**6, uid, **fields), seen_at=LATE, promised_at=LATE if members % 2 else None)
    for state in (LedgerState((held,)), LedgerState((), (waits,))):
        status = encode_status(state)
        [entry] = [*status["leases"], *status["waiting"]]
        actual = len(json.dumps(entry, separators=(",", ":")))
        assert actual < room.measure_namespaces(state)["ml"] <= actual + 100
