"""Whole runs for commands that send them to another system.

The store is the queue: what is sent is derived from records, so nothing that runs waits for the other system, and
nothing is lost while it is down.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from hera_pipelines.cli.screen import Format, Screen
from tiphys.errors import IntegrityError, NotFoundError, UsageError
from tiphys.lineage import LineageTree
from tiphys.lineage.tree import build_lineage_tree
from tiphys.protocol.compiled_workflow import CompiledPipeline
from tiphys.protocol.quantities import parse_duration_seconds
from tiphys.records import RunRecord, utc_now
from tiphys.store import (
    Attempt,
    DamagedRecord,
    Store,
    Submission,
    list_runs,
    read_all_attempts,
    read_current_run,
    read_run,
    read_submissions,
)

POLL_SECONDS = 10.0


class RunHistory(NamedTuple):
    """The records of one run."""

    store: Store
    record: RunRecord
    pipeline: CompiledPipeline
    """Of the newest submission."""
    submissions: Sequence[Submission]
    attempts: Mapping[str, Sequence[Attempt]]
    """By step id."""
    tree: LineageTree
    damaged: Sequence[DamagedRecord]
    """Records that cannot be read; an attempt whose end is damaged has failed for an unknown cause."""


def read_history(store: Store, run: str) -> RunHistory:
    """Read ``run``. Costs what `tiphys events` costs.

    Raises:
        NotFoundError: the store has no such run.
    """
    damaged: list[DamagedRecord] = []
    record, current = read_run(store, run), read_current_run(store, run)
    attempts = read_all_attempts(store, run, damaged)
    return RunHistory(
        store=store,
        record=record,
        pipeline=CompiledPipeline.from_manifest(current.workflow),
        submissions=read_submissions(store, run, damaged),
        attempts=attempts,
        tree=build_lineage_tree(store, current, attempts, ()),
        damaged=damaged,
    )


def read_histories(screen: Screen, store: Store, names: Sequence[str]) -> Iterator[RunHistory]:
    """The named runs; without ``names``, all that can be read. Notes what cannot be read.

    Raises:
        NotFoundError: the store has no such run.
        IntegrityError: a named run cannot be read.
    """
    for name in names or list(list_runs(store)):
        try:
            history = read_history(store, name)
        except (IntegrityError, NotFoundError, UsageError) as error:
            if names:
                raise
            screen.note(f"run {name} cannot be read, and is left out: {error}")
            continue
        for one in history.damaged:
            screen.note(f"damaged, so something is missing: {one.message}")
        yield history


def read_begin(names: Sequence[str], follow: bool, since: str) -> datetime | None:
    """The moment from which something is sent, by the option ``--since``; None for all.

    Raises:
        UsageError: ``since`` is no duration, or all runs are to be followed.
    """
    if follow and not names:
        raise UsageError("--follow needs the names of runs; for all runs, repeat the command with --since")
    return utc_now() - timedelta(seconds=parse_duration_seconds(since)) if since else None


def print_document(screen: Screen, text: str, output: Format) -> None:
    """Print a JSON document at once, for a reader that follows."""
    if output is Format.YAML:
        screen.write("---")
    screen.document(json.loads(text), output, indent=None)
    screen.out.file.flush()


def repeat_until_ended(store: Store, names: Sequence[str], follow: bool, send: Callable[[], bool]) -> None:
    """Call ``send`` once; to ``follow``, every 10 seconds until the named runs have ended and it returns True."""
    while True:
        ended = not follow or all(submission.end for name in names for submission in read_submissions(store, name))
        complete = send()
        if not follow or (ended and complete):
            return
        time.sleep(POLL_SECONDS)
