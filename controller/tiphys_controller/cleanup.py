"""Runs that nothing carries on: a person should know of them; no decision is taken from it.

One thing that a round comes upon, so that whoever goes the round counts, tells and removes all kinds alike.

How long ago something was, for people.

What storage keeps and nobody needs: uploads that died, and alerts that were done with long ago.

Leases of GPUs that nobody counts on any more and that are held all the same.

They are told and counted, and nothing more: whether pods of an attempt still
run, and so whether its GPUs are free, is for the ledger's own service to say.
"""

from collections.abc import Callable, Iterator, Mapping, MutableSet
from datetime import datetime, timedelta
from enum import Enum, StrEnum, auto
from typing import Any, NamedTuple

from tiphys.errors import ObjectMissingError
from tiphys.records import AlertDone, AttemptEnd, SubmissionBound
from tiphys.store import RunLayout, Store, Submission, find_record, list_runs, read_record, submissions
from tiphys.store.abandoned_uploads import leftovers
from tiphys.store.layout import ALERTS, alert_key, parse_alert
from tiphys_controller.submit.submission import cluster_of, place


class What(StrEnum):
    """Kinds of things; the value is what metrics and tables call them."""

    UPLOAD = "upload"
    ALERT = "alert"
    AGENT = "agent"
    UNSENT = "unsent"
    GONE = "gone"
    LEASE = "lease"


class Found(NamedTuple):
    """A thing, where it is, and why it is told of."""

    what: What
    where: str
    """URL of a store, or a namespace."""
    name: str
    why: str
    remove: Callable[[], object] | None = None
    """Removes it, and does nothing if it is gone; None for what is only told, because others look after it."""


def in_words(age: timedelta) -> str:
    """A time in the unit that suits it."""
    seconds = age.total_seconds()
    units = (("days", 86400), ("h", 3600), ("min", 60))
    unit, size = next((one for one in units if seconds >= 2 * one[1]), ("s", 1))
    return f"{int(seconds / size)} {unit}"


UPLOADS = timedelta(days=1)
ALERTS_DONE = timedelta(days=7)


def litter(store: Store, now: datetime) -> Iterator[Found]:
    """Everything of a store that may go.

    The age of an upload is told by the clock of the store, that of an alert by
    the clock of whoever was done with it.

    Raises:
        StoreError: storage is out of reach.
        IntegrityError: the record of an alert is damaged.
    """
    for left in leftovers(store, UPLOADS):
        why = f"begun {in_words(left.age)} ago and never finished"
        yield Found(What.UPLOAD, store.url, left.name, why, left.remove)
    for alert, keys, done in _done_alerts(store):
        if (age := now - done.written_at) > ALERTS_DONE:
            why = f"done with {in_words(age)} ago ({done.outcome})"
            yield Found(What.ALERT, store.url, alert, why, _Removal(store, keys))


class _Removal:
    """Removes the records of an alert. What says that it is done goes last: without it, it would be done again."""

    def __init__(self, store: Store, keys: list[str]) -> None:
        self._store = store
        self._keys = sorted(keys, key=lambda one: one.endswith("/done.json"))

    def __call__(self) -> None:
        for key in self._keys:
            self._store.delete(key)


def _done_alerts(store: Store) -> Iterator[tuple[str, list[str], AlertDone]]:
    kept: dict[str, list[str]] = {}
    for info in store.list(ALERTS):
        if (place := parse_alert(info.key)) is not None:
            kept.setdefault(place[0], []).append(info.key)
    for alert, keys in kept.items():
        if alert_key(alert, "done") not in keys:
            continue
        try:
            yield alert, keys, read_record(store, alert_key(alert, "done"), AlertDone)
        except ObjectMissingError:
            continue


OVERDUE = timedelta(minutes=10)
"""So long an attempt may take to go after its end: it ends its pods, and somebody has to look."""


class HeldLease(NamedTuple):
    """What a `GPULedger` says of one lease."""

    namespace: str
    run: str
    step: str
    attempt: int
    uid: str
    """Of the Workflow."""
    gpus: int
    granted_at: datetime
    limit_seconds: int | None
    """After so long GPUs come back although nobody saw the pods end; None: never."""


def held_leases(ledger: Mapping[str, Any] | None) -> list[HeldLease]:
    """The leases in a `GPULedger` as it is stored; of none, none."""
    held = (ledger or {}).get("status") or {}
    limit = ((ledger or {}).get("spec") or {}).get("force_release_after_seconds")
    return [
        HeldLease(
            one["namespace"],
            one["run"],
            one["step"],
            one["attempt"],
            one["uid"],
            one["gpus"],
            datetime.fromisoformat(one["grantedAt"]),
            limit,
        )
        for one in held.get("leases") or ()
    ]


def orphaned(lease: HeldLease, store: Store, alive: bool, now: datetime) -> Found | None:
    """Why nobody counts on a lease any more, in words; None while somebody may.

    Args:
        lease: Which one.
        store: That of its namespace.
        alive: Whether its Workflow exists and is not over.
        now: The time.

    Raises:
        StoreError: storage is out of reach.
        IntegrityError: the end of the attempt is damaged.
    """
    if now - lease.granted_at <= OVERDUE:
        return None
    end = find_record(store, RunLayout(lease.run).attempt_end(lease.step, lease.attempt), AttemptEnd)
    if end is not None and now - end.written_at <= OVERDUE:
        return None
    if end is None and alive:
        return None
    over = f"the attempt ended {in_words(now - end.written_at)} ago" if end else "its Workflow is over or gone"
    back = "they come back when somebody waits for GPUs and its pods are seen to be gone"
    if lease.limit_seconds is not None:
        back += f", or {lease.limit_seconds} s later by force"
    why = f"{over}, and it holds {lease.gpus} {'GPU' if lease.gpus == 1 else 'GPUs'}; {back}"
    return Found(What.LEASE, lease.namespace, f"{lease.run}/{lease.step}/{lease.attempt}", why)


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
