"""The room of the GPU ledger is limited: no namespace can fill it for the others.

| a namespace                                  | its request                          | requests of others |
|----------------------------------------------|--------------------------------------|--------------------|
| with long names of nodes                     | has only hashes of them stored       | go on              |
| has used its share                           | a new one is deferred, with a reason | go on              |
| has used its share, and asks again           | keeps its lease and its place        | go on              |
| has used its share, and GPUs come free       | who waits in the ledger gets them    | go on              |
| has room again                               | a new one is taken                   | go on              |
| is alone, and `ledger_share` is 1            | may use all of the room              |                    |
"""

import json
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from support.builders.ledger import LedgerApi, ask, lease, ledger_api
from support.stories.plugin import Clock
from tiphys_plugin.quota.lease import AdmissionReason, Admitted, Deferred, LedgerState
from tiphys_plugin.quota.ledger import room
from tiphys_plugin.quota.ledger.kubernetes_ledger import KubernetesLedger
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.runtime.metrics import LedgerCollector

from tiphys.kube.whole_ledger import WholeLedgerReader

SHARE = 0.0005


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


def kept(api: LedgerApi) -> list[dict[str, Any]]:
    ledger = WholeLedgerReader(api, "tiphys", "default").read()
    assert ledger is not None
    return [*ledger["status"]["leases"], *ledger["status"]["waiting"]]


def test_a_long_name_of_a_node_takes_no_more_room_than_a_short_one(ledger, api):
    ledger.request(ask(8, "short-00"))
    for number in range(10):
        name = f"wf-{number}.sweep(0:{'x' * 5000})"
        node = f"{name}(0).admit"
        ledger.request(ask(8, f"long-{number:03}", node=node, instance=name, namespace="vision"))
    assert len(kept(api)) == 11
    assert "xxx" not in json.dumps(kept(api))


def test_a_namespace_that_has_used_its_share_waits_and_the_others_go_on(ledger, api):
    ledger.request(ask(8, "ml-first"))
    refused = fill(ledger)
    assert "namespace vision" in refused.message
    assert "share of the GPU ledger" in refused.message
    pending = len(ledger.snapshot().pending)
    assert refused.position == pending + 1
    assert sum(one["request"]["namespace"] == "vision" for one in kept(api)) == SHARE * room.ROOM_ENTRIES
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


def test_a_namespace_keeps_its_leases_and_requests_in_a_full_ledger(ledger):
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
    part = room.measure_shares(replace(book, queues=declared and Queues(queues=declared.queues)))["vision"]
    assert part == pytest.approx(4 * room.measure_shares(replace(book, queues=queues(ledger_share=1)))["vision"])


def test_a_namespace_alone_may_be_given_the_whole_ledger():
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
