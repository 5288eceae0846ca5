"""The service without a cluster: one store, a folder in the place of the API server, the ledger in a file."""

import argparse
import os
import threading
from pathlib import Path

import structlog

from tiphys.errors import UsageError
from tiphys.store import open_store
from tiphys_plugin.__main__ import TOKEN, TOKEN_FILE
from tiphys_plugin.cluster.interface import DirectoryCluster
from tiphys_plugin.core import PluginCore
from tiphys_plugin.quota.ledger.sqlite_ledger import SqliteLedger
from tiphys_plugin.quota.queues import load_queues
from tiphys_plugin.server.app import PluginServer

_log = structlog.get_logger()


def serve(options: argparse.Namespace, stop: threading.Event) -> None:
    """Answer until ``stop``."""
    token = _token()
    queues = load_queues(options.queues) if options.queues else None
    ledger = SqliteLedger(options.ledger, queues)
    core = PluginCore(open_store(options.store), DirectoryCluster(options.cluster_dir), ledger)
    try:
        with core.preemptions(), PluginServer(core, token, options.host, options.port) as server:
            _log.info("service.started", url=server.url, store=options.store, queues=str(options.queues or ""))
            stop.wait()
            _log.info("service.stopping")
    finally:
        core.close()
        ledger.close()


def _token() -> str:
    """The token, from a variable or a file: an argument would show in the list of processes."""
    if path := os.environ.get(TOKEN_FILE):
        try:
            return Path(path).read_text().strip()
        except OSError as error:
            raise UsageError(f"{TOKEN_FILE}={path} cannot be read: {error.strerror}") from error
    if token := os.environ.get(TOKEN):
        return token
    raise UsageError(f"there is no token: set {TOKEN_FILE} to the path of a file that holds it, or {TOKEN} to it")
