"""The plugin of a cluster as a process: the service behind the sidecars, or the shared agent."""

import argparse
import threading
from importlib import import_module

import structlog

from tiphys.kube import connect
from tiphys_plugin.eviction.loop import Preemptions
from tiphys_plugin.server.app import AppServer, create_service_app
from tiphys_plugin.server.tenants import TenantChecks
from tiphys_plugin.server.token_review import ReviewedTokens
from tiphys_plugin.server.wiring import Installation, build

_log = structlog.get_logger()


def serve(options: argparse.Namespace, stop: threading.Event) -> None:
    """Answer sidecars until ``stop``.

    Raises:
        UsageError: an option is wrong.
        StoreError: the API server does not answer, or does not let this account see what it needs.
    """
    api = connect()
    tenants = build(api, _installation(options))
    try:
        reviewed = ReviewedTokens(api, tenants.stores.serves, tenants.registry)
        with (
            TenantChecks(tenants) as checks,
            Preemptions(tenants.ledger, tenants.cluster, tenants.stores),
            AppServer(create_service_app(tenants, checks, reviewed), options.host, options.port) as server,
        ):
            _log.info("service.started", url=server.url, store=options.store, namespaces=options.namespaces or "all")
            stop.wait()
            _log.info("service.stopping")
    finally:
        tenants.close()


def agent(options: argparse.Namespace, stop: threading.Event) -> None:
    """Answer task sets until ``stop``; raises as `serve` does."""
    run = import_module("tiphys_plugin.agent").run
    run(connect(), _installation(options), options.host, options.port, stop)


def _installation(options: argparse.Namespace) -> Installation:
    namespaces = None if options.all_namespaces else tuple(dict.fromkeys(options.namespaces))
    return Installation(options.store, namespaces, options.ledger_name, options.release_namespace)
