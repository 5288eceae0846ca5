"""The embedded service, for one machine without a cluster: one store, a folder as the API server, a ledger file."""

import argparse
import os
import threading
from pathlib import Path

import structlog

from tiphys.errors import UsageError
from tiphys.store import open_store
from tiphys_plugin.cluster.interface import DirectoryCluster
from tiphys_plugin.core import PluginCore
from tiphys_plugin.quota.ledger.sqlite_ledger import SqliteLedger
from tiphys_plugin.quota.queues import load_queues
from tiphys_plugin.runtime.settings import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from tiphys_plugin.server.app import PluginServer

_log = structlog.get_logger()


def serve(options: argparse.Namespace, stop: threading.Event) -> None:
    """Answer calls until ``stop``.

    Raises:
        UsageError: there is no token, or an option is wrong.
        ConflictError: the port is in use.
        StoreError: storage or ledger did not answer.
    """
    token = _read_token()
    queues = load_queues(options.queues) if options.queues else None
    ledger = SqliteLedger(options.ledger, queues)
    core = PluginCore(open_store(options.store), DirectoryCluster(options.cluster_dir), ledger)
    try:
        with core.preemption_loop(), PluginServer(core, token, options.host, options.port) as server:
            _log.info("service.started", url=server.url, store=options.store, queues=str(options.queues or ""))
            stop.wait()
            _log.info("service.stopping")
    finally:
        core.close()
        ledger.close()


def _read_token() -> str:
    """Read the token from a variable or a file, because an argument would be visible in the process list."""
    if path := os.environ.get(TOKEN_FILE_VARIABLE):
        try:
            return Path(path).read_text().strip()
        except OSError as error:
            raise UsageError(f"{TOKEN_FILE_VARIABLE}={path} cannot be read: {error.strerror}") from error
    if token := os.environ.get(TOKEN_VARIABLE):
        return token
    raise UsageError(
        f"there is no token: set {TOKEN_FILE_VARIABLE} to the path of a file with the token, or {TOKEN_VARIABLE} to it"
    )
