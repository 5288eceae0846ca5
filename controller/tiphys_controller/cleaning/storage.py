"""What storage keeps and nobody needs: uploads that died, and alerts that were done with long ago."""

from collections.abc import Iterator
from datetime import datetime, timedelta

from tiphys.errors import ObjectMissingError
from tiphys.records import AlertDone
from tiphys.store import Store, read_record
from tiphys.store.layout import ALERTS, alert_key, parse_alert
from tiphys.store.leftovers import leftovers
from tiphys_controller.cleaning.ages import in_words
from tiphys_controller.cleaning.found import Found, What

UPLOADS = timedelta(days=1)
ALERTS_DONE = timedelta(days=7)


def litter(store: Store, now: datetime) -> Iterator[Found]:
    """Everything of a store that may go.

    The age of an upload is told by the clock of the store, that of an alert by
    the clock of whoever was done with it.

    Raises:
        StoreError: storage is out of reach.
        IntegrityError: the record of an alert is damaged.
    """
    for left in leftovers(store, UPLOADS):
        why = f"begun {in_words(left.age)} ago and never finished"
        yield Found(What.UPLOAD, store.url, left.name, why, left.remove)
    for alert, keys, done in _done_alerts(store):
        if (age := now - done.written_at) > ALERTS_DONE:
            why = f"done with {in_words(age)} ago ({done.outcome})"
            yield Found(What.ALERT, store.url, alert, why, _Removal(store, keys))


class _Removal:
    """Removes the records of an alert. What says that it is done goes last: without it, it would be done again."""

    def __init__(self, store: Store, keys: list[str]) -> None:
        self._store = store
        self._keys = sorted(keys, key=lambda one: one.endswith("/done.json"))

    def __call__(self) -> None:
        for key in self._keys:
            self._store.delete(key)


def _done_alerts(store: Store) -> Iterator[tuple[str, list[str], AlertDone]]:
    kept: dict[str, list[str]] = {}
    for info in store.list(ALERTS):
        if (place := parse_alert(info.key)) is not None:
            kept.setdefault(place[0], []).append(info.key)
    for alert, keys in kept.items():
        if alert_key(alert, "done") not in keys:
            continue
        try:
            yield alert, keys, read_record(store, alert_key(alert, "done"), AlertDone)
        except ObjectMissingError:
            continue
