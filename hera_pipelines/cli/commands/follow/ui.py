"""``tiphys ui``: serves web pages over a store."""

import ipaddress
import signal
import threading
from typing import Annotated

import typer

from hera_pipelines.cli.commands.runs import AskClusterOption, choose_submitter
from hera_pipelines.cli.screen import Screen
from hera_pipelines.cli.shared_options import (
    ArgoServerOption,
    ClusterOptions,
    ContextOption,
    KubeconfigOption,
    existing_store,
)

EXAMPLES = """\b
Examples:
  tiphys ui
  tiphys ui s3://ml-runs/tiphys
  tiphys ui s3://ml-runs/tiphys --cluster
  tiphys ui /mnt/runs --host 0.0.0.0 --port 8080
"""


def ui(
    command: typer.Context,
    url: Annotated[
        str | None,
        typer.Argument(
            metavar="[STORE]", help="Store: s3://bucket/prefix, file:///dir or a path. Default: that of `tiphys runs`."
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
            help="Also answer to this name, by which a proxy passes requests on; may be repeated.",
            show_default=False,
        ),
    ] = None,
    cluster: AskClusterOption = False,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    argo_server: ArgoServerOption = None,
) -> None:
    """Show the runs of a store as web pages.

    The pages need nothing but the store, so they also show runs whose cluster is
    gone. They only read. They have no login: beyond this machine, put a proxy in
    front that asks who it is. Prints the address; Ctrl-C ends it.
    """
    from hera_pipelines.cli.commands.follow.page_sources import AttemptLogReader
    from hera_pipelines.ui.app import build_app
    from hera_pipelines.ui.run_index import RunIndex
    from tiphys.service.http_server import AppServer

    screen: Screen = command.obj
    store = existing_store(screen, url)
    options = ClusterOptions(kubeconfig, context, None, argo_server)
    submitter = choose_submitter(command, cluster, options, screen.note)
    find_logs = AttemptLogReader(store, options.connect if cluster else None)
    index = RunIndex(store, submitter)
    allowed: tuple[str, ...] = ("localhost", "127.0.0.1", "[::1]", *(allow_host or ()))
    if warning := describe_reach(host, store.url):
        screen.note(warning)
        allowed = ("*",)
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    with AppServer(build_app(store, submitter, allowed, index, find_logs), host, port) as server:
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


def describe_reach(host: str, url: str) -> str:
    """Warning that others can read the store ``url`` on ``host``; empty if only this machine can."""
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    return "" if is_loopback else f"warning: everybody who reaches {host} can read {url}; the pages have no login"
