"""``tiphys conformance``: proves on a bucket and on a cluster what runs rest on."""

import json
import secrets
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hera_pipelines.cli.cluster.findings import show_findings
from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import (
    ClusterOptions,
    FormatOption,
    NamespaceOptions,
    StoreOption,
    existing_store,
    with_option_groups,
)
from tiphys.errors import TiphysError, UsageError
from tiphys.records import utc_now
from tiphys.store import DirectoryStore, open_store
from tiphys.store.abandoned_uploads import find_abandoned_uploads
from tiphys.store.layout import CONTROL, probe_folder

if TYPE_CHECKING:
    from tiphys_controller.doctor import Finding

    from hera_pipelines.conformance.cluster_promises import ClusterPromises

EXAMPLES = """\b
Examples:
  tiphys conformance --store s3://ml-runs/tiphys
  tiphys conformance --store s3://ml-runs/tiphys --output conformance.html
  tiphys conformance --store s3://ml-runs/ml/tiphys --cluster -n ml --image ghcr.io/acme/digits:1.4 --queue research
"""
_SUFFIXES = (".html", ".json")


class IncompleteConformanceError(TiphysError):
    """No promise is broken, and some were not tried."""

    exit_code = 6


@with_option_groups
def conformance(
    command: typer.Context,
    *,
    store: StoreOption = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Also run two small Workflows in a namespace, whose store this must be.")
    ] = False,
    options: NamespaceOptions,
    image: Annotated[
        str, typer.Option("--image", metavar="IMAGE", help="With --cluster: an image with Python and tiphys[numpy].")
    ] = "",
    queue: Annotated[
        str, typer.Option("--queue", metavar="NAME", help="With --cluster: the queue whose quota is tried.")
    ] = "",
    minutes: Annotated[
        float, typer.Option("--minutes", min=0.1, max=600, help="Time limit; what has no turn by then is not tried.")
    ] = 15.0,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="Seed of moments and victims. Default: a new one.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--output", metavar="DIR|FILE", help="Write the report: FILE.html, FILE.json, or both in a DIR."),
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Prove on a bucket and a cluster what runs rest on, and report what held.

    Real clients race, trainings are killed in their commits, checkpoints are
    damaged: all in a folder of the store that no run uses. With --cluster, a
    Workflow is submitted twice and loses its pod, and one asks for too many GPUs.
    All of it is removed again, also after Ctrl-C. Exit code 1 if a promise is
    broken, 6 if none is and not all could be tried.
    """
    from hera_pipelines.conformance.promises import ON_CLUSTER, try_promises
    from hera_pipelines.conformance.report import build_report, read_versions
    from hera_pipelines.conformance.store_promises import StorePromises

    screen: Screen = command.obj
    if not cluster and (options.is_given or image or queue):
        raise UsageError("--image, --queue, -n, --context and --kubeconfig are for a cluster; add --cluster")
    began_at, deadline = utc_now(), time.monotonic() + 60 * minutes
    name = f"conformance-{began_at:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
    if file and file.suffix not in _SUFFIXES:
        file.mkdir(parents=True, exist_ok=True)
    run_store = existing_store(screen, store)
    seed = secrets.randbelow(2**31) if seed is None else seed
    url = f"{run_store.url.rstrip('/')}/{probe_folder(CONTROL, name)}".rstrip("/")
    screen.note(f"seed {seed}; everything is written below {url}, and removed at the end")
    findings: list[Finding] = []
    versions: dict[str, str] = {}
    observed, namespace, interrupt = None, "", None
    with ExitStack() as clean_up:
        # With SIGTERM, CI ends a job.
        clean_up.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, signal.default_int_handler))
        try:
            clean_up.callback(_clean, screen, url, partial(_remove_folder, url))
            rng = Random(seed)  # noqa: S311  it guards no secret
            trials = StorePromises(open_store(url), open_store(url), rng, deadline).trials()
            if cluster:
                try:
                    promises = _observe(options, run_store, image, queue, name, seed, deadline)
                    clean_up.callback(promises.api.close)
                    clean_up.callback(_clean, screen, f"run {name}", partial(promises.remove, screen.error))
                    observed, namespace = promises.observed, promises.api.namespace
                    trials += promises.trials()
                except TiphysError as error:
                    trials += [(promise, partial(_fail, error)) for promise in ON_CLUSTER]
            versions = read_versions(run_store, observed)
            try_promises(trials, findings, deadline, screen.note)
        except KeyboardInterrupt as error:
            interrupt = error
    ended_at = utc_now().isoformat()
    facts = {"store": run_store.url, "namespace": namespace, "seed": seed, "versions": versions}
    report = build_report(findings, beganAt=began_at.isoformat(), endedAt=ended_at, **facts)
    if output is Format.TABLE:
        show_findings(screen, findings, output, {})
    else:
        screen.document(report, output)
    if file:
        _save(screen, report, file, f"{began_at:conformance-%Y-%m-%dT%H-%M-%SZ}")
    _conclude(report, interrupt)


def _conclude(report: dict[str, Any], interrupt: KeyboardInterrupt | None) -> None:
    """Raise what the exit code follows from."""
    if interrupt:
        raise interrupt
    if report["result"] == "broken":
        raise TiphysError(f"{report['store']} breaks a promise: {report['summary']}; each finding says what to do")
    if report["result"] == "not tried":
        raise IncompleteConformanceError(f"not everything could be tried: {report['summary']}; each finding says why")


def _observe(options: ClusterOptions, *given: Any) -> "ClusterPromises":
    from hera_pipelines.conformance.cluster_promises import ClusterPromises

    return ClusterPromises.observe(options.connect(), *given)


def _fail(error: TiphysError) -> "Finding":
    """The trial of a promise that cannot be tried."""
    raise error


def _clean(screen: Screen, what: str, remove: Callable[[], object]) -> None:
    """Remove, and go on if that fails: the report must be written."""
    try:
        remove()
    except TiphysError as error:
        screen.error(f"tiphys: {what} may be left, remove it: {error}")


def _remove_folder(url: str) -> None:
    """Remove everything of the store ``url``, and nothing outside of it.

    Raises:
        StoreError: storage does not answer.
    """
    store = open_store(url)
    # Again until nothing is listed: a program that was just killed may have had a write under way.
    while infos := list(store.list("")):
        for info in infos:
            store.delete(info.key)
    for upload in find_abandoned_uploads(store, timedelta(days=-1)):
        upload.remove()
    if isinstance(store, DirectoryStore):
        shutil.rmtree(store.folder, ignore_errors=True)
        with suppress(OSError):  # they hold something else
            store.folder.parent.rmdir()
            store.folder.parent.parent.rmdir()


def _save(screen: Screen, report: dict[str, Any], file: Path, name: str) -> None:
    from hera_pipelines.conformance.report import report_page

    for suffix in (file.suffix,) if file.suffix in _SUFFIXES else _SUFFIXES:
        text = report_page(report) if suffix == ".html" else json.dumps(report, indent=2) + "\n"
        screen.save(file if file.suffix == suffix else file / f"{name}{suffix}", text, "report")
