"""Runs that nothing carries on: a person should know of them; no decision is taken from it."""

from collections.abc import Callable, Iterator, MutableSet
from datetime import datetime, timedelta
from enum import Enum, auto
from typing import NamedTuple

from tiphys.records import SubmissionBound
from tiphys.store import Store, Submission, list_runs, submissions
from tiphys_controller.cleaning.ages import in_words
from tiphys_controller.cleaning.found import Found, What
from tiphys_controller.turns import cluster_of, place

UNSENT = timedelta(hours=1)


class Sight(NamedTuple):
    """What is seen of Workflows. ``cluster`` is the name of the one that is looked at; None: none is."""

    cluster: str | None
    shows: Callable[[SubmissionBound], bool]
    """Whether the Workflow exists; True where it cannot be seen from here."""


class _Standing(Enum):
    SETTLED = auto()
    GOES_ON = auto()
    UNSENT = auto()
    GONE = auto()


def unfinished(
    store: Store, sight: Sight, now: datetime, settled: MutableSet[str], stopped: Callable[[], bool] = lambda: False
) -> Iterator[Found]:
    """Runs whose last submission was claimed long ago and never sent, or whose Workflow was deleted before it ended.

    Args:
        store: Where the runs are.
        sight: What is seen of the cluster.
        now: The time.
        settled: Runs that need not be looked at; those that are over or went elsewhere are added.
        stopped: Asked before each run; True ends it.

    Raises:
        StoreError: storage is out of reach.
        IntegrityError: a record is damaged.
    """
    for run in list_runs(store):
        if stopped():
            return
        if run in settled:
            continue
        held = submissions(store, run)
        standing = _stands(held[-1], sight, now) if held else _Standing.GOES_ON
        if standing is _Standing.SETTLED:
            settled.add(run)
        elif standing is not _Standing.GOES_ON:
            yield _found(store, held[-1], standing, now)


def _stands(last: Submission, sight: Sight, now: datetime) -> _Standing:
    if last.end is not None or (sight.cluster is not None and cluster_of(last) not in ("", sight.cluster)):
        return _Standing.SETTLED
    if last.bound is not None:
        return _Standing.GOES_ON if sight.shows(last.bound) else _Standing.GONE
    return _Standing.UNSENT if now - last.claim.written_at > UNSENT else _Standing.GOES_ON


def _found(store: Store, last: Submission, standing: _Standing, now: datetime) -> Found:
    run, number = last.claim.run, last.claim.submission
    if standing is _Standing.UNSENT:
        age = in_words(now - last.claim.written_at)
        why = f"submission {number} was claimed {age} ago and never sent; `tiphys resume {run}` sends it"
        return Found(What.UNSENT, store.url, run, why)
    namespace, name = place(last)
    why = f"Workflow {namespace}/{name} was deleted before it ended; `tiphys resume {run}` goes on"
    return Found(What.GONE, store.url, run, why)
