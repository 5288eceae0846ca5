"""The commands of the plugin's process and their flags. What they do is imported only once it is chosen.

How often a service looks for objects that only hold each other.

Hardly anything here does, and what is looked at each time is a book of thousands
of entries, and all that libraries have loaded.

The plugin as a process: ``python -m tiphys_plugin``. It has no other duty than to start the one that is chosen.
"""

import argparse
import gc
import signal
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import prometheus_client

from tiphys.errors import TiphysError
from tiphys.service.logging import log_json

TOKEN = "TIPHYS_PLUGIN_TOKEN"  # noqa: S105  the name of a variable
TOKEN_FILE = "TIPHYS_PLUGIN_TOKEN_FILE"  # noqa: S105
_EVERYWHERE = "0.0.0.0"  # noqa: S104  a pod is reached by its address; who calls has to prove who it is

_SERVE = """\
examples:
  python -m tiphys_plugin serve --store s3://ml/tiphys --namespace ml
  python -m tiphys_plugin serve --store 's3://ml/{namespace}' --namespace vision --namespace speech
  python -m tiphys_plugin serve --store 's3://ml/{namespace}' --all-namespaces"""
_AGENT = """\
examples:
  python -m tiphys_plugin agent --store s3://ml/tiphys --namespace ml
  python -m tiphys_plugin agent --store 's3://ml/{namespace}' --all-namespaces"""
_EMBEDDED = """\
examples:
  TIPHYS_PLUGIN_TOKEN_FILE=token python -m tiphys_plugin embedded \\
      --store ./store --cluster-dir ./cluster --ledger ledger.db --queues queues.yaml"""


def parser() -> argparse.ArgumentParser:
    """Options carry ``module`` and ``function``, which is called with them and an event that says stop."""
    top = argparse.ArgumentParser(prog="python -m tiphys_plugin", description="Answer Argo's plugin steps.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    serve = _command(
        commands, "serve", _SERVE, "answer the sidecars of a cluster, each for the namespace of its service account"
    )
    _add_installation(serve)
    serve.set_defaults(module="tiphys_plugin.server.service", function="serve")
    agent = _command(
        commands, "agent", _AGENT, "answer the task sets of a cluster, in the place of Argo's agent pods; one leads"
    )
    _add_installation(agent)
    agent.set_defaults(module="tiphys_plugin.server.service", function="agent")
    embedded = _command(commands, "embedded", _EMBEDDED, "serve one machine, with a folder in the place of a cluster")
    _add_embedded(embedded)
    embedded.set_defaults(module="tiphys_plugin.server.embedded", function="serve")
    return top


def _command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, examples: str, what: str
) -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    sentence = f"{what[:1].upper()}{what[1:]}."
    return commands.add_parser(name, help=what, description=sentence, epilog=examples, formatter_class=raw)


def _add_installation(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--store",
        required=True,
        help="URL of the storage that runs are kept in; {namespace} in it stands for that of the workflow, and must "
        "where more than one is served",
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
    command.add_argument("--ledger-name", default="default", help="name of the GPULedger (default: %(default)s)")
    command.add_argument(
        "--release-namespace", default="", help="namespace of the GPULedger and the Leases (default: that of this pod)"
    )
    _add_address(command, _EVERYWHERE)


def _add_embedded(command: argparse.ArgumentParser) -> None:
    command.description = f"{command.description} The token is read from the file {TOKEN_FILE}, or from {TOKEN}."
    command.add_argument("--store", required=True, help="URL of the storage that runs are kept in")
    command.add_argument("--cluster-dir", required=True, type=Path, help="folder that holds workflows and pods")
    command.add_argument(
        "--ledger",
        required=True,
        type=Path,
        help="SQLite file of GPU leases, on a durable disk; without it, only attempts with live pods are found again",
    )
    command.add_argument("--queues", type=Path, help="queue file; without one, GPUs are not limited")
    _add_address(command, "127.0.0.1")


def _add_address(command: argparse.ArgumentParser, host: str) -> None:
    command.add_argument("--host", default=host, help="address to listen on (default: %(default)s)")
    command.add_argument(
        "--port", default=7243, type=int, help="port to listen on; 0 for a free one (default: %(default)s)"
    )


_NEW_OBJECTS = 10_000
"""So many come before a look at the young ones: one walk along the line makes thousands, and drops them at its end."""
_FULL_COLLECTION = 1000
"""So many collections of younger objects come before one that looks at everything: boto3 alone has loaded so much
that it holds up every call for 60 ms, and the documents of a few hundred steps are enough to bring it about."""


def collect_seldom() -> None:
    """Have this process collect garbage as seldom as is good for a service."""
    gc.set_threshold(_NEW_OBJECTS, gc.get_threshold()[1], _FULL_COLLECTION)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; answer the calls under way, then return the exit code."""
    options = parser().parse_args(arguments)
    log_json()
    collect_seldom()
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # it has no annotations
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        getattr(import_module(options.module), options.function)(options, stop)
    except TiphysError as error:
        print(f"tiphys-plugin: {error}", file=sys.stderr)  # noqa: T201  this is the command's own voice
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
