"""``tiphys openlineage``: sends runs as events to an OpenLineage server.

Events are derived from records, so the command may be repeated: ids are the same
each time.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import FormatOption, StoreOption, complete_run, existing_store
from hera_pipelines.run_histories import print_document, read_begin, read_histories, repeat_until_ended
from tiphys.errors import SettingsError, StoreError, UsageError
from tiphys.store import Store

if TYPE_CHECKING:
    from openlineage.client import OpenLineageClient
    from openlineage.client.event_v2 import RunEvent

EXAMPLES = """\b
Examples:
  OPENLINEAGE_URL=http://marquez:5000 tiphys openlineage digits-7xk2p
  tiphys openlineage digits-7xk2p --follow
  tiphys openlineage --since 2h
  tiphys openlineage digits-7xk2p -o json | jq .eventType
"""
_CLOSE_SECONDS = 60.0
"""For transports that send in the background."""


def openlineage(
    context: typer.Context,
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help="Names of runs. Default: all runs.", autocompletion=complete_run),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Send new events of the named runs until they have ended.")
    ] = False,
    since: Annotated[
        str, typer.Option("--since", metavar="DURATION", help="Only events since then, such as 2h or 3d.")
    ] = "",
    namespace: Annotated[
        str,
        typer.Option(
            "--namespace", envvar="OPENLINEAGE_NAMESPACE", metavar="NAME", help="Namespace of the jobs, for the server."
        ),
    ] = "tiphys",
    store: StoreOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Send runs as events to an OpenLineage server.

    Events tell what each attempt read and wrote. The server is that of the standard
    settings of OpenLineage, such as OPENLINEAGE_URL. Events are derived from the store,
    and have the same ids each time, so the command may be repeated. -o json prints them
    instead, one on a line.
    """
    screen: Screen = context.obj
    begin = read_begin(runs or (), follow, since)
    run_store = existing_store(screen, store)
    _require_client()
    client = _connect() if output is Format.TABLE else None
    sent: set[str] = set()

    def send() -> bool:
        events = _new_events(screen, run_store, runs or (), namespace, begin, sent)
        return _send(screen, events, client, sent, follow) if client else _print(screen, events, output, sent)

    repeat_until_ended(run_store, runs or (), follow, send)
    if client:
        if not client.close(_CLOSE_SECONDS):
            raise StoreError(f"the OpenLineage server did not take all of {len(sent)} events; run the command again")
        screen.note(f"sent {len(sent)} event{'' if len(sent) == 1 else 's'}")


def _require_client() -> None:
    try:
        import openlineage.client  # noqa: F401
    except ImportError as error:
        raise UsageError("this needs the client of OpenLineage: `pip install 'tiphys[openlineage]'`") from error


def _connect() -> "OpenLineageClient":
    """The client, as the environment or the configuration file of OpenLineage sets it up."""
    from openlineage.client import OpenLineageClient

    try:
        client = OpenLineageClient()
        kind = client.transport.kind
    except Exception as error:  # each transport has errors of its own
        raise SettingsError(f"the settings of OpenLineage are not valid: {type(error).__name__}: {error}") from error
    if kind == "noop":
        raise SettingsError("OpenLineage is disabled (OPENLINEAGE_DISABLED, or the transport noop); nothing was sent")
    if kind == "console":
        raise SettingsError(
            "no server of OpenLineage is set; set OPENLINEAGE_URL, or write openlineage.yml, or print the events with "
            "-o json"
        )
    return client


def _print(screen: Screen, events: "Iterator[tuple[str, RunEvent]]", output: Format, sent: set[str]) -> bool:
    """Print ``events`` and add them to ``sent``; True, as all were taken."""
    for identity, _ in events:
        print_document(screen, identity, output)
        sent.add(identity)
    return True


def _new_events(
    screen: Screen, store: Store, names: Sequence[str], namespace: str, begin: datetime | None, sent: set[str]
) -> "Iterator[tuple[str, RunEvent]]":
    """Events that were not sent yet, each with its JSON; without ``names``, of all runs that can be read."""
    from openlineage.client.serde import Serde

    from hera_pipelines.openlineage.events import derive_events

    for history in read_histories(screen, store, names):
        for event in derive_events(history, namespace):
            identity = Serde.to_json(event)
            if identity not in sent and (begin is None or datetime.fromisoformat(event.eventTime) >= begin):
                yield identity, event


def _send(
    screen: Screen,
    events: "Iterator[tuple[str, RunEvent]]",
    client: "OpenLineageClient",
    sent: set[str],
    patient: bool,
) -> bool:
    """Send ``events`` and add them to ``sent``; whether the server took all. ``patient``: say so if it did not.

    Raises:
        StoreError: the server did not take an event, and ``patient`` is False.
    """
    for identity, event in events:
        try:
            client.emit(event)
        except Exception as error:  # each transport has its own errors; their texts may hold secrets
            status = getattr(getattr(error, "response", None), "status_code", "")
            reason = f"{type(error).__name__} {status}".rstrip()
            problem = f"the OpenLineage server took {len(sent)} events and then failed ({reason})"
            if not patient:
                raise StoreError(f"{problem}; run the command again, which sends equal ids for equal events") from error
            screen.note(f"{problem}; it is tried again")
            return False
        sent.add(identity)
    return True
