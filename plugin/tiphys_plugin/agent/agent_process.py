"""The shared agent as a process: the tenants, leader election by a Lease, and an HTTP server for probes and metrics.

`SharedAgent` does the work while this process leads.
"""

import os
import socket
import threading
import time
from typing import Any

import structlog

from tiphys.kube import KubeApi, LeaderElector
from tiphys.service.http_server import ServerCertificate
from tiphys_plugin.agent.agent import SharedAgent
from tiphys_plugin.agent.metrics import AgentMetrics
from tiphys_plugin.agent.plugin_calls import CountingApi
from tiphys_plugin.agent.settings import AgentSettings
from tiphys_plugin.eviction.loop import PreemptionLoop
from tiphys_plugin.server.app import AppServer, create_status_app
from tiphys_plugin.server.tenants import TenantChecks
from tiphys_plugin.server.wiring import DeploymentSettings, build_tenants

LEASE_NAME = "tiphys-agent"
_POD_NAME = "POD_NAME"
_log = structlog.get_logger()


def run(
    api: KubeApi,
    deployment: DeploymentSettings,
    host: str,
    port: int,
    stop: threading.Event,
    settings: AgentSettings | None = None,
    certificate: ServerCertificate | None = None,
) -> None:
    """Until ``stop``, answer task sets while this process is the leader, else wait as a standby.

    Raises:
        UsageError: the store's URL, or the choice of namespaces, is wrong.
        StoreError: the API server does not answer, or this account lacks a permission.
    """
    settings = settings or AgentSettings()
    metrics = AgentMetrics()
    api = CountingApi(api, metrics.count_request)
    tenants = build_tenants(api, deployment)
    lease = LeaderElector(
        api,
        deployment.release_namespace or api.namespace,
        LEASE_NAME,
        _candidate_identity(),
        monotonic=time.monotonic,
        renew_seconds=settings.renew_seconds,
    )
    metrics.leader.set_function(lambda: float(lease.is_leader))
    agent = SharedAgent(
        api,
        tenants.execute,
        deployment.namespaces or (None,),
        lambda: lease.is_leader,
        metrics,
        settings,
        time.monotonic,
    )
    try:
        # Standbys run the preemption loop too: the ledger decides between replicas, and a change of leader takes time.
        with TenantChecks(tenants) as checks, PreemptionLoop(tenants.ledger, tenants.cluster, tenants.stores):
            app = create_status_app(
                lambda: _readiness(checks.public_status_document(), agent.watch_error, lease.is_leader),
                lambda: tenants.render() + metrics.render(),
            )
            with AppServer(app, host, port, certificate) as server:
                _log.info("agent.started", url=server.url, store=deployment.store_url, identity=_candidate_identity())
                lease.run(stop, agent.run)
                _log.info("agent.stopping")
    finally:
        tenants.close()


def _candidate_identity() -> str:
    """Name of this candidate; unique also if two candidates run on one machine."""
    return os.environ.get(_POD_NAME) or f"{socket.gethostname()}-{os.getpid()}"


def _readiness(checks: dict[str, Any], watch_error: str, is_leading: bool) -> dict[str, Any]:
    """The document of ``/readyz``. A standby is ready too, because it can take over."""
    status = {"status": "degraded"} if watch_error else {}
    error = "task sets cannot be watched; the log says where and why (agent.watch_failed)" if watch_error else ""
    return {**checks, **status, "leader": is_leading, "task_sets": {"error": error}}
