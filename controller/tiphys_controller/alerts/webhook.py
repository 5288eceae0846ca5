"""Takes alerts in: once each is in storage its sender may forget it, and whoever leads acts on it.

The webhook payload of Alertmanager, version 4 (Prometheus, ``alertmanager/template``), as far as it is read.
"""

import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import structlog
from pydantic import BaseModel, Field, ValidationError, field_validator

from tiphys.errors import ObjectExistsError, UsageError
from tiphys.records import AlertRecord, AlertStatus
from tiphys.store import Store
from tiphys.store.layout import alert_key
from tiphys.store.runs import concurrently

MOST_ALERTS = 1000
_FINGERPRINT = re.compile(r"[0-9a-f]{1,64}")
_LONGEST_TEXT = 500


class Alert(BaseModel):
    """One alert of a delivery."""

    status: AlertStatus
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    starts_at: str = Field(alias="startsAt", max_length=64)
    fingerprint: str

    @field_validator("fingerprint")
    @classmethod
    def _is_hex(cls, value: str) -> str:
        if not _FINGERPRINT.fullmatch(value):
            raise ValueError("a fingerprint is up to 64 hexadecimal digits")
        return value

    @property
    def id(self) -> str:
        """The same for each delivery of it. A start is named by the sender's text: clocks need not agree."""
        return hashlib.sha256(f"{self.fingerprint}\n{self.starts_at}".encode()).hexdigest()[:32]

    def record(self) -> AlertRecord:
        """What is kept of it."""
        return AlertRecord(
            name=self.labels.get("alertname", ""),
            status=self.status,
            fingerprint=self.fingerprint,
            starts_at=self.starts_at,
            labels={name[:_LONGEST_TEXT]: value[:_LONGEST_TEXT] for name, value in self.labels.items()},
            summary=(self.annotations.get("summary") or self.annotations.get("description", ""))[:_LONGEST_TEXT],
        )


class Delivery(BaseModel):
    """One call of the webhook. Labels common to its alerts are those of each alert, too."""

    version: Literal["4"]
    alerts: list[Alert] = Field(max_length=MOST_ALERTS)


def parse(document: object) -> Delivery:
    """Read the body of a call.

    Raises:
        UsageError: it is none, and where.
    """
    if isinstance(document, Mapping) and document.get("version") not in ("4", None):
        raise UsageError(f"the payload has version {document['version']!r}; this reads version 4 of Alertmanager's")
    try:
        return Delivery.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the document"
        raise UsageError(f"this is no webhook payload of Alertmanager: {where}: {first['msg']}") from error


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
