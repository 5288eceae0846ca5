"""``tiphys traces``: sends runs as traces to an OpenTelemetry collector.

Spans are derived from records, so the command may be repeated: ids are the same
each time.
"""

import json
import logging
import os
from collections.abc import Iterable, Iterator
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import FormatOption, StoreOption, complete_run, existing_store
from tiphys.errors import IntegrityError, NotFoundError, SettingsError, StoreError, UsageError, install_command
from tiphys.lineage.run_history import RunHistory
from tiphys.protocol.quantities import parse_duration_seconds
from tiphys.records import utc_now
from tiphys.store import list_runs

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from requests import Response

EXAMPLES = """\b
Examples:
  OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4318 tiphys traces digits-7xk2p
  tiphys traces --since 2h
  tiphys traces digits-7xk2p -o json | jq .name
"""
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_BATCH_SPANS = 100


def traces(
    context: typer.Context,
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN", help="Names of runs. Default: all runs.", autocompletion=complete_run),
    ] = None,
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
    begin = (utc_now() - timedelta(seconds=parse_duration_seconds(since))).timestamp() if since else 0.0
    run_store = existing_store(screen, store)
    _require_library()
    from hera_pipelines.traces.spans import describe_service

    collector = _Collector() if output is Format.TABLE else None
    histories = (RunHistory.for_display(run_store, name) for name in runs or list_runs(run_store))
    derived = _derive_spans(screen, histories, describe_service(), is_strict=bool(runs))
    spans = (span for span in derived if (span.end_time or 0) >= begin * 1e9)
    if collector is None:
        _print(screen, spans, output)
        return
    sent = _send(spans, collector)
    screen.note(f"sent {sent} span{'' if sent == 1 else 's'}")


def _derive_spans(
    screen: Screen, histories: Iterable[RunHistory], resource: "Resource", *, is_strict: bool
) -> "Iterator[ReadableSpan]":
    """The spans of runs; unless ``is_strict``, a note says which cannot be read and are left out."""
    from hera_pipelines.traces.spans import derive_spans

    for history in histories:
        try:
            spans = derive_spans(history, resource)
        except (IntegrityError, NotFoundError, UsageError) as error:
            if is_strict:
                raise
            screen.note(f"run {history.run} cannot be read, and is left out: {error}")
            continue
        for message in history.damaged:
            screen.note(f"damaged, so something is missing: {message}")
        yield from spans


def _require_library() -> None:
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise UsageError(f"this needs the library of OpenTelemetry: `{install_command('otel')}`") from error
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
    name = next((variable for variable in _ENDPOINTS if os.environ.get(variable)), None)
    if name is None:
        raise SettingsError(
            "no collector of OpenTelemetry is set; set OTEL_EXPORTER_OTLP_ENDPOINT, such as http://collector:4318, or "
            "print the spans with -o json"
        )
    protocol = next((value for variable in _PROTOCOLS if (value := os.environ.get(variable))), "http/protobuf")
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


def _print(screen: Screen, spans: "Iterator[ReadableSpan]", output: Format) -> None:
    for span in spans:
        if output is Format.YAML:
            screen.write("---")
        screen.document(json.loads(span.to_json()), output, indent=None)


def _send(spans: "Iterator[ReadableSpan]", collector: _Collector) -> int:
    """Send ``spans``; returns their number.

    Raises:
        StoreError: the collector did not take all.
    """
    sent = 0
    while batch := list(islice(spans, _BATCH_SPANS)):
        if reason := collector.take(batch):
            raise StoreError(
                f"the OpenTelemetry collector took {sent} spans and then failed ({reason}); run the command again, "
                "which sends equal ids for equal spans"
            )
        sent += len(batch)
    return sent
