"""The webhook payload of Alertmanager, version 4 (Prometheus, ``alertmanager/template``), as far as it is read."""

import hashlib
import re
from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, Field, ValidationError, field_validator

from tiphys.errors import UsageError
from tiphys.records import AlertRecord, AlertStatus

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
