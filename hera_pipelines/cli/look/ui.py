"""``tiphys ui``: serves web pages over a store."""

import ipaddress
import os
import secrets
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hera_pipelines.cli.look.runs import AskClusterOption, choose_submitter
from hera_pipelines.cli.screen import Screen
from hera_pipelines.cli.shared_options import (
    DEFAULT_STATE,
    InstallationOption,
    InstallationOptions,
    WorkflowOptions,
    existing_store,
    with_option_groups,
)
from tiphys.errors import UsageError

if TYPE_CHECKING:
    from hera_pipelines.ui.gpu_page import GpuSource
    from hera_pipelines.ui.page_access import PageAccess

TOKEN_VARIABLE = "TIPHYS_UI_TOKEN"  # noqa: S105  the name of a variable
EXAMPLES = """\b
Examples:
  tiphys ui
  tiphys ui s3://ml-runs/tiphys
  tiphys ui s3://ml-runs/tiphys --cluster
  tiphys ui /mnt/runs --host 0.0.0.0 --port 8080
  tiphys ui s3://ml-runs/tiphys --cluster --actions
  tiphys ui s3://ml-runs/tiphys --cluster --actions --trusted-proxy 10.0.0.7 --allow-host runs.example.org
"""


@with_option_groups
def ui(
    command: typer.Context,
    *,
    url: Annotated[
        str | None,
        typer.Argument(
            metavar="STORE",
            help="Store: s3://, gs:// or az:// URL, file:///dir or a path. Default: that of `tiphys runs`.",
        ),
    ] = None,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=0, max=65535, help="Port; 0 takes a free one.")
    ] = 8321,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="Also answer to this name, by which people or a proxy ask for the pages; may be repeated.",
            show_default=False,
        ),
    ] = None,
    actions: Annotated[
        bool,
        typer.Option(
            "--actions",
            help="Let visitors resume, fork and stop runs. They sign in with the token of the variable "
            f"{TOKEN_VARIABLE}, or with a new one that is printed.",
        ),
    ] = False,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(
            "--trusted-proxy",
            metavar="ADDRESS",
            help="Address or network of a proxy that names the visitors, instead of a token; may be repeated.",
            show_default=False,
        ),
    ] = None,
    identity_header: Annotated[
        str, typer.Option("--identity-header", metavar="NAME", help="Header in which the proxy names the visitor.")
    ] = "X-Forwarded-User",
    queues: Annotated[
        Path | None,
        typer.Option("--queues", metavar="FILE", help="Queue file of the engine on this machine, for its page."),
    ] = None,
    ledger: Annotated[
        str, typer.Option("--ledger", metavar="NAME", help="Name of the GPULedger object of the cluster.")
    ] = "default",
    namespace: InstallationOption = None,
    cluster: AskClusterOption = False,
    options: WorkflowOptions,
) -> None:
    """Show the runs of a store as web pages.

    The pages need nothing but the store, so they also show runs whose cluster is
    gone. They only read, unless --actions is given. Reading needs no login: beyond
    this machine, put a proxy in front that asks who it is. Prints the address;
    Ctrl-C ends it.
    """
    from hera_pipelines.cli.look.page_gpus import ClusterGpus, LocalGpus
    from hera_pipelines.cli.look.page_sources import AttemptLogReader, CommandActions
    from hera_pipelines.ui.action_routes import ActionRoutes
    from hera_pipelines.ui.app import build_app
    from hera_pipelines.ui.run_index import RunIndex
    from tiphys.service.http_server import AppServer

    screen: Screen = command.obj
    store = existing_store(screen, url)
    submitter = choose_submitter(command, cluster, options, screen.note)
    find_logs = AttemptLogReader(store, options.connect if cluster else None)
    allowed = ("localhost", "127.0.0.1", "[::1]", f"[{host}]" if ":" in host else host, *(allow_host or ()))
    if warning := describe_reach(host, store.url):
        screen.note(warning)
        if actions and not trusted_proxy:
            screen.note("warning: the token crosses the network as it is typed; put a proxy with TLS in front")
        if not allow_host:
            screen.note(f"the pages answer to {', '.join(allowed)} alone; allow another name with --allow-host NAME")
    if trusted_proxy and not actions:
        raise UsageError("--trusted-proxy names who may act; add --actions")
    routes = None
    if actions:
        backend = CommandActions(store, submitter, options if cluster else None)
        access = _open_access(screen, trusted_proxy or (), identity_header)
        routes = ActionRoutes(store, backend, access, submitter)
    gpus: GpuSource | None = None
    if cluster:
        gpus = ClusterGpus(InstallationOptions(namespace, options.context, options.kubeconfig).connect, ledger)
    elif (file := DEFAULT_STATE / "ledger.db").exists():
        gpus = LocalGpus(file, queues)
    index = RunIndex(store, submitter, reads_holds=gpus is not None)
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    app = build_app(store, submitter, allowed, index, find_logs, routes, gpus)
    with AppServer(app, host, port) as server:
        index.start()
        try:
            screen.write(f"{server.url}/")
            screen.out.file.flush()
            screen.note("Ctrl-C ends the pages")
            stopped.wait()
        except KeyboardInterrupt:
            pass
        finally:
            index.stop()


def _open_access(screen: Screen, trusted_proxies: Sequence[str], identity_header: str) -> "PageAccess":
    """Who may act: who types the token of the environment or a new one, or whom a proxy names."""
    from hera_pipelines.ui.page_access import PageAccess

    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token and not trusted_proxies:
        token = secrets.token_urlsafe(24)
        screen.note(f"token to sign in with: {token}")
    return PageAccess(token, trusted_proxies, identity_header)


def describe_reach(host: str, url: str) -> str:
    """Warning that others can read the store ``url`` on ``host``; empty if only this machine can."""
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    return "" if is_loopback else f"warning: everybody who reaches {host} can read {url}; the pages have no login"
