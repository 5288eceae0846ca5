"""Requests, leases and queues for tests of admission."""

from datetime import UTC, datetime
from typing import Any

from tiphys_plugin.ledger import Lease, LeaseRequest, Waiting
from tiphys_plugin.queues import Queues

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def queues(inventory: dict[str, dict[str, int]] | None = None, **quotas: dict[str, int]) -> Queues:
    """``queues(research={"A100": 8})``."""
    document = {"queues": [{"name": name, "gpus": gpus} for name, gpus in quotas.items()], "inventory": inventory}
    return Queues.model_validate(document)


def ask(gpus: int, uid: str = "u1", step: str = "fit", **changes: Any) -> LeaseRequest:
    given = {
        "uid": uid,
        "step": step,
        "node": f"{uid}.{step}[0].attempts(0)[0].admit",
        "namespace": "ml",
        "workflow": f"wf-{uid}",
        "instance": f"wf-{uid}.{step}",
        "run": f"run-{uid}",
        "attempt": 1,
        "queue": "research",
        "gpus": gpus,
        "gpu_type": "A100",
        **changes,
    }
    return LeaseRequest(**given)


def lease(gpus: int, uid: str = "holder", pool: str = "A100", **changes: Any) -> Lease:
    request = ask(gpus, uid, **changes)
    return Lease(f"lease-{uid}", request, pool, NOW, NOW)


def waiting(gpus: int, arrival: int, uid: str = "", **changes: Any) -> Waiting:
    return Waiting(ask(gpus, uid or f"waiter-{arrival}", **changes), arrival, NOW, NOW)
