"""``tiphys events``: what happened to a run, in order."""

import time
from collections.abc import Iterator
from typing import Annotated

import typer

from hera_pipelines.cli.location import StoreOption, existing_store
from hera_pipelines.cli.screen import Format, Screen
from tiphys.lineage import timeline
from tiphys.records import Event
from tiphys.store import Store, read_run, submissions

EXAMPLES = """\b
Examples:
  tiphys events digits-7xk2p
  tiphys events digits-7xk2p --follow -o json | jq .message
"""

_POLL_SECONDS = 1.0


def events(
    context: typer.Context,
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
    store: StoreOption = None,
    output: Annotated[Format, typer.Option("-o", "--format", help="json gives one event per line.")] = Format.TABLE,
) -> None:
    """Tell what happened to a run: submissions, attempts, checkpoints, and what was skipped and why."""
    screen: Screen = context.obj
    place = existing_store(screen, store)
    read_run(place, run)
    for event in _following(place, run) if follow else timeline(place, run):
        _print(screen, event, output)


def _following(store: Store, run: str) -> Iterator[Event]:
    """Events as they come; ends when the last submission is sealed and all is told."""
    told: set[str] = set()
    while True:
        sealed = all(submission.end for submission in submissions(store, run))
        for event in timeline(store, run):
            identity = event.model_dump_json()
            if identity not in told:
                told.add(identity)
                yield event
        if sealed:
            return
        time.sleep(_POLL_SECONDS)


def _print(screen: Screen, event: Event, output: Format) -> None:
    if output == Format.JSON:
        screen.write(event.model_dump_json(exclude_none=True))
    elif output == Format.YAML:
        screen.write("---")
        screen.document(event.model_dump(mode="json", exclude_none=True), output)
    else:
        clock = event.at.astimezone().strftime("%H:%M:%S.%f")[:-3]
        place = f"{event.step}/{event.attempt}" if event.attempt else event.step
        screen.write(f"{clock}  {event.name:<24}{place:<16}{event.message}")
    screen.out.file.flush()
