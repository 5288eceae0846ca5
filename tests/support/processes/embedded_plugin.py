"""The plugin over folders in place of a cluster, as a process of its own, so that it can be killed.

The token of its callers is in ``TIPHYS_PLUGIN_TOKEN``, and the folders are options.
"""

import argparse
import os
import sys
import threading
from functools import partial
from pathlib import Path

import structlog
from tiphys_plugin.__main__ import run_until_signal
from tiphys_plugin.cluster.interface import DirectoryCluster
from tiphys_plugin.core import PluginCore
from tiphys_plugin.quota.ledger.sqlite_ledger import SqliteLedger
from tiphys_plugin.quota.queues import load_queues
from tiphys_plugin.server.app import PluginServer

from tiphys.store import open_store

_log = structlog.get_logger()


def serve(options: argparse.Namespace, stop: threading.Event) -> None:
    """Answer calls until ``stop``."""
    ledger = SqliteLedger(options.ledger, load_queues(options.queues) if options.queues else None)
    core = PluginCore(open_store(options.store), DirectoryCluster(options.cluster_dir), ledger)
    try:
        with core.preemption_loop(), PluginServer(core, os.environ["TIPHYS_PLUGIN_TOKEN"]) as server:
            _log.info("service.started", url=server.url)
            stop.wait()
            _log.info("service.stopping")
    finally:
        core.close()
        ledger.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", required=True)
    parser.add_argument("--cluster-dir", required=True, type=Path)
    parser.add_argument("--ledger", required=True, type=Path)
    parser.add_argument("--queues", type=Path)
    sys.exit(run_until_signal(partial(serve, parser.parse_args())))
