"""The processes of a cluster's plugin: the service behind the sidecars, and the shared agent."""

import argparse
import threading
from contextlib import closing
from importlib import import_module

import structlog

from tiphys.kube import connect_to_cluster
from tiphys.service.http_server import read_tls_options
from tiphys_plugin.eviction.loop import PreemptionLoop
from tiphys_plugin.server.app import AppServer, create_service_app
from tiphys_plugin.server.tenants import TenantChecks
from tiphys_plugin.server.token_review import TokenReviewAuthenticator
from tiphys_plugin.server.wiring import DeploymentSettings, LedgerKind, build_tenants

_log = structlog.get_logger()


def serve(options: argparse.Namespace, stop: threading.Event) -> None:
    """Answer the calls of sidecars until ``stop``.

    Raises:
        UsageError: an option is wrong.
        StoreError: the API server does not answer, or this account lacks a permission.
    """
    certificate = read_tls_options(options)
    api = connect_to_cluster()
    tenants = build_tenants(api, _deployment_settings(options))
    try:
        with (
            closing(
                TokenReviewAuthenticator(api, tenants.stores.serves, tenants.registry, options.token_audience)
            ) as authenticator,
            TenantChecks(tenants) as checks,
            PreemptionLoop(tenants.ledger, tenants.cluster, tenants.stores),
            AppServer(
                create_service_app(tenants, checks, authenticator), options.host, options.port, certificate
            ) as server,
        ):
            _log.info("service.started", url=server.url, store=options.store, namespaces=options.namespaces or "all")
            stop.wait()
            _log.info("service.stopping")
    finally:
        tenants.close()


def agent(options: argparse.Namespace, stop: threading.Event) -> None:
    """Answer task sets until ``stop``; raises like `serve`."""
    package = import_module("tiphys_plugin.agent")
    certificate = read_tls_options(options)
    settings = package.AgentSettings(outage_limit_seconds=options.outage_limit)
    deployment = _deployment_settings(options)
    package.run(connect_to_cluster(), deployment, options.host, options.port, stop, settings, certificate)


def _deployment_settings(options: argparse.Namespace) -> DeploymentSettings:
    namespaces = None if options.all_namespaces else tuple(dict.fromkeys(options.namespaces))
    return DeploymentSettings(
        options.store,
        namespaces,
        LedgerKind(options.ledger_kind),
        options.ledger_name,
        options.release_namespace,
        options.image_pull_timeout,
    )
