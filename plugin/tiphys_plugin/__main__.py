"""The plugin as a process: ``python -m tiphys_plugin`` with a command and its options.

All commands share the process settings made here: JSON logs, signal handling,
and garbage collection thresholds. Their module is imported once the options are right.
"""

import argparse
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module

import prometheus_client

from tiphys.errors import TiphysError
from tiphys.service.http_server import add_tls_options
from tiphys.service.logging import configure_json_logging
from tiphys_plugin.runtime.settings import (
    IMAGE_PULL_TIMEOUT_SECONDS,
    IMAGE_PULL_TIMEOUT_VARIABLE,
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


def build_parser() -> argparse.ArgumentParser:
    """Build the parser; a ``command`` is the name of its function in `tiphys_plugin.server.service`."""
    top = argparse.ArgumentParser(prog="python -m tiphys_plugin", description="Answer Argo's plugin steps.")
    commands = top.add_subparsers(required=True, dest="command", metavar="COMMAND")
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
    command.add_argument("--host", default=_ALL_ADDRESSES, help="address to listen on (default: %(default)s)")
    command.add_argument(
        "--port", default=7243, type=int, help="port to listen on; 0 for a free one (default: %(default)s)"
    )
    add_tls_options(command)


_YOUNG_THRESHOLD = 10_000
"""New objects before a collection of the youngest: one scheduling cycle makes thousands, and drops them at its end."""
_FULL_COLLECTION_THRESHOLD = 1000
"""Collections of the middle generation before a full one. A full collection stalled every call for 60 ms, because of
the objects that boto3 alone has loaded, and the documents of a few hundred steps were enough to trigger it."""


def set_gc_thresholds() -> None:
    """Make garbage collections rare; hardly any object of the service is part of a reference cycle."""
    gc.set_threshold(_YOUNG_THRESHOLD, gc.get_threshold()[1], _FULL_COLLECTION_THRESHOLD)


def run_until_signal(serve: Callable[[threading.Event], None]) -> int:
    """Run ``serve`` until SIGTERM or SIGINT sets its event, and it has answered the calls under way; the exit code."""
    configure_json_logging()
    set_gc_thresholds()
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # it has no annotations
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        serve(stop)
    except TiphysError as error:
        print(f"tiphys-plugin: {error}", file=sys.stderr)  # noqa: T201  a command reports its error on stderr
        return error.exit_code
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command of ``arguments``; returns its exit code."""
    options = build_parser().parse_args(arguments)
    return run_until_signal(
        lambda stop: getattr(import_module("tiphys_plugin.server.service"), options.command)(options, stop)
    )


if __name__ == "__main__":
    sys.exit(main())
