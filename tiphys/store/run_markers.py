"""Empty objects that name the newest runs and the open submissions, so that their readers need not list all runs.

| object | created | deleted |
|---|---|---|
| ``control/newest/<time>-<run>`` | before the record of the run, and with each end of a submission | with the run |
| ``control/open/<run>.<n>.<time>`` | before the claim of a submission | after its end, if none may follow by itself |

The time of ``newest/`` counts down, because stores list keys in ascending order only. Each marker precedes what it is
about, so a crash between two writes leaves one too many and hides nothing: its readers read the run, and leave out what
is not there. The janitor removes open markers that nothing follows.
"""

import contextlib
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import takewhile
from typing import NamedTuple

from tiphys.errors import ObjectExistsError, StoreError, UsageError
from tiphys.records import SubmissionClaim, SubmissionEnd, check_run_name
from tiphys.store.base import Store
from tiphys.store.claims import ClaimResult, claim_record
from tiphys.store.layout import CONTROL, RunLayout

NEWEST = f"{CONTROL}newest/"
OPEN = f"{CONTROL}open/"
_LAST_MILLISECOND = 10**13 - 1
_FOLDER_DIGITS = 5
"""A folder of ``newest/`` spans 28 hours, because a directory store sorts a whole folder to list its first file."""
_NEWEST = re.compile(NEWEST + r"(\d{5})/(\d{8})-(.+)", re.ASCII)
_OPEN = re.compile(OPEN + r"(.+)\.(\d{9})\.(\d{13})", re.ASCII)


class OpenSubmission(NamedTuple):
    """A submission that was claimed, and of which no end is known or an automatic resume may follow."""

    claimed_at: datetime
    run: str
    submission: int

    @property
    def marker(self) -> str:
        """Key of its marker."""
        return f"{OPEN}{check_run_name(self.run)}.{self.submission:09d}.{_milliseconds(self.claimed_at):013d}"


def newest_marker(run: str, moment: datetime) -> str:
    """Key of the object that lists ``run`` by what happened to it at ``moment``."""
    countdown = f"{_LAST_MILLISECOND - _milliseconds(moment):013d}"
    return f"{NEWEST}{countdown[:_FOLDER_DIGITS]}/{countdown[_FOLDER_DIGITS:]}-{check_run_name(run)}"


def list_newest_runs(store: Store, since: datetime | None = None) -> Iterator[str]:
    """Names of runs by the time of their creation or last end, the newest first; as `list_newest_markers`."""
    return (run for run, _ in list_newest_markers(store, since))


def list_newest_markers(store: Store, since: datetime | None = None) -> Iterator[tuple[str, str]]:
    """Each run with the key of its newest marker, which another end of a submission replaces; the newest first.

    Pages are fetched as they are consumed. ``since`` ends the listing; None for all. A name may be of no run.
    """
    seen = set[str]()
    markers = (match for info in store.list(NEWEST) if (match := _NEWEST.fullmatch(info.key)))
    earliest = _milliseconds(since) if since else 0
    for match in takewhile(lambda match: _LAST_MILLISECOND - int(match[1] + match[2]) >= earliest, markers):
        if match[3] not in seen and _is_run_name(match[3]):
            seen.add(match[3])
            yield match[3], match[0]


def list_open_submissions(store: Store, run: str = "") -> list[OpenSubmission]:
    """The open submissions, or those of ``run`` alone, by the time of their claims, the newest first."""
    matches = (match for info in store.list(f"{OPEN}{run}." if run else OPEN) if (match := _OPEN.fullmatch(info.key)))
    found = (
        OpenSubmission(datetime.fromtimestamp(int(match[3]) / 1000, UTC), match[1], int(match[2]))
        for match in matches
        if run in ("", match[1]) and _is_run_name(match[1])
    )
    return sorted(found, reverse=True)


def mark(store: Store, key: str) -> None:
    """Create an empty object unless it exists."""
    with contextlib.suppress(ObjectExistsError):
        store.create(key, b"")


def open_submission(store: Store, claim: SubmissionClaim) -> ClaimResult[SubmissionClaim]:
    """Claim a submission, after its marker; as `claim_record`."""
    marker = OpenSubmission(claim.written_at, claim.run, claim.submission).marker
    mark(store, marker)
    claimed = claim_record(store, RunLayout(claim.run).submission(claim.submission), claim)
    winner = claimed.record
    if OpenSubmission(winner.written_at, winner.run, winner.submission).marker != marker:
        store.delete(marker)  # the submission of another claim has a marker of its own, or has ended
    return claimed


def end_submission(store: Store, end: SubmissionEnd, *, may_be_resumed: bool) -> ClaimResult[SubmissionEnd]:
    """Record the end of a submission; as `claim_record`.

    ``may_be_resumed`` says whether the pipeline has a policy for automatic resumes. The submission then stays open
    unless it succeeded, so that a controller that starts later finds it.
    """
    sealed = claim_record(store, RunLayout(end.run).submission_end(end.submission), end)
    with contextlib.suppress(StoreError):  # the end counts; the janitor closes what stays open
        settle_submission(store, sealed.record, may_be_resumed=may_be_resumed)
    return sealed


def settle_submission(store: Store, end: SubmissionEnd, *, may_be_resumed: bool) -> None:
    """Do what follows from a recorded end, again after a crash: list the run anew, and close the submission."""
    mark(store, newest_marker(end.run, end.written_at))
    if end.status == "Succeeded" or not may_be_resumed:
        close_submission(store, end.run, end.submission)


def close_submission(store: Store, run: str, submission: int) -> None:
    """Delete the markers of an open submission. Costs a listing, and a request for each."""
    for opened in list_open_submissions(store, run):
        if opened.submission == submission:
            store.delete(opened.marker)


def _milliseconds(moment: datetime) -> int:
    return min(max(round(moment.timestamp() * 1000), 0), _LAST_MILLISECOND)


def _is_run_name(name: str) -> bool:
    try:
        return check_run_name(name) == name
    except UsageError:
        return False
