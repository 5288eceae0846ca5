"""Receives alerts from Alertmanager and stores them.

A delivery is acknowledged once its alerts are in storage, so Alertmanager may
forget them; the leader acts on them later. Parses the webhook payload of
Alertmanager, version 4 (Prometheus, ``alertmanager/template``).
"""

import hashlib
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import structlog
from cachetools import FIFOCache
from pydantic import BaseModel, Field, ValidationError, field_validator

from tiphys.errors import ObjectExistsError, UsageError
from tiphys.records import AlertRecord, AlertStatus
from tiphys.store import Store
from tiphys.store.layout import alert_key
from tiphys.store.runs import read_concurrently

MAX_ALERTS_PER_DELIVERY = 1000
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
        """Id that all deliveries of an alert share. The start is hashed as text, so that clocks need not agree."""
        return hashlib.sha256(f"{self.fingerprint}\n{self.starts_at}".encode()).hexdigest()[:32]

    def to_record(self) -> AlertRecord:
        """The stored form of the alert."""
        return AlertRecord(
            name=self.labels.get("alertname", ""),
            status=self.status,
            fingerprint=self.fingerprint,
            starts_at=self.starts_at,
            labels={name[:_LONGEST_TEXT]: value[:_LONGEST_TEXT] for name, value in self.labels.items()},
            summary=(self.annotations.get("summary") or self.annotations.get("description", ""))[:_LONGEST_TEXT],
        )


class AlertDelivery(BaseModel):
    """One call of the webhook. Each alert repeats the common labels."""

    version: Literal["4"]
    alerts: list[Alert] = Field(max_length=MAX_ALERTS_PER_DELIVERY)


def parse_delivery(document: object) -> AlertDelivery:
    """Parse the body of a webhook call.

    Raises:
        UsageError: the body is not a payload of version 4; the message names the field.
    """
    if isinstance(document, Mapping) and document.get("version") not in ("4", None):
        raise UsageError(
            f"the webhook payload has version {document['version']!r}; only Alertmanager's version 4 is supported"
        )
    try:
        return AlertDelivery.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the document"
        raise UsageError(f"the body is not a webhook payload of Alertmanager: {where}: {first['msg']}") from error


_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_REMEMBERED_ALERTS = 10_000
_log = structlog.get_logger()


class DeliveryReceipt(NamedTuple):
    """Numbers of alerts that are stored, and that match no served namespace."""

    accepted: int
    unmatched: int


class AlertInbox:
    """Stores alerts below ``alerts/`` of their tenant. Thread-safe.

    ``namespaces`` are those that are served; None for all.
    """

    def __init__(self, stores: Callable[[str], Store], namespaces: tuple[str, ...] | None) -> None:
        self._stores = stores
        self._namespaces = namespaces
        self._already_stored: FIFOCache[tuple[str, str, str], None] = FIFOCache(_REMEMBERED_ALERTS)
        self._lock = threading.Lock()
        self.arrived = threading.Event()
        """Set when a new alert was stored."""

    def store_delivery(self, delivery: AlertDelivery) -> DeliveryReceipt:
        """Store every alert of a delivery.

        Raises:
            StoreError: an alert could not be stored; Alertmanager must repeat the delivery, which is idempotent.
        """
        accepted = [(namespace, alert) for alert in delivery.alerts if (namespace := self.find_tenant(alert.labels))]
        read_concurrently(lambda item: self._store_alert(*item), self._select_new(accepted))
        return DeliveryReceipt(len(accepted), len(delivery.alerts) - len(accepted))

    def find_tenant(self, labels: dict[str, str]) -> str:
        """Namespace of an alert: its label, or the only served one; empty if the namespace is not served."""
        label = labels.get("namespace", "")
        if self._namespaces is None:
            return label if _NAMESPACE.fullmatch(label) else ""
        if label in self._namespaces:
            return label
        return self._namespaces[0] if len(self._namespaces) == 1 and not label else ""

    def _select_new(self, accepted: Sequence[tuple[str, Alert]]) -> list[tuple[str, Alert]]:
        with self._lock:
            return [
                (where, alert)
                for where, alert in accepted
                if (where, alert.id, alert.status) not in self._already_stored
            ]

    def _store_alert(self, namespace: str, alert: Alert) -> None:
        try:
            self._stores(namespace).create(alert_key(alert.id, alert.status), alert.to_record().to_bytes())
        except ObjectExistsError:
            pass  # it was delivered before
        else:
            _log.info("alert.taken", namespace=namespace, alert=alert.id, name=alert.labels.get("alertname", ""))
            self.arrived.set()
        with self._lock:
            self._already_stored[namespace, alert.id, alert.status] = None
