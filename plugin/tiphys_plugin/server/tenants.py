"""One core per namespace, each with the store of its namespace, and background checks of these stores.

Permissions follow the caller's namespace, as authenticated, and never the
request body. A tenant with a broken or slow store must not affect the others: a
core is built on first use, without reaching storage or cluster, and the calls of
one tenant cannot occupy all threads.

A readiness probe must not wait for a hanging store, and one broken store must not
make the service unready for other tenants. So `TenantChecks` examines the stores
in the background, and readiness reports its last result, which the metrics and
`tiphys doctor --cluster` read.
"""

import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from tiphys.errors import NotFoundError, StoreError, StoreFormatError, TiphysError, UsageError
from tiphys.protocol.execute_api import NOT_MINE, ExecuteReply, pending_reply
from tiphys.records import utc_now
from tiphys.store import TenantStores
from tiphys_plugin.cluster.interface import Cluster
from tiphys_plugin.core import PluginCore
from tiphys_plugin.operations import replies
from tiphys_plugin.operations.lease_reclaim import find_unleased_pods
from tiphys_plugin.quota.admission_backend import AdmissionBackend
from tiphys_plugin.quota.kueue.backend import KueueAdmission
from tiphys_plugin.quota.queues import MisconfiguredQueues
from tiphys_plugin.runtime import requests
from tiphys_plugin.runtime.background import PeriodicTask
from tiphys_plugin.runtime.context import Tenant
from tiphys_plugin.runtime.metrics import LedgerCollector, TenantsCollector
from tiphys_plugin.runtime.settings import PluginSettings

MAX_CALLS_PER_TENANT = 24
"""Concurrent calls of one namespace; further calls get a Pending reply at once, and occupy no thread."""
_BUSY_SECONDS, _UNAVAILABLE_SECONDS = 2.0, 30.0
_log = structlog.get_logger()


class ForbiddenNamespaceError(TiphysError):
    """A caller sent a request about a workflow of another namespace."""

    exit_code = 4


class Tenants:
    """The cores of all namespaces of one installation. Thread-safe."""

    def __init__(
        self,
        stores: TenantStores,
        cluster: Cluster,
        ledger: AdmissionBackend,
        settings: PluginSettings | None = None,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        self.stores = stores
        self.cluster = cluster
        self.ledger = ledger
        self._settings = settings
        self._clock = clock
        self._cores: dict[str, PluginCore] = {}
        self._lock = threading.Lock()
        self._call_slots: defaultdict[str, threading.BoundedSemaphore] = defaultdict(
            lambda: threading.BoundedSemaphore(MAX_CALLS_PER_TENANT)
        )
        self.recovery_error = ""
        """Why leases of live pods are not recorded in the ledger; empty if they are."""
        self.background = ExitStack()
        """Background tasks and watches, which run until `close`."""
        self.registry = CollectorRegistry()
        self.registry.register(LedgerCollector(ledger.snapshot, measures_room=not isinstance(ledger, KueueAdmission)))
        self.registry.register(TenantsCollector(self._metrics))

    def execute(self, namespace: str, document: dict[str, Any]) -> ExecuteReply:
        """Answer a request of a caller that belongs to ``namespace``.

        Raises:
            StoreError: storage, ledger or cluster did not answer; the caller should repeat the call.
            ForbiddenNamespaceError: the request is about a workflow of another namespace.
        """
        if not requests.is_tiphys_template(document.get("template")):
            return NOT_MINE
        _check_namespace(namespace, document)
        with self._lock:
            slots = self._call_slots[namespace]
        if not slots.acquire(blocking=False):
            return pending_reply(
                f"{MAX_CALLS_PER_TENANT} calls of namespace {namespace} are being answered", _BUSY_SECONDS
            )
        try:
            core = self._core_or_refusal(namespace)
            return core if isinstance(core, ExecuteReply) else core.execute_document(document)
        finally:
            slots.release()

    def core(self, namespace: str) -> PluginCore:
        """The core of a namespace, built on first use.

        Raises:
            NotFoundError: the namespace is not served.
            UsageError: the URL of its store is invalid.
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
    def known_namespaces(self) -> list[str]:
        """Namespaces that are named in the settings, or have sent a call; sorted."""
        return sorted({*(self.stores.namespaces or ()), *list(self._cores)})

    def recover_leases(self) -> None:
        """Record the leases of live attempts that the ledger lacks.

        Raises:
            StoreError: ledger or cluster did not answer; or pods of a namespace whose store fails are on GPUs. The
                leases of the other namespaces are recorded then.
        """
        unleased = [pod for pods in find_unleased_pods(self.cluster, self.ledger).values() for pod in pods]
        errors = {name: self._recover_leases_of(name) for name in sorted({pod.namespace for pod in unleased})}
        on_gpus = {pod.namespace for pod in unleased if pod.occupies_gpus}
        if failed := [f"namespace {name}: {error}" for name, error in errors.items() if error and name in on_gpus]:
            raise StoreError(f"leases of live pods are not recorded, and their GPUs may look free: {'; '.join(failed)}")

    def _recover_leases_of(self, namespace: str) -> str:
        """Why leases of ``namespace`` may be missing; empty if none are, or it is not served and has none."""
        try:
            self.core(namespace).recover_leases()
        except StoreError as error:
            return str(error)
        except TiphysError as error:
            _log.error("recovery.failed", namespace=namespace, error=str(error))
        return ""

    def forget_recovery(self) -> None:
        """Have the leases recorded again, although they were before: the ledger was lost since."""
        with self._lock:
            for core in self._cores.values():
                core.forget_recovery()

    def render(self) -> bytes:
        """All metrics in the Prometheus text format; those of a core carry the label ``tenant``."""
        return generate_latest(self.registry)

    def close(self) -> None:
        """Stop the background tasks, and close all cores."""
        self.background.close()
        with self._lock:
            for core in self._cores.values():
                core.close()

    def _core_or_refusal(self, namespace: str) -> PluginCore | ExecuteReply:
        """The core, or a reply that says why it is unavailable."""
        try:
            return self.core(namespace)
        except StoreFormatError as error:
            # Nothing of its runs is known here, so their nodes wait for the right version and do not fail.
            _log.error("tenant.refused", namespace=namespace, error=str(error))
            return pending_reply(f"Waiting: {error}", _UNAVAILABLE_SECONDS)
        except (NotFoundError, UsageError) as error:
            _log.error("tenant.refused", namespace=namespace, error=str(error))
            return replies.refused_reply(error)
        except StoreError as error:
            _log.error("tenant.unavailable", namespace=namespace, error=str(error))
            return pending_reply(f"Waiting: {error}", _UNAVAILABLE_SECONDS)

    def _metrics(self) -> dict[str, CollectorRegistry]:
        with self._lock:
            return {namespace: core.metrics.registry for namespace, core in self._cores.items()}


def _check_namespace(namespace: str, document: dict[str, Any]) -> None:
    workflow = document.get("workflow")
    metadata = workflow.get("metadata") if isinstance(workflow, dict) else None
    requested = metadata.get("namespace") if isinstance(metadata, dict) else None
    if requested != namespace:
        raise ForbiddenNamespaceError(
            f"a caller of namespace {namespace} spoke for a workflow of namespace {requested}"
        )


_MAX_CONCURRENT_CHECKS = 8


@dataclass
class TenantChecks(PeriodicTask):
    """Checks ledger and stores."""

    name = "checks"
    starts_at_once = True
    tenants: Tenants
    every_seconds: float = 30.0
    clock: Callable[[], datetime] = utc_now
    _ledger: str = ""
    _stores: dict[str, str] = field(default_factory=dict)
    _checked_at: str = ""

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(_MAX_CONCURRENT_CHECKS, "tiphys-check")
        self._up = Gauge(
            "tiphys_store_up",
            "Whether the store of a tenant answered the last check.",
            ("tenant",),
            registry=self.tenants.registry,
        )

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def status_document(self) -> dict[str, Any]:
        """The last results as JSON. ``status`` is ``ok``, ``degraded``, or ``unknown`` before the first check."""
        stores = dict(self._stores)
        broken = self._ledger or any(stores.values())
        return {
            "status": "unknown" if not self._checked_at else "degraded" if broken else "ok",
            "checked_at": self._checked_at,
            "cluster": self.tenants.cluster.name,
            "ledger": {"error": self._ledger},
            "tenants": [
                {"namespace": name, "store": self.tenants.stores.url(name), "error": stores.get(name, "")}
                for name in self.tenants.known_namespaces
            ],
        }

    def public_status_document(self) -> dict[str, Any]:
        """`status_document` for callers without a token: it names no namespace. The log names those that fail."""
        document = self.status_document()
        failing = sum(bool(tenant["error"]) for tenant in document["tenants"])
        ledger = document["ledger"]
        if self.tenants.recovery_error:
            ledger = {"error": "leases of live pods are not recorded, and their GPUs may look free; the log says why"}
        return {**document, "ledger": ledger, "tenants": {"failing": failing}}

    def run_once(self) -> None:
        """Check the ledger and all stores once."""
        self._ledger = _error_message(self._read_ledger)
        namespaces = self.tenants.known_namespaces
        for namespace, error in zip(namespaces, self._pool.map(self._store_error, namespaces), strict=True):
            if error and error != self._stores.get(namespace):
                _log.error("tenant.store_unavailable", namespace=namespace, error=error)
            self._stores[namespace] = error
            self._up.labels(tenant=namespace).set(0 if error else 1)
        self._checked_at = self.clock().isoformat(timespec="seconds")

    def _read_ledger(self) -> None:
        queues = self.tenants.ledger.snapshot().queues
        if isinstance(queues, MisconfiguredQueues):
            raise UsageError(queues.message)
        if self.tenants.recovery_error:
            raise StoreError(self.tenants.recovery_error)

    def _store_error(self, namespace: str) -> str:
        return _error_message(lambda: self.tenants.core(namespace).check_store())


def _error_message(check: Callable[[], object]) -> str:
    try:
        check()
    except TiphysError as error:
        return str(error)
    return ""
