"""Whether the service can work for each of its tenants, looked at in the background.

A probe must not wait for a store that hangs, and one tenant's broken store must
not take the service away from the others. So readiness only tells what was seen
last; `tiphys doctor --cluster` and the metrics read it.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from types import TracebackType
from typing import Any

import structlog
from prometheus_client import Gauge

from tiphys.errors import TiphysError, UsageError
from tiphys.records import utc_now
from tiphys_plugin.queues import Misconfigured
from tiphys_plugin.tenants import Tenants

_EVERY_SECONDS = 30.0
_AT_ONCE = 8
_log = structlog.get_logger()


class TenantChecks:
    """Looks at ledger and stores every ``every_seconds`` between ``__enter__`` and ``__exit__``."""

    def __init__(
        self, tenants: Tenants, every_seconds: float = _EVERY_SECONDS, clock: Callable[[], datetime] = utc_now
    ) -> None:
        self._tenants = tenants
        self._every = every_seconds
        self._clock = clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tiphys-checks", daemon=True)
        self._pool = ThreadPoolExecutor(_AT_ONCE, "tiphys-check")
        self._ledger = ""
        self._stores: dict[str, str] = {}
        self._checked_at = ""
        self._up = Gauge(
            "tiphys_store_up",
            "Whether the store of a tenant answered when it was last looked at.",
            ("tenant",),
            registry=tenants.registry,
        )

    def __enter__(self) -> "TenantChecks":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def state(self) -> dict[str, Any]:
        """What was seen last, as JSON. ``status`` is ``ok``, ``degraded``, or ``unknown`` before the first look."""
        stores = dict(self._stores)
        broken = self._ledger or any(stores.values())
        return {
            "status": "unknown" if not self._checked_at else "degraded" if broken else "ok",
            "checked_at": self._checked_at,
            "cluster": self._tenants.cluster.name,
            "ledger": {"error": self._ledger},
            "tenants": [
                {"namespace": name, "store": self._tenants.stores.url(name), "error": stores.get(name, "")}
                for name in self._tenants.known
            ],
        }

    def look(self) -> None:
        """Look at all of them once."""
        self._ledger = _error_of(self._read_ledger)
        known = self._tenants.known
        for namespace, error in zip(known, self._pool.map(self._store_error, known), strict=True):
            if error and error != self._stores.get(namespace):
                _log.error("tenant.store_unavailable", namespace=namespace, error=error)
            self._stores[namespace] = error
            self._up.labels(tenant=namespace).set(0 if error else 1)
        self._checked_at = self._clock().isoformat(timespec="seconds")

    def _read_ledger(self) -> None:
        queues = self._tenants.ledger.snapshot().queues
        if isinstance(queues, Misconfigured):
            raise UsageError(queues.why)

    def _store_error(self, namespace: str) -> str:
        return _error_of(lambda: self._tenants.core(namespace).check_store())

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.look()
            except Exception:  # noqa: BLE001  the worker loop: what it tells must not grow old in silence
                if not self._stop.is_set():
                    _log.exception("checks.crashed")
            self._stop.wait(self._every)


def _error_of(question: Callable[[], object]) -> str:
    try:
        question()
    except TiphysError as error:
        return str(error)
    return ""
