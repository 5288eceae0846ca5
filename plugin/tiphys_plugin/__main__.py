"""The plugin as a process: ``python -m tiphys_plugin`` with a command and its options.

A command's module is imported only after it was chosen, so no command loads
what only another one needs. All commands share the process settings made here:
JSON logs, signal handling, and garbage collection thresholds.
"""

import argparse
import gc
import os
import signal
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import prometheus_client

from tiphys.errors import TiphysError
from tiphys.service.http_server import add_tls_options
from tiphys.service.logging import configure_json_logging
from tiphys_plugin.runtime.settings import (
    IMAGE_PULL_TIMEOUT_SECONDS,
    IMAGE_PULL_TIMEOUT_VARIABLE,
    TOKEN_FILE_VARIABLE,
    TOKEN_VARIABLE,
)
from tiphys_plugin.sidecar.outages import OUTAGE_LIMIT_SECONDS, OUTAGE_LIMIT_VARIABLE

_ALL_ADDRESSES = "0.0.0.0"  # noqa: S104  a pod is reached by its address, and every caller has to authenticate

_SERVE_EXAMPLES = """\
examples:
  python -m tiphys_plugin serve --store s3://ml-runs/tiphys --namespace ml
  python -m tiphys_plugin serve --store 's3://ml-runs/{namespace}' --namespace vision --namespace speech
  python -m tiphys_plugin serve --store 's3://ml-runs/{namespace}' --all-namespaces"""
_AGENT_EXAMPLES = """\
examples:
  python -m tiphys_plugin agent --store s3://ml-runs/tiphys --namespace ml
  python -m tiphys_plugin agent --store 's3://ml-runs/{namespace}' --all-namespaces"""
_EMBEDDED_EXAMPLES = """\
examples:
  TIPHYS_PLUGIN_TOKEN_FILE=token python -m tiphys_plugin embedded \\
      --store ./store --cluster-dir ./cluster --ledger ledger.db --queues queues.yaml"""


def build_parser() -> argparse.ArgumentParser:
    """Build the parser; the parsed options name the ``module`` and ``function`` that run the command."""
    top = argparse.ArgumentParser(prog="python -m tiphys_plugin", description="Answer Argo's plugin steps.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    serve = _add_command(
        commands,
        "serve",
        _SERVE_EXAMPLES,
        "answer the sidecars of a cluster, each for the namespace of its service account",
    )
    _add_deployment_options(serve)
    serve.add_argument(
        "--token-audience",
        default="",
        metavar="AUDIENCE",
        help="accept only tokens that were issued for this audience, as sidecars with TIPHYS_TOKEN_AUDIENCE request "
        "them (default: tokens for the API server)",
    )
    serve.set_defaults(module="tiphys_plugin.server.service", function="serve")
    agent = _add_command(
        commands,
        "agent",
        _AGENT_EXAMPLES,
        "answer the task sets of a cluster in place of Argo's agent pods; one replica leads",
    )
    _add_deployment_options(agent)
    agent.add_argument(
        "--outage-limit",
        type=float,
        metavar="SECONDS",
        default=os.environ.get(OUTAGE_LIMIT_VARIABLE, OUTAGE_LIMIT_SECONDS),
        help="fail a step that storage, API server or ledger have not answered for this long (default: "
        f"{OUTAGE_LIMIT_VARIABLE}, or {OUTAGE_LIMIT_SECONDS:g})",
    )
    agent.set_defaults(module="tiphys_plugin.server.service", function="agent")
    embedded = _add_command(
        commands, "embedded", _EMBEDDED_EXAMPLES, "serve one machine, with a folder in place of a cluster"
    )
    _add_embedded_options(embedded)
    embedded.set_defaults(module="tiphys_plugin.server.embedded", function="serve")
    return top


def _add_command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, examples: str, summary: str
) -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    sentence = f"{summary[:1].upper()}{summary[1:]}."
    return commands.add_parser(name, help=summary, description=sentence, epilog=examples, formatter_class=raw)


def _add_deployment_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--store",
        required=True,
        help="URL of the storage of runs; {namespace} in it is replaced by the workflow's namespace, and is required "
        "if more than one namespace is served",
    )
    served = command.add_mutually_exclusive_group(required=True)
    served.add_argument(
        "--namespace",
        action="append",
        dest="namespaces",
        metavar="NAMESPACE",
        help="namespace whose workflows are served; repeat for more",
    )
    served.add_argument("--all-namespaces", action="store_true", help="serve every namespace of the cluster")
    command.add_argument(
        "--ledger-kind",
        choices=("tiphys", "kueue"),
        default="tiphys",
        help="who grants GPUs: the queues of a GPULedger, or the LocalQueues of Kueue (default: %(default)s)",
    )
    command.add_argument("--ledger-name", default="default", help="name of the GPULedger (default: %(default)s)")
    command.add_argument(
        "--release-namespace", default="", help="namespace of the GPULedger and the Leases (default: that of this pod)"
    )
    command.add_argument(
        "--image-pull-timeout",
        type=float,
        metavar="SECONDS",
        default=os.environ.get(IMAGE_PULL_TIMEOUT_VARIABLE, IMAGE_PULL_TIMEOUT_SECONDS),
        help="end an attempt with GPUs whose image cannot be pulled for this long (default: "
        f"{IMAGE_PULL_TIMEOUT_VARIABLE}, or {IMAGE_PULL_TIMEOUT_SECONDS:g})",
    )
    _add_address_options(command, _ALL_ADDRESSES)
    add_tls_options(command)


def _add_embedded_options(command: argparse.ArgumentParser) -> None:
    command.description = (
        f"{command.description} The token is read from the file {TOKEN_FILE_VARIABLE}, or from {TOKEN_VARIABLE}."
    )
    command.add_argument("--store", required=True, help="URL of the storage of runs")
    command.add_argument("--cluster-dir", required=True, type=Path, help="folder that holds workflows and pods")
    command.add_argument(
        "--ledger",
        required=True,
        type=Path,
        help="SQLite file of GPU leases, on a durable disk; if the file is lost, only leases of attempts with live "
        "pods are recovered",
    )
    command.add_argument("--queues", type=Path, help="queue file; without one, GPUs are not limited")
    _add_address_options(command, "127.0.0.1")


def _add_address_options(command: argparse.ArgumentParser, host: str) -> None:
    command.add_argument("--host", default=host, help="address to listen on (default: %(default)s)")
    command.add_argument(
        "--port", default=7243, type=int, help="port to listen on; 0 for a free one (default: %(default)s)"
    )


_YOUNG_THRESHOLD = 10_000
"""New objects before a collection of the youngest: one scheduling cycle makes thousands, and drops them at its end."""
_FULL_COLLECTION_THRESHOLD = 1000
"""Collections of the middle generation before a full one. A full collection stalled every call for 60 ms, because of
the objects that boto3 alone has loaded, and the documents of a few hundred steps were enough to trigger it."""


def set_gc_thresholds() -> None:
    """Make garbage collections rare; hardly any object of the service is part of a reference cycle."""
    gc.set_threshold(_YOUNG_THRESHOLD, gc.get_threshold()[1], _FULL_COLLECTION_THRESHOLD)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; answer the calls under way, then return the exit code."""
    options = build_parser().parse_args(arguments)
    configure_json_logging()
    set_gc_thresholds()
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # it has no annotations
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        getattr(import_module(options.module), options.function)(options, stop)
    except TiphysError as error:
        print(f"tiphys-plugin: {error}", file=sys.stderr)  # noqa: T201  a command reports its error on stderr
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
