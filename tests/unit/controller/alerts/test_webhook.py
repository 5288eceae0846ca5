import pytest
from support.fakes.memory_store import MemoryStore
from tiphys_controller.alerts.webhook import AlertInbox, parse_delivery

from tiphys.errors import StoreError
from tiphys.store.layout import alert_key

ALERT = {
    "status": "firing",
    "labels": {"alertname": "RunFailed", "namespace": "ml"},
    "startsAt": "2026-05-04T11:00:00Z",
    "fingerprint": "ab",
}
DELIVERY = parse_delivery({"version": "4", "alerts": [ALERT]})
KEY = alert_key(DELIVERY.alerts[0].id, "firing")


class FailingStore(MemoryStore):
    """Does not store anything while it is out of reach."""

    out_of_reach = True
    creations = 0

    def create(self, key, data, *, sha256=None):
        self.creations += 1
        if self.out_of_reach:
            raise StoreError("storage did not answer")
        super().create(key, data)


def test_an_alert_that_could_not_be_stored_is_stored_by_its_next_delivery() -> None:
    store = FailingStore()
    inbox = AlertInbox(lambda _: store, ("ml",))
    with pytest.raises(StoreError):
        inbox.store_delivery(DELIVERY)
    assert not inbox.arrived.is_set()

    store.out_of_reach = False
    assert inbox.store_delivery(DELIVERY).accepted == 1

    assert KEY in store.objects
    assert inbox.arrived.is_set()


def test_a_stored_alert_costs_its_repetitions_no_request() -> None:
    store = FailingStore()
    store.out_of_reach = False
    inbox = AlertInbox(lambda _: store, ("ml",))
    for _ in range(3):
        assert inbox.store_delivery(DELIVERY).accepted == 1
    assert (store.creations, list(store.objects)) == (1, [KEY])
