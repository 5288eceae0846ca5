"""``tiphys traces``: sends runs as traces to an OpenTelemetry collector.

Spans are derived from records, so the command may be repeated: ids are the same
each time.
"""

import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import FormatOption, StoreOption, complete_run, existing_store
from tiphys.errors import IntegrityError, NotFoundError, SettingsError, StoreError, UsageError
from tiphys.protocol.quantities import parse_duration_seconds
from tiphys.records import utc_now
from tiphys.store import Store, list_runs, read_submissions

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from requests import Response

    from hera_pipelines.traces.spans import RunHistory

EXAMPLES = """\b
Examples:
  OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4318 tiphys traces digits-7xk2p
  tiphys traces digits-7xk2p --follow
  tiphys traces --since 2h
  tiphys traces digits-7xk2p -o json | jq .name
"""
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_BATCH_SPANS = 100
POLL_SECONDS = 10.0


def traces(
    context: typer.Context,
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help="Names of runs. Default: all runs.", autocompletion=complete_run),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Send new spans of the named runs until they have ended.")
    ] = False,
    since: Annotated[
        str, typer.Option("--since", metavar="DURATION", help="Only spans that ended since then, such as 2h or 3d.")
    ] = "",
    store: StoreOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Send runs as traces to an OpenTelemetry collector.

    A trace is a run; its spans are submissions, steps and attempts that have ended. The
    collector is that of the standard settings, such as OTEL_EXPORTER_OTLP_ENDPOINT. Spans are
    derived from the store, and have the same ids each time, so the command may be repeated.
    -o json prints them instead, one on a line.
    """
    screen: Screen = context.obj
    if follow and not runs:
        raise UsageError("--follow needs the names of runs; for all runs, repeat the command with --since")
    begin = (utc_now() - timedelta(seconds=parse_duration_seconds(since))).timestamp() if since else 0.0
    run_store = existing_store(screen, store)
    _require_library()
    from hera_pipelines.traces.spans import derive_spans, describe_service

    collector = _Collector() if output is Format.TABLE else None
    resource, sent = describe_service(), set[int]()

    def new_spans() -> "Iterator[ReadableSpan]":
        for history in _read_histories(screen, run_store, runs or ()):
            for span in derive_spans(history, resource):
                if span.context.span_id not in sent and (span.end_time or 0) >= begin * 1e9:
                    yield span

    while True:
        # Read before the spans, so that a run which ends in between is looked at once more.
        ended = not follow or all(
            submission.end for run in runs or () for submission in read_submissions(run_store, run)
        )
        complete = (
            _send(screen, new_spans(), collector, sent, follow)
            if collector
            else _print(screen, new_spans(), output, sent)
        )
        if not follow or (ended and complete):
            break
        time.sleep(POLL_SECONDS)
    if collector:
        screen.note(f"sent {len(sent)} span{'' if len(sent) == 1 else 's'}")


def _read_histories(screen: Screen, store: Store, names: Sequence[str]) -> "Iterator[RunHistory]":
    """The named runs; without ``names``, all that can be read. Notes what cannot be read."""
    from hera_pipelines.traces.spans import read_history

    for name in names or list(list_runs(store)):
        try:
            history = read_history(store, name)
        except (IntegrityError, NotFoundError, UsageError) as error:
            if names:
                raise
            screen.note(f"run {name} cannot be read, and is left out: {error}")
            continue
        for record in history.damaged:
            screen.note(f"damaged, so something is missing: {record.message}")
        yield history


def _require_library() -> None:
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise UsageError("this needs the library of OpenTelemetry: `pip install 'tiphys[otel]'`") from error
    # What it logs about its settings and the collector may hold credentials. Commands report failures themselves.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)


class _Collector:
    """The collector that the environment names.

    Raises:
        SettingsError: it names none, or one that spans cannot be sent to.
    """

    def __init__(self) -> None:
        import requests
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        _check_settings()
        self._status = 0
        session = requests.Session()
        session.hooks["response"].append(self._note_status)
        self._exporter = OTLPSpanExporter(session=session)

    def _note_status(self, response: "Response", *_: object, **__: object) -> None:
        self._status = response.status_code

    def take(self, spans: "list[ReadableSpan]") -> str:
        """Send ``spans``; returns why the collector did not take them, empty if it did.

        The library repeats what may pass, for OTEL_EXPORTER_OTLP_TIMEOUT.
        """
        from opentelemetry.sdk.trace.export import SpanExportResult

        self._status = 0
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS and 200 <= self._status < 300:  # to the library, a redirection is one
            return ""
        return f"status {self._status}" if self._status else "no answer; check address and certificate"


def _check_settings() -> None:
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        raise SettingsError("OpenTelemetry is disabled (OTEL_SDK_DISABLED); nothing was sent")
    if os.environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none":
        raise SettingsError("traces are disabled (OTEL_TRACES_EXPORTER=none); nothing was sent")
    name = next((one for one in _ENDPOINTS if os.environ.get(one)), None)
    if name is None:
        raise SettingsError(
            "no collector of OpenTelemetry is set; set OTEL_EXPORTER_OTLP_ENDPOINT, such as http://collector:4318, or "
            "print the spans with -o json"
        )
    protocol = next((value for one in _PROTOCOLS if (value := os.environ.get(one))), "http/protobuf")
    if protocol != "http/protobuf":
        raise SettingsError(
            "spans are sent as http/protobuf alone; unset OTEL_EXPORTER_OTLP_PROTOCOL, and name that port"
        )
    try:
        url = urlsplit(os.environ[name])
        valid = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise SettingsError(f"{name} is no URL of a collector; it must begin with http:// or https://")


def _print(screen: Screen, spans: "Iterator[ReadableSpan]", output: Format, sent: set[int]) -> bool:
    """Print ``spans``, each at once for a reader that follows, and add them to ``sent``; True, as all were taken."""
    for span in spans:
        if output is Format.YAML:
            screen.write("---")
        screen.document(json.loads(span.to_json()), output, indent=None)
        screen.out.file.flush()
        sent.add(span.context.span_id)
    return True


def _send(
    screen: Screen, spans: "Iterator[ReadableSpan]", collector: _Collector, sent: set[int], patient: bool
) -> bool:
    """Send ``spans`` and add them to ``sent``; whether the collector took all. ``patient``: say so if it did not.

    Raises:
        StoreError: the collector did not take spans, and ``patient`` is False.
    """
    while batch := list(islice(spans, _BATCH_SPANS)):
        if reason := collector.take(batch):
            problem = f"the OpenTelemetry collector took {len(sent)} spans and then failed ({reason})"
            if not patient:
                raise StoreError(f"{problem}; run the command again, which sends equal ids for equal spans")
            screen.note(f"{problem}; it is tried again")
            return False
        sent.update(span.context.span_id for span in batch)
    return True
