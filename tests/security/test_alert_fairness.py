"""Thousands of alerts of one tenant delay the others by a turn, and cost no memory.

| one tenant has | another tenant's alert |
|---|---|
| 1,000 pending alerts | is handled in the same round as the first of them |
| alerts that must wait | these do not keep those behind them from being handled |
| 10,000 handled alerts | a turn lists 2,000 objects of them, and the next one goes on there |
| a store that does not answer | is handled; the worker does not spin |
"""

import hashlib

import pytest
from support.fakes.counting_store import CountingStore
from support.fakes.memory_store import MemoryStore
from tiphys_controller.alerts.webhook import AlertInbox, parse_delivery
from tiphys_controller.kubernetes.alert_worker import AlertSweep, AlertWorker
from tiphys_controller.kubernetes.metrics import ControllerMetrics
from tiphys_controller.kubernetes.watch_cache import WatchCache

from tiphys.store.layout import alert_key

BEGIN = "2026-05-04T11:00:00Z"


class Tenants:
    """The stores of two tenants, and the alert worker of a controller that leads."""

    def __init__(self) -> None:
        self.stores = {"ml": MemoryStore(), "vision": MemoryStore()}
        self.metrics = ControllerMetrics()
        self.inbox = AlertInbox(self.stores.__getitem__, tuple(self.stores))
        self.worker = AlertWorker(
            self.inbox,
            {},
            None,  # type: ignore[arg-type]  # no alert here names a run, so none is attended to
            self.stores.__getitem__,
            WatchCache(),
            None,  # type: ignore[arg-type]
            self.metrics,
            lambda: list(self.stores),
        )

    def deliver(self, namespace: str, count: int) -> None:
        for first in range(0, count, 1000):
            alerts = [
                {
                    "status": "firing",
                    "labels": {"alertname": "RunFailed", "namespace": namespace},
                    "startsAt": BEGIN,
                    "fingerprint": f"{number:x}",
                }
                for number in range(first, min(first + 1000, count))
            ]
            self.inbox.store_delivery(parse_delivery({"version": "4", "alerts": alerts}))

    def count_done(self, namespace: str) -> int:
        return sum(key.endswith("/result.json") for key in self.stores[namespace].objects)


@pytest.fixture
def tenants() -> Tenants:
    return Tenants()


def test_alerts_of_one_tenant_do_not_delay_another(tenants: Tenants) -> None:
    tenants.deliver("ml", 1000)
    tenants.deliver("vision", 1)
    tenants.worker.run_round()
    assert tenants.count_done("vision") == 1
    assert 0 < tenants.count_done("ml") <= 20
    assert tenants.worker.has_backlog


def test_every_alert_is_handled_in_the_end_and_none_is_kept_in_memory(tenants: Tenants) -> None:
    tenants.deliver("ml", 500)
    rounds = 0
    while tenants.worker.run_round() or tenants.worker.has_backlog:
        rounds += 1
        assert rounds < 100
    assert tenants.count_done("ml") == 500
    assert not tenants.worker.has_backlog
    assert tenants.worker._sweeps == {"ml": AlertSweep(), "vision": AlertSweep()}


def ids(count: int) -> list[str]:
    return sorted(hashlib.sha256(str(number).encode()).hexdigest()[:32] for number in range(count))


def found(sweep: AlertSweep, store: MemoryStore | CountingStore) -> list[str]:
    """Ids of the alerts of the next turn."""
    return sorted(sweep.find_next_pending(store))


def test_waiting_alerts_do_not_hold_up_those_behind_them() -> None:
    alerts = ids(50)
    store = MemoryStore({alert_key(alert, "firing"): b"{}" for alert in alerts})
    sweep = AlertSweep()
    assert found(sweep, store) == alerts[:20]
    sweep.count_waiting(20)
    assert found(sweep, store) == alerts[20:40]
    sweep.count_waiting(5)
    assert found(sweep, store) == alerts[40:]
    sweep.count_waiting(0)
    assert (sweep.waiting, sweep.waited) == (0, 25)
    assert found(sweep, store) == alerts[:20]


def test_turn_lists_a_limited_number_of_handled_alerts() -> None:
    alerts = ids(5000)
    store = MemoryStore({alert_key(alert, kind): b"{}" for alert in alerts for kind in ("firing", "result")})
    pending = "ff" * 16
    store.objects[alert_key(pending, "firing")] = b"{}"
    sweep, turns = AlertSweep(), 0
    reached = [sweep.after]
    while not (news := found(sweep, store)):
        assert sweep.after > reached[-1]
        reached.append(sweep.after)
        turns += 1
    assert news == [pending]
    assert 5 <= turns <= 20


def test_foreign_keys_below_alerts_cannot_stop_the_sweep() -> None:
    """Keys that are of no alert, before, between and behind the alerts."""
    alerts = ids(30)
    junk = [
        "alerts/",
        "alerts/!",
        "alerts/00",
        "alerts/7f/x/y",
        "alerts/zz/firing.json",
        *(f"alerts/80/{n}" for n in range(3000)),
    ]
    store = MemoryStore({**{alert_key(alert, "firing"): b"{}" for alert in alerts}, **dict.fromkeys(junk, b"")})
    sweep, seen = AlertSweep(), set[str]()
    for _ in range(20):
        seen |= set(found(sweep, store))
        if not sweep.after:
            break
    assert (seen, sweep.after) == (set(alerts), "")


def test_few_alerts_cost_one_listing() -> None:
    store = CountingStore(MemoryStore({alert_key(alert, "firing"): b"{}" for alert in ids(5)}))
    assert len(found(AlertSweep(), store)) == 5
    assert store.requests == {"list": 1}


def test_store_that_is_away_delays_no_other_and_is_not_asked_without_a_pause(tenants: Tenants) -> None:
    tenants.deliver("ml", 100)
    tenants.worker.run_round()
    tenants.stores["ml"].refuses = lambda *_: True
    tenants.deliver("vision", 1)
    tenants.worker.run_round()
    assert tenants.count_done("vision") == 1
    assert not tenants.worker.has_backlog
    tenants.stores["ml"].refuses = lambda *_: False
    while tenants.worker.run_round() or tenants.worker.has_backlog:
        pass
    assert tenants.count_done("ml") == 100
