"""A core for each namespace, over the store of that namespace.

What a caller may touch follows from who it is, which the door has found out,
and never from what it sends. One tenant whose store is broken or slow must not
be felt by the others: cores are made when they are first needed, none of it
needs anybody to be in reach, and no tenant may occupy all threads.

Whether the service can work for each of its tenants, looked at in the background.

A probe must not wait for a store that hangs, and one tenant's broken store must
not take the service away from the others. So readiness only tells what was seen
last; `tiphys doctor --cluster` and the metrics read it.
"""

import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime
from types import TracebackType
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from tiphys.errors import NotFoundError, StoreError, TiphysError, UsageError
from tiphys.protocol.execute_api import NOT_MINE, ExecuteReply, pending
from tiphys.records import utc_now
from tiphys.store import TenantStores
from tiphys_plugin.cluster.interface import Cluster
from tiphys_plugin.core import PluginCore, refused
from tiphys_plugin.operations.lease_reclaim import unknown
from tiphys_plugin.quota.lease import AdmissionBackend
from tiphys_plugin.quota.queues import Misconfigured
from tiphys_plugin.runtime import requests
from tiphys_plugin.runtime.context import Tenant
from tiphys_plugin.runtime.metrics import LedgerCollector, TenantsCollector
from tiphys_plugin.runtime.settings import Settings

CALLS_OF_ONE_TENANT = 24
"""Calls that a namespace may have under way; more are asked to come again, and cost no thread."""
_BUSY_SECONDS, _UNAVAILABLE_SECONDS = 2.0, 30.0
_log = structlog.get_logger()


class TrespassError(TiphysError):
    """A caller spoke for a namespace that is not its own."""

    exit_code = 4


class Tenants:
    """All namespaces of one installation."""

    def __init__(
        self,
        stores: TenantStores,
        cluster: Cluster,
        ledger: AdmissionBackend,
        settings: Settings | None = None,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        self.stores = stores
        self.cluster = cluster
        self.ledger = ledger
        self._settings = settings
        self._clock = clock
        self._cores: dict[str, PluginCore] = {}
        self._lock = threading.Lock()
        self._calls: defaultdict[str, threading.BoundedSemaphore] = defaultdict(
            lambda: threading.BoundedSemaphore(CALLS_OF_ONE_TENANT)
        )
        self.background = ExitStack()
        """What goes on until `close`."""
        self.registry = CollectorRegistry()
        self.registry.register(LedgerCollector(ledger.snapshot))
        self.registry.register(TenantsCollector(self._metrics))

    def execute(self, namespace: str, document: dict[str, Any]) -> ExecuteReply:
        """Answer a request of a caller that belongs to ``namespace``.

        Raises:
            StoreError: storage, ledger or cluster did not answer; the caller shall ask again.
            TrespassError: the request is about a workflow of another namespace.
        """
        if not requests.is_ours(document.get("template")):
            return NOT_MINE
        _check_namespace(namespace, document)
        with self._lock:
            calls = self._calls[namespace]
        if not calls.acquire(blocking=False):
            return pending(f"{CALLS_OF_ONE_TENANT} calls of namespace {namespace} are being answered", _BUSY_SECONDS)
        try:
            core = self._core_for(namespace, document)
            return core if isinstance(core, ExecuteReply) else core.execute_document(document)
        finally:
            calls.release()

    def core(self, namespace: str) -> PluginCore:
        """The core of a namespace.

        Raises:
            NotFoundError: the namespace is not served.
            UsageError: no store can have its URL.
            StoreError: its store cannot be opened now.
        """
        store = self.stores.store(namespace)
        with self._lock:
            if namespace not in self._cores:
                tenant = Tenant(namespace, self.stores)
                self._cores[namespace] = PluginCore(
                    store, self.cluster, self.ledger, self._clock, self._settings, tenant
                )
            return self._cores[namespace]

    @property
    def known(self) -> list[str]:
        """Namespaces that are named in the settings or have called."""
        return sorted({*(self.stores.namespaces or ()), *list(self._cores)})

    def recover(self) -> None:
        """Record the leases of live attempts that the ledger does not know, before anybody is given GPUs.

        A tenant that cannot be looked at now is logged, and looked at again before its first answer.
        """
        try:
            live = {pod.namespace for pods in unknown(self.cluster, self.ledger).values() for pod in pods}
        except TiphysError as error:
            _log.error("recovery.failed", error=str(error))
            return
        for namespace in sorted(live):
            try:
                self.core(namespace).recover()
            except TiphysError as error:
                _log.error("recovery.failed", namespace=namespace, error=str(error))

    def render(self) -> bytes:
        """All metrics in the Prometheus text format; those of a core carry the label ``tenant``."""
        return generate_latest(self.registry)

    def close(self) -> None:
        """Stop the background work, of all cores, too."""
        self.background.close()
        with self._lock:
            for core in self._cores.values():
                core.close()

    def _core_for(self, namespace: str, document: dict[str, Any]) -> PluginCore | ExecuteReply:
        """The core, or a reply that says why there is none."""
        try:
            return self.core(namespace)
        except (NotFoundError, UsageError) as error:
            _log.error("tenant.refused", namespace=namespace, error=str(error))
            return refused(requests.identify(document["template"]), error)
        except StoreError as error:
            _log.error("tenant.unavailable", namespace=namespace, error=str(error))
            return pending(f"Waiting: {error}", _UNAVAILABLE_SECONDS)

    def _metrics(self) -> dict[str, CollectorRegistry]:
        with self._lock:
            return {namespace: core.metrics.registry for namespace, core in self._cores.items()}


def _check_namespace(namespace: str, document: dict[str, Any]) -> None:
    workflow = document.get("workflow")
    metadata = workflow.get("metadata") if isinstance(workflow, dict) else None
    named = metadata.get("namespace") if isinstance(metadata, dict) else None
    if named != namespace:
        raise TrespassError(f"a caller of namespace {namespace} spoke for a workflow of namespace {named}")


_EVERY_SECONDS = 30.0
_AT_ONCE = 8


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
