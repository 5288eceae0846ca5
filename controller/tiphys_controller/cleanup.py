"""Finds what nothing cleans up: dead uploads, old alerts, orphaned leases, stalled runs.

The janitor and `tiphys janitor` share these findings. Only uploads and alerts
can be removed. Leases are only reported: whether pods of an attempt still run,
and so whether its GPUs are free, is decided by the plugin's service. Stalled
runs are only reported, too, because the auto-resume loop decides about them.
"""

from collections.abc import Callable, Iterator, Mapping, MutableSet
from datetime import datetime, timedelta
from enum import Enum, StrEnum, auto
from typing import Any, NamedTuple

from tiphys.errors import ObjectMissingError
from tiphys.protocol.quantities import format_duration
from tiphys.records import AlertResultRecord, SubmissionBinding, SubmissionKind
from tiphys.store import Store, Submission, find_attempt_end, list_runs, read_record, read_submissions
from tiphys.store.abandoned_uploads import find_abandoned_uploads
from tiphys.store.layout import ALERTS, alert_key, parse_alert
from tiphys_controller.submit.submission import locate_workflow, submission_cluster


class CleanupKind(StrEnum):
    """Kinds of findings; the values appear in metrics and tables."""

    UPLOAD = "upload"
    ALERT = "alert"
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

    Args:
        store: The store.
        now: The current time.

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

    Args:
        lease: The lease.
        store: Store of its namespace.
        is_workflow_running: Whether its Workflow exists and has not finished.
        now: The current time.

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


UNSENT_AFTER = timedelta(hours=1)


class WorkflowPresence(NamedTuple):
    """View of the Workflows of ``cluster``; None if no cluster is examined."""

    cluster: str | None
    is_present: Callable[[SubmissionBinding], bool]
    """Whether the Workflow exists; True if it is not visible here."""


class _CarryOnStatus(Enum):
    SETTLED = auto()
    RUNNING = auto()
    UNSENT = auto()
    GONE = auto()


def find_stalled_runs(
    store: Store,
    presence: WorkflowPresence,
    now: datetime,
    settled_runs: MutableSet[str],
    is_stopped: Callable[[], bool] = lambda: False,
) -> Iterator[CleanupFinding]:
    """Find runs whose last submission was claimed long ago and never sent, or whose Workflow was deleted early.

    Args:
        store: Store of the runs.
        presence: View of the cluster's Workflows.
        now: The current time.
        settled_runs: Runs to skip; runs that ended or went to another cluster are added.
        is_stopped: Checked before each run; True ends the search.

    Raises:
        StoreError: storage is out of reach.
        IntegrityError: a record is damaged.
    """
    for run in list_runs(store):
        if is_stopped():
            return
        if run in settled_runs:
            continue
        submissions = read_submissions(store, run)
        status = _determine_status(submissions[-1], presence, now) if submissions else _CarryOnStatus.RUNNING
        if status is _CarryOnStatus.SETTLED:
            settled_runs.add(run)
        elif status is not _CarryOnStatus.RUNNING:
            yield _build_finding(store, submissions[-1], status, now)


def _determine_status(last: Submission, presence: WorkflowPresence, now: datetime) -> _CarryOnStatus:
    if last.end is not None or (
        presence.cluster is not None and submission_cluster(last) not in ("", presence.cluster)
    ):
        return _CarryOnStatus.SETTLED
    if last.binding is not None:
        return _CarryOnStatus.RUNNING if presence.is_present(last.binding) else _CarryOnStatus.GONE
    return _CarryOnStatus.UNSENT if now - last.claim.written_at > UNSENT_AFTER else _CarryOnStatus.RUNNING


def _build_finding(store: Store, last: Submission, status: _CarryOnStatus, now: datetime) -> CleanupFinding:
    run, number = last.claim.run, last.claim.submission
    if last.claim.kind is SubmissionKind.DELETION:
        why = f"its deletion was begun and did not finish; `tiphys runs rm {run} --yes` deletes the rest"
        return CleanupFinding(CleanupKind.UNSENT, store.url, run, why)
    if status is _CarryOnStatus.UNSENT:
        age = format_duration((now - last.claim.written_at).total_seconds())
        why = f"submission {number} was claimed {age} ago and never sent; `tiphys resume {run}` sends it"
        return CleanupFinding(CleanupKind.UNSENT, store.url, run, why)
    namespace, name = locate_workflow(last)
    why = f"Workflow {namespace}/{name} was deleted before it ended; `tiphys resume {run}` continues the run"
    return CleanupFinding(CleanupKind.GONE, store.url, run, why)
