"""GPU quotas: who may hold how many GPUs, decided before any pod exists."""

from tiphys_plugin.ledger.elastic import asked_for
from tiphys_plugin.ledger.model import (
    Admission,
    AdmissionBackend,
    Admitted,
    Deferred,
    Lease,
    LeaseRequest,
    Reason,
    Rejected,
    Snapshot,
    Waiting,
)

__all__ = [
    "Admission",
    "AdmissionBackend",
    "Admitted",
    "Deferred",
    "Lease",
    "LeaseRequest",
    "Reason",
    "Rejected",
    "Snapshot",
    "Waiting",
    "asked_for",
]
