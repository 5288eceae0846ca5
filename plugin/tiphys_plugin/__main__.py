"""The service as a process: ``python -m tiphys_plugin``. It has no other duty than to wire the parts together."""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import prometheus_client
import structlog

from tiphys.errors import TiphysError, UsageError
from tiphys.store import open_store
from tiphys_plugin.cluster import DirectoryCluster
from tiphys_plugin.core import PluginCore
from tiphys_plugin.ledger import SqliteLedger
from tiphys_plugin.logs import log_json
from tiphys_plugin.queues import load_queues
from tiphys_plugin.server import PluginServer

_TOKEN = "TIPHYS_PLUGIN_TOKEN"  # noqa: S105  the name of a variable
_TOKEN_FILE = "TIPHYS_PLUGIN_TOKEN_FILE"  # noqa: S105
_log = structlog.get_logger()


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; answer the calls under way, then return the exit code."""
    options = _parser().parse_args(arguments)
    log_json()
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # it has no annotations
    try:
        _serve(options)
    except TiphysError as error:
        print(f"tiphys-plugin: {error}", file=sys.stderr)  # noqa: T201  this is the command's own voice
        return error.exit_code
    return 0


def _serve(options: argparse.Namespace) -> None:
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    token = _token()
    queues = load_queues(options.queues) if options.queues else None
    ledger = SqliteLedger(options.ledger, queues)
    core = PluginCore(open_store(options.store), DirectoryCluster(options.cluster_dir), ledger)
    try:
        with PluginServer(core, token, options.host, options.port) as server:
            _log.info("service.started", url=server.url, store=options.store, queues=str(options.queues or ""))
            stop.wait()
            _log.info("service.stopping")
    finally:
        core.close()
        ledger.close()


def _token() -> str:
    """The token, from a variable or a file: an argument would show in the list of processes."""
    if path := os.environ.get(_TOKEN_FILE):
        try:
            return Path(path).read_text().strip()
        except OSError as error:
            raise UsageError(f"{_TOKEN_FILE}={path} cannot be read: {error.strerror}") from error
    if token := os.environ.get(_TOKEN):
        return token
    raise UsageError(f"there is no token: set {_TOKEN_FILE} to the path of a file that holds it, or {_TOKEN} to it")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tiphys_plugin", description=__doc__)
    parser.add_argument("--store", required=True, help="URL of the storage that runs are kept in")
    parser.add_argument("--cluster-dir", required=True, type=Path, help="folder that holds workflows and pods")
    parser.add_argument(
        "--ledger",
        required=True,
        type=Path,
        help="SQLite file of GPU leases, on a durable disk; without it, only attempts with live pods are found again",
    )
    parser.add_argument("--queues", type=Path, help="queue file; without one, GPUs are not limited")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", default=7243, type=int, help="port to listen on; 0 for a free one (default: %(default)s)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
