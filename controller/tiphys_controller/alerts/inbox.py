"""Takes alerts in: once each is in storage its sender may forget it, and whoever leads acts on it."""

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import structlog

from tiphys.errors import ObjectExistsError
from tiphys.store import Store
from tiphys.store.layout import alert_key
from tiphys.store.runs import concurrently
from tiphys_controller.alerts.payload import Alert, Delivery

_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_REMEMBERED = 10_000
_log = structlog.get_logger()


class Taken(NamedTuple):
    """How many alerts of a delivery were stored now or before, and how many belong to no tenant here."""

    accepted: int
    unmatched: int


class Inbox:
    """Stores alerts below ``alerts/`` of their tenant. Thread-safe.

    Args:
        stores: Store of a namespace.
        namespaces: Those that are served; None for all.
    """

    def __init__(self, stores: Callable[[str], Store], namespaces: tuple[str, ...] | None) -> None:
        self._stores = stores
        self._namespaces = namespaces
        self._seen: OrderedDict[tuple[str, str, str], None] = OrderedDict()
        self._lock = threading.Lock()
        self.arrived = threading.Event()
        """Set when something new was stored."""

    def take(self, delivery: Delivery) -> Taken:
        """Store every alert of a delivery.

        Raises:
            StoreError: not all of them could be; the sender has to come again, which does no harm.
        """
        places = [(namespace, alert) for alert in delivery.alerts if (namespace := self.tenant(alert.labels))]
        concurrently(lambda place: self._keep(*place), self._new(places))
        return Taken(len(places), len(delivery.alerts) - len(places))

    def tenant(self, labels: dict[str, str]) -> str:
        """Namespace of an alert: its label, or the only one that there is; empty if that is not served."""
        named = labels.get("namespace", "")
        if self._namespaces is None:
            return named if _NAMESPACE.fullmatch(named) else ""
        if named in self._namespaces:
            return named
        return self._namespaces[0] if len(self._namespaces) == 1 and not named else ""

    def _new(self, places: Sequence[tuple[str, Alert]]) -> list[tuple[str, Alert]]:
        with self._lock:
            return [(where, alert) for where, alert in places if (where, alert.id, alert.status) not in self._seen]

    def _keep(self, namespace: str, alert: Alert) -> None:
        try:
            self._stores(namespace).create(alert_key(alert.id, alert.status), alert.record().to_bytes())
        except ObjectExistsError:
            pass  # it was delivered before
        else:
            _log.info("alert.taken", namespace=namespace, alert=alert.id, name=alert.labels.get("alertname", ""))
            self.arrived.set()
        with self._lock:
            self._seen[namespace, alert.id, alert.status] = None
            while len(self._seen) > _REMEMBERED:
                self._seen.popitem(last=False)
