"""The controller as a process: ``python -m tiphys_controller``. It only wires the parts together."""

import argparse
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import prometheus_client
import structlog

from tiphys.errors import TiphysError
from tiphys.kube import connect
from tiphys.service.logging import log_json
from tiphys.store import TenantStores
from tiphys_controller.alerts.rules import NOTIFY_OF_ALL, read_rules
from tiphys_controller.alerts.webhook import Inbox
from tiphys_controller.auto_resume.state import Limits, Mode
from tiphys_controller.kubernetes.controller import Controller, HealthServer, Surroundings, submitter_of
from tiphys_controller.server.access import Door
from tiphys_controller.server.routes import Calls

_POD_NAME = "POD_NAME"
_log = structlog.get_logger()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; return the exit code."""
    options = _parser().parse_args(arguments)
    log_json()
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # it has no annotations
    try:
        _run(options)
    except TiphysError as error:
        print(f"tiphys-controller: {error}", file=sys.stderr)  # noqa: T201  this is the command's own voice
        return error.exit_code
    return 0


def _run(options: argparse.Namespace) -> None:
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    namespaces = None if options.all_namespaces else tuple(dict.fromkeys(options.namespace))
    stores = TenantStores(options.store, namespaces)
    api = connect()
    identity = os.environ.get(_POD_NAME) or socket.gethostname()
    inbox = Inbox(stores.store, namespaces) if options.token_file else None
    surroundings = Surroundings(
        api=api,
        namespaces=namespaces,
        stores=stores.store,
        identity=identity,
        lease_namespace=options.lease_namespace or api.namespace,
        ledger=options.project_ledger,
        limits=_limits(options),
        inbox=inbox,
        rules=read_rules(options.alert_rules) if options.alert_rules else NOTIFY_OF_ALL,
        janitor=Mode(options.janitor),
    )
    controller = Controller(surroundings)
    calls = []
    if inbox is not None:
        door = Door(options.token_file, controller.metrics.note_call)
        calls = Calls(inbox, stores.store, submitter_of(api), namespaces).routes(door)
    with HealthServer(controller, options.host, options.port, calls) as health:
        _log.info("controller.started", port=health.port, store=options.store, namespaces=namespaces or "all")
        controller.run(stop)
        _log.info("controller.stopping")


def _limits(options: argparse.Namespace) -> Limits:
    return Limits(
        mode=Mode(options.auto_resume), per_minute=options.resumes_per_minute, absent_seconds=options.absent_seconds
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tiphys_controller", description=__doc__)
    parser.add_argument(
        "--store", required=True, help="URL of the storage that runs are kept in; {namespace} in it is the workflow's"
    )
    watched = parser.add_mutually_exclusive_group(required=True)
    watched.add_argument("--namespace", action="append", help="namespace of workflows; may be repeated")
    watched.add_argument("--all-namespaces", action="store_true", help="workflows of the whole cluster")
    parser.add_argument("--lease-namespace", default="", help="namespace of the Lease (default: that of this pod)")
    parser.add_argument(
        "--project-ledger",
        default="",
        metavar="NAME",
        help="GPULedger beside the Lease that is shown as GPUQueue and GPULease objects (default: none)",
    )
    parser.add_argument(
        "--auto-resume",
        choices=[mode.value for mode in Mode],
        default=Mode.OFF.value,
        help="whether runs whose pipelines ask for it go on by themselves (default: %(default)s)",
    )
    parser.add_argument(
        "--janitor",
        choices=[mode.value for mode in Mode],
        default=Mode.OFF.value,
        help="whether uploads that nobody finished and old alerts are removed from storage (default: %(default)s)",
    )
    parser.add_argument(
        "--resumes-per-minute",
        type=_positive,
        default=Limits.per_minute,
        help="the most that are resumed by themselves, all together and on average (default: %(default)g)",
    )
    parser.add_argument(
        "--absent-seconds",
        type=_positive,
        default=Limits.absent_seconds,
        help="so long must a Workflow be gone before its run counts as ended (default: %(default)g)",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        help="file with the token for alerts and calls about runs; without it there are none (default: none)",
    )
    parser.add_argument(
        "--alert-rules",
        type=Path,
        help="JSON file that says what to do for which alert (default: tell of it, and do nothing)",
    )
    parser.add_argument(
        "--host",
        default="0.0.0.0",  # noqa: S104  probes and scrapes come from outside of the pod
        help="address to listen on (default: %(default)s)",
    )
    parser.add_argument(
        "--port", default=7243, type=int, help="port of /healthz, /readyz and /metrics; 0 for a free one"
    )
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


if __name__ == "__main__":
    code = main()
    # A thread that waits for storage must not hold up the end of the process.
    sys.stderr.flush()
    os._exit(code)
