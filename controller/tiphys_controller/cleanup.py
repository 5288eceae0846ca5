"""Finds what nothing cleans up: dead uploads, old alerts, markers, orphaned leases, stalled runs.

The janitor and `tiphys janitor` share these findings. Only uploads, alerts and
markers can be removed. Leases are only reported: whether pods of an attempt still run,
and so whether its GPUs are free, is decided by the plugin's service. Stalled
runs are only reported, too, because the auto-resume loop decides about them.
"""

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from tiphys.errors import IntegrityError, ObjectMissingError
from tiphys.protocol.auto_resume_policy import has_auto_resume
from tiphys.protocol.quantities import format_duration
from tiphys.records import AlertResultRecord, RunRecord, SubmissionBinding, SubmissionKind
from tiphys.store import (
    RunLayout,
    Store,
    Submission,
    find_attempt_end,
    find_record,
    list_open_submissions,
    read_record,
    read_submissions,
)
from tiphys.store.abandoned_uploads import find_abandoned_uploads
from tiphys.store.layout import ALERTS, alert_key, parse_alert
from tiphys.store.run_markers import OpenSubmission, settle_submission
from tiphys_controller.submit.submission import locate_workflow, submission_cluster


class CleanupKind(StrEnum):
    """Kinds of findings; the values appear in metrics and tables."""

    UPLOAD = "upload"
    ALERT = "alert"
    MARKER = "marker"
    AGENT = "agent"
    UNSENT = "unsent"
    GONE = "gone"
    LEASE = "lease"


class CleanupFinding(NamedTuple):
    """A finding, its location, and the reason."""

    kind: CleanupKind
    location: str
    """URL of a store, or a namespace."""
    name: str
    reason: str
    remove: Callable[[], object] | None = None
    """Removes it; does nothing if it is gone. None for a finding that is only reported."""


UPLOAD_MAX_AGE = timedelta(days=1)
DONE_ALERT_MAX_AGE = timedelta(days=7)


def find_garbage(store: Store, now: datetime) -> Iterator[CleanupFinding]:
    """Find what may be removed from a store.

    The age of an upload is measured by the clock of the store, that of an alert
    by the clock of the controller that handled it.

    Raises:
        StoreError: storage is out of reach.
        IntegrityError: the record of an alert is damaged.
    """
    for upload in find_abandoned_uploads(store, UPLOAD_MAX_AGE):
        why = f"begun {format_duration(upload.age.total_seconds())} ago and never finished"
        yield CleanupFinding(CleanupKind.UPLOAD, store.url, upload.name, why, upload.remove)
    for alert, keys, done in _find_done_alerts(store):
        if (age := now - done.written_at) > DONE_ALERT_MAX_AGE:
            why = f"handled {format_duration(age.total_seconds())} ago ({done.outcome})"
            yield CleanupFinding(CleanupKind.ALERT, store.url, alert, why, _AlertRemoval(store, keys))


class _AlertRemoval:
    """Removes the records of an alert, ``done`` last: without it the alert would be handled again."""

    def __init__(self, store: Store, keys: list[str]) -> None:
        self._store = store
        self._keys = sorted(keys, key=lambda key: key.endswith("/result.json"))

    def __call__(self) -> None:
        for key in self._keys:
            self._store.delete(key)


def _find_done_alerts(store: Store) -> Iterator[tuple[str, list[str], AlertResultRecord]]:
    keys_by_alert: dict[str, list[str]] = {}
    for info in store.list(ALERTS):
        if (parsed := parse_alert(info.key)) is not None:
            keys_by_alert.setdefault(parsed[0], []).append(info.key)
    for alert, keys in keys_by_alert.items():
        if alert_key(alert, "result") not in keys:
            continue
        try:
            yield alert, keys, read_record(store, alert_key(alert, "result"), AlertResultRecord)
        except ObjectMissingError:
            continue


ORPHANED_AFTER = timedelta(minutes=10)
"""How long a lease may outlive its attempt: its pods must end, and the plugin must notice."""


class HeldLease(NamedTuple):
    """One lease of a `GPULedger`."""

    namespace: str
    run: str
    step: str
    attempt: int
    workflow_uid: str
    gpus: int
    granted_at: datetime
    force_release_after_seconds: int | None
    """Seconds after which the lease ends although its pods were not seen to end; None: never."""


def parse_held_leases(ledger: Mapping[str, Any] | None) -> list[HeldLease]:
    """Parse the leases of a stored `GPULedger`; without a ledger there are none."""
    status = (ledger or {}).get("status") or {}
    force_release_after = ((ledger or {}).get("spec") or {}).get("force_release_after_seconds")
    return [
        HeldLease(
            request["namespace"],
            request["run"],
            request["step"],
            request["attempt"],
            request["uid"],
            request["gpus"],
            datetime.fromisoformat(lease["grantedAt"]),
            force_release_after,
        )
        for lease in status.get("leases") or ()
        for request in (lease["request"],)
    ]


def find_orphaned_lease(
    lease: HeldLease, store: Store, is_workflow_running: bool, now: datetime
) -> CleanupFinding | None:
    """Report a lease whose attempt is over; None for a lease that may be in use.

    ``store`` holds the runs of its namespace. ``is_workflow_running``: its Workflow exists and has not finished.

    Raises:
        StoreError: storage is out of reach.
        IntegrityError: the end of the attempt is damaged.
    """
    if now - lease.granted_at <= ORPHANED_AFTER:
        return None
    end = find_attempt_end(store, lease.run, lease.step, lease.attempt)
    if end is not None and now - end.written_at <= ORPHANED_AFTER:
        return None
    if end is None and is_workflow_running:
        return None
    ended = (
        f"the attempt ended {format_duration((now - end.written_at).total_seconds())} ago"
        if end
        else "its Workflow has finished or is gone"
    )
    release = "they are released when another step waits for GPUs and the pods are confirmed gone"
    if lease.force_release_after_seconds is not None:
        release += f", or after {lease.force_release_after_seconds} s in any case"
    why = f"{ended}, and it holds {lease.gpus} {'GPU' if lease.gpus == 1 else 'GPUs'}; {release}"
    return CleanupFinding(CleanupKind.LEASE, lease.namespace, f"{lease.run}/{lease.step}/{lease.attempt}", why)


RESUMED_WITHIN = timedelta(days=30)
"""So long a failed submission may wait for an automatic resume, which may be off; longer than any back-off."""
UNSENT_AFTER = timedelta(hours=1)


class WorkflowPresence(NamedTuple):
    """View of the Workflows of ``cluster``; None if no cluster is examined."""

    cluster: str | None
    is_present: Callable[[SubmissionBinding], bool]
    """Whether the Workflow exists; True if it is not visible here."""


def find_stalled_runs(
    store: Store, presence: WorkflowPresence, now: datetime, is_stopped: Callable[[], bool] = lambda: False
) -> Iterator[CleanupFinding]:
    """Find runs whose last submission was claimed long ago and never sent, or whose Workflow was deleted early.

    Reads the runs with an open submission, and no others. Markers of submissions that are over are findings, too.

    ``is_stopped`` is checked before each run; True ends the search.

    Raises:
        StoreError: storage is out of reach.
        IntegrityError: a record is damaged.
    """
    by_run = attrgetter("run")
    for run, markers in groupby(sorted(list_open_submissions(store), key=by_run), by_run):
        if is_stopped():
            return
        submissions = read_submissions(store, run)
        last = submissions[-1] if submissions else None
        for marker in markers:
            if (finding := _find_old_marker(store, marker, last, now)) is not None:
                yield finding
        if last is not None and (kind := _find_stall(last, presence, now)) is not None:
            yield _build_finding(store, last, kind, now)


def _find_old_marker(
    store: Store, marker: OpenSubmission, last: Submission | None, now: datetime
) -> CleanupFinding | None:
    """The marker of a submission that is not open, as after a crash."""
    number, remove = last.claim.submission if last else 0, partial(store.delete, marker.marker)
    if marker.submission < number:
        why = f"submission {number} has replaced submission {marker.submission}"
    elif marker.submission > number and now - marker.claimed_at > UNSENT_AFTER:
        why = f"submission {marker.submission} was never claimed"
    elif marker.submission == number and last and last.end:
        may_wait = last.end.status != "Succeeded" and now - last.end.written_at < RESUMED_WITHIN
        if may_wait and _may_be_resumed(store, marker.run):
            return None
        why, remove = (
            f"submission {number} has ended",
            partial(settle_submission, store, last.end, may_be_resumed=False),
        )
    else:
        return None
    return CleanupFinding(CleanupKind.MARKER, store.url, marker.run, f"{why}, and is still marked as open", remove)


def _may_be_resumed(store: Store, run: str) -> bool:
    try:
        record = find_record(store, RunLayout(run).run_record, RunRecord)
    except IntegrityError:
        return True  # once it is restored
    return record is not None and has_auto_resume(record.workflow)


def _find_stall(last: Submission, presence: WorkflowPresence, now: datetime) -> CleanupKind | None:
    if last.end is not None or (
        presence.cluster is not None and submission_cluster(last) not in ("", presence.cluster)
    ):
        return None
    if last.binding is not None:
        return None if presence.is_present(last.binding) else CleanupKind.GONE
    return CleanupKind.UNSENT if now - last.claim.written_at > UNSENT_AFTER else None


def _build_finding(store: Store, last: Submission, kind: CleanupKind, now: datetime) -> CleanupFinding:
    run, number = last.claim.run, last.claim.submission
    if last.claim.kind is SubmissionKind.DELETION:
        why = f"its deletion was begun and did not finish; `tiphys runs rm {run} --yes` deletes the rest"
        return CleanupFinding(CleanupKind.UNSENT, store.url, run, why)
    if kind is CleanupKind.UNSENT:
        age = format_duration((now - last.claim.written_at).total_seconds())
        why = f"submission {number} was claimed {age} ago and never sent; `tiphys resume {run}` sends it"
        return CleanupFinding(CleanupKind.UNSENT, store.url, run, why)
    namespace, name = locate_workflow(last)
    why = f"Workflow {namespace}/{name} was deleted before it ended; `tiphys resume {run}` continues the run"
    return CleanupFinding(CleanupKind.GONE, store.url, run, why)
