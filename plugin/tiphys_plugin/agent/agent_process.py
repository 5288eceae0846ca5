"""The shared agent as a process: the tenants, a Lease, and a door for probes. `Agent` does the work while it leads."""

import os
import socket
import threading
import time
from typing import Any

import structlog

from tiphys.kube import KubeApi, LeaderLease
from tiphys_plugin.agent.agent import Agent
from tiphys_plugin.agent.metrics import AgentMetrics
from tiphys_plugin.agent.plugin_calls import CountedApi
from tiphys_plugin.agent.settings import AgentSettings
from tiphys_plugin.eviction.loop import Preemptions
from tiphys_plugin.server.app import AppServer, create_status_app
from tiphys_plugin.server.tenants import TenantChecks
from tiphys_plugin.server.wiring import Installation, build

LEASE = "tiphys-agent"
_POD_NAME = "POD_NAME"
_log = structlog.get_logger()


def run(
    api: KubeApi,
    installation: Installation,
    host: str,
    port: int,
    stop: threading.Event,
    settings: AgentSettings | None = None,
) -> None:
    """Answer task sets while this process leads, and stand by while it does not, until ``stop``.

    Raises:
        UsageError: the installation is wrong.
        StoreError: the API server does not answer, or does not let this account see what it needs.
    """
    settings = settings or AgentSettings()
    metrics = AgentMetrics()
    api = CountedApi(api, metrics.count_request)
    tenants = build(api, installation)
    lease = LeaderLease(
        api,
        installation.release_namespace or api.namespace,
        LEASE,
        _identity(),
        monotonic=time.monotonic,
        renew_seconds=settings.renew_seconds,
    )
    metrics.leader.set_function(lambda: float(lease.held))
    agent = Agent(
        api, tenants.execute, installation.namespaces or (None,), lambda: lease.held, metrics, settings, time.monotonic
    )
    try:
        # Standbys look for preemptions, too: the ledger decides between them, and a leader may be slow to change.
        with TenantChecks(tenants) as checks, Preemptions(tenants.ledger, tenants.cluster, tenants.stores):
            app = create_status_app(
                lambda: _state(checks.state(), agent.trouble, lease.held),
                lambda: tenants.render() + metrics.render(),
            )
            with AppServer(app, host, port) as server:
                _log.info("agent.started", url=server.url, store=installation.store, identity=_identity())
                lease.lead(stop, agent.run)
                _log.info("agent.stopping")
    finally:
        tenants.close()


def _identity() -> str:
    """Unique among the candidates, also where two of them run on one machine."""
    return os.environ.get(_POD_NAME) or f"{socket.gethostname()}-{os.getpid()}"


def _state(seen: dict[str, Any], trouble: str, leads: bool) -> dict[str, Any]:
    """What `/readyz` tells. A standby is ready: it does what it is there for."""
    status = {"status": "degraded"} if trouble else {}
    return {**seen, **status, "leader": leads, "task_sets": {"error": trouble}}
