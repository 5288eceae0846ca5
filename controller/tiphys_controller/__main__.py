"""The controller as a process: ``python -m tiphys_controller``.

It only wires the parts together.
"""

import argparse
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import prometheus_client
import structlog

from tiphys.errors import TiphysError
from tiphys.kube import connect_to_cluster
from tiphys.service.http_server import AppServer, add_tls_options, read_tls_options
from tiphys.service.logging import configure_json_logging
from tiphys.store import TenantStores
from tiphys_controller.alerts.rules import DEFAULT_ALERT_RULES, read_alert_rules
from tiphys_controller.alerts.webhook import AlertInbox
from tiphys_controller.auto_resume.state import AutomationMode, AutoResumeLimits
from tiphys_controller.kubernetes.controller import Controller, ControllerDependencies, TriggerSettings
from tiphys_controller.server.access import AccessControl
from tiphys_controller.server.app import create_controller_app
from tiphys_controller.server.routes import create_alerts_route, create_storage_events_route
from tiphys_controller.submit.triggers.catalog import ObjectSources

_POD_NAME = "POD_NAME"
_log = structlog.get_logger()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; return the exit code."""
    options = _parser().parse_args(arguments)
    configure_json_logging()
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
    stores.check_formats()
    certificate = read_tls_options(options)
    api = connect_to_cluster()
    identity = os.environ.get(_POD_NAME) or socket.gethostname()
    inbox = AlertInbox(stores.store, namespaces) if options.token_file else None
    dependencies = ControllerDependencies(
        api=api,
        namespaces=namespaces,
        stores=stores.store,
        identity=identity,
        lease_namespace=options.lease_namespace or api.namespace,
        limits=_limits(options),
        inbox=inbox,
        rules=read_alert_rules(options.alert_rules) if options.alert_rules else DEFAULT_ALERT_RULES,
        janitor_mode=AutomationMode(options.janitor),
        triggers=_trigger_settings(options),
        agent_pods=options.agent_pods,
        descriptions=options.descriptions,
    )
    controller = Controller(dependencies)
    api_routes = []
    if inbox is not None:
        access = AccessControl(options.token_file, controller.metrics.observe_call)
        api_routes.append(create_alerts_route(inbox, access))
    if token_file := options.storage_events_token_file or options.token_file:
        access = AccessControl(token_file, controller.metrics.observe_call)
        api_routes.append(create_storage_events_route(controller.triggers, access))
    app = create_controller_app(controller.check_ready, controller.metrics.render, api_routes)
    with AppServer(app, options.host, options.port, certificate) as server:
        _log.info(
            "controller.started", port=urlsplit(server.url).port, store=options.store, namespaces=namespaces or "all"
        )
        controller.run(stop)
        _log.info("controller.stopping")


def _limits(options: argparse.Namespace) -> AutoResumeLimits:
    return AutoResumeLimits(
        mode=AutomationMode(options.auto_resume),
        resumes_per_minute=options.resumes_per_minute,
        absent_seconds=options.absent_seconds,
    )


def _trigger_settings(options: argparse.Namespace) -> TriggerSettings | None:
    if not options.trigger_source:
        return None
    sources = ObjectSources(options.trigger_source, options.store)
    return TriggerSettings(sources, options.trigger_interval_seconds, options.triggered_runs_per_minute)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tiphys_controller", description=__doc__)
    parser.add_argument(
        "--store",
        required=True,
        help="URL of the store that holds the runs; {namespace} in it stands for the workflow's namespace",
    )
    watched = parser.add_mutually_exclusive_group(required=True)
    watched.add_argument("--namespace", action="append", help="namespace of workflows; may be repeated")
    watched.add_argument("--all-namespaces", action="store_true", help="serve workflows of the whole cluster")
    parser.add_argument("--lease-namespace", default="", help="namespace of the Lease (default: that of this pod)")
    parser.add_argument(
        "--no-agent-pods",
        dest="agent_pods",
        action="store_false",
        help="neither watch nor delete agent pods, because Argo creates none (disableAgentPodCreation)",
    )
    parser.add_argument(
        "--no-descriptions",
        dest="descriptions",
        action="store_false",
        help="do not write title and description of Workflows for Argo's UI",
    )
    parser.add_argument(
        "--auto-resume",
        choices=[mode.value for mode in AutomationMode],
        default=AutomationMode.OFF.value,
        help="whether to resume runs whose pipelines enable it automatically (default: %(default)s)",
    )
    parser.add_argument(
        "--janitor",
        choices=[mode.value for mode in AutomationMode],
        default=AutomationMode.OFF.value,
        help="whether to remove unfinished uploads and old alerts from storage (default: %(default)s)",
    )
    parser.add_argument(
        "--resumes-per-minute",
        type=_positive,
        default=AutoResumeLimits.resumes_per_minute,
        help="largest average rate of automatic resumes, all runs together (default: %(default)g)",
    )
    parser.add_argument(
        "--absent-seconds",
        type=_positive,
        default=AutoResumeLimits.absent_seconds,
        help="seconds that a Workflow must be gone before its run counts as ended (default: %(default)g)",
    )
    parser.add_argument(
        "--trigger-source",
        action="append",
        metavar="URL",
        help="s3://bucket/prefix at which triggers of WorkflowTemplates may look; {namespace} in it stands for their "
        "namespace; may be repeated (default: triggers are off)",
    )
    parser.add_argument(
        "--trigger-interval-seconds",
        type=_positive,
        default=TriggerSettings.interval_seconds,
        help="seconds between two listings of a bucket, which find lost notifications (default: %(default)g)",
    )
    parser.add_argument(
        "--triggered-runs-per-minute",
        type=_positive,
        default=TriggerSettings.runs_per_minute,
        help="largest average rate of runs that triggers make in one namespace (default: %(default)g)",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        help="file with the token of the HTTP API; without it the API is disabled (default: none)",
    )
    parser.add_argument(
        "--storage-events-token-file",
        type=Path,
        help="file with a token that opens /v1/storage-events only, which then does not take the token of the API "
        "(default: it takes that)",
    )
    parser.add_argument(
        "--alert-rules",
        type=Path,
        help="JSON file that maps alert names to actions (default: record an Event for each alert)",
    )
    parser.add_argument(
        "--host",
        default="0.0.0.0",  # noqa: S104  probes and scrapes come from outside of the pod
        help="address to listen on (default: %(default)s)",
    )
    parser.add_argument(
        "--port", default=7243, type=int, help="port of /healthz, /readyz and /metrics; 0 for a free one"
    )
    add_tls_options(parser)
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


if __name__ == "__main__":
    code = main()
    # A thread that waits for storage must not delay the exit.
    sys.stderr.flush()
    os._exit(code)
