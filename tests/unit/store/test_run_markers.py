"""What leads to the newest runs and the open submissions, and what a crash leaves of it.

| what has happened | newest | open |
|---|---|---|
| a run was created | under that time | no |
| its submission was claimed | | yes |
| that has ended | once more, under that time | if it failed and may be resumed automatically |
| its writer was killed between marker and record | a name of no run | a submission of no claim |
"""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from support.fakes.memory_store import MemoryStore

from tiphys.records import RunRecord, SubmissionClaim, SubmissionEnd, SubmissionKind
from tiphys.store import (
    ObjectInfo,
    RunLayout,
    claim_run,
    close_submission,
    end_submission,
    list_newest_runs,
    list_open_submissions,
    open_submission,
)
from tiphys.store.run_markers import NEWEST, OPEN, newest_marker, settle_submission

NOW = datetime(2030, 1, 10, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


def record_of(run: str, at: datetime = NOW) -> RunRecord:
    return RunRecord(run=run, pipeline="digits", workflow={}, digest="d", written_at=at)


def claim_of(run: str, submission: int = 1, at: datetime = NOW) -> SubmissionClaim:
    return SubmissionClaim(
        run=run,
        submission=submission,
        kind=SubmissionKind.RESUME,
        workflow_name=run,
        namespace="ml",
        written_at=at,
    )


def end_of(run: str, status: str, at: datetime = NOW) -> SubmissionEnd:
    return SubmissionEnd(run=run, submission=1, status=status, written_at=at)


def opened(store: MemoryStore) -> list[tuple[str, int]]:
    return [(found.run, found.submission) for found in list_open_submissions(store)]


class SlowStore(MemoryStore):
    """Counts the objects of listings that were asked for."""

    rows = 0

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for info in super().list(prefix):
            self.rows += 1
            yield info


def test_runs_are_listed_newest_first_by_their_creation_and_their_last_end() -> None:
    store = MemoryStore()
    for hours, run in enumerate(("first", "second", "third")):
        claim_run(store, record_of(run, NOW + hours * HOUR))
    assert list(list_newest_runs(store)) == ["third", "second", "first"]

    end_submission(store, end_of("first", "Succeeded", NOW + 99 * HOUR), may_be_resumed=False)

    assert list(list_newest_runs(store)) == ["first", "third", "second"]
    assert list(list_newest_runs(store, NOW + 2 * HOUR)) == ["first", "third"]


def test_the_first_runs_cost_the_same_however_many_there_are() -> None:
    store = SlowStore()
    for hours in range(300):
        claim_run(store, record_of(f"run-{hours}", NOW + hours * HOUR))

    runs = list_newest_runs(store)

    assert [next(runs) for _ in range(3)] == ["run-299", "run-298", "run-297"]
    assert store.rows == 3


def test_times_outside_of_what_a_key_holds_are_listed_first_or_last() -> None:
    store = MemoryStore()
    for run, year in (("past", 1900), ("now", 2030), ("far", 9000)):
        claim_run(store, record_of(run, NOW.replace(year=year)))

    assert list(list_newest_runs(store)) == ["far", "now", "past"]


def test_a_key_that_is_no_marker_of_a_run_is_left_out() -> None:
    store = MemoryStore()
    claim_run(store, record_of("digits"))
    key = newest_marker("digits", NOW + HOUR)
    for other in (
        f"{key}/../x",
        key.removesuffix("digits") + "Not A Run",
        f"{NEWEST}x",
        f"{OPEN}Bad.000000001.1893456000000",
    ):
        store.objects[other] = b""
    store.objects[f"{OPEN}digits"] = b""

    assert list(list_newest_runs(store)) == ["digits"]
    assert opened(store) == []


@pytest.mark.parametrize(
    ("status", "may_be_resumed", "stays_open"),
    [("Succeeded", True, False), ("Succeeded", False, False), ("Failed", False, False), ("Failed", True, True)],
)
def test_a_submission_is_open_from_its_claim_until_its_end(status: str, may_be_resumed: bool, stays_open: bool) -> None:
    store = MemoryStore()
    open_submission(store, claim_of("digits"))
    open_submission(store, claim_of("digits.2", at=NOW + HOUR))
    assert opened(store) == [("digits.2", 1), ("digits", 1)]

    end_submission(store, end_of("digits", status), may_be_resumed=may_be_resumed)

    assert (("digits", 1) in opened(store), ("digits.2", 1) in opened(store)) == (stays_open, True)


def test_a_marker_is_there_before_what_it_is_about() -> None:
    store = MemoryStore()
    refused = {RunLayout("digits").run_record, RunLayout("digits").submission(1)}
    store.refuses = lambda operation, key: operation == "create" and key in refused

    for write in (lambda: claim_run(store, record_of("digits")), lambda: open_submission(store, claim_of("digits"))):
        with pytest.raises(Exception, match="no space left"):
            write()

    assert list(list_newest_runs(store)) == ["digits"]
    assert opened(store) == [("digits", 1)]


def test_a_second_claim_leaves_no_marker_of_its_own() -> None:
    store = MemoryStore()
    claim_run(store, record_of("digits"))
    open_submission(store, claim_of("digits"))
    end_submission(store, end_of("digits", "Succeeded"), may_be_resumed=False)
    before = set(store.objects)

    for late in (HOUR, timedelta()):
        assert not claim_run(store, record_of("digits", NOW + late)).is_ours
    assert not open_submission(store, claim_of("digits", at=NOW + HOUR)).is_ours

    assert set(store.objects) == before


def test_markers_of_a_submission_all_go_with_its_end() -> None:
    """Two callers claimed it, and the one that lost was killed before it could take its marker back."""
    store = MemoryStore()
    open_submission(store, claim_of("digits"))
    other = open_submission(MemoryStore(), claim_of("digits", at=NOW + HOUR)).record
    lost = next(key for key in _marked(other) if key.startswith(OPEN))
    store.objects[lost] = b""
    open_submission(store, claim_of("digits", 2))

    close_submission(store, "digits", 1)
    assert opened(store) == [("digits", 2)]


def _marked(claim: SubmissionClaim) -> set[str]:
    store = MemoryStore()
    open_submission(store, claim)
    return set(store.objects)


def test_first_end_of_a_submission_decides_what_follows() -> None:
    store = MemoryStore()
    open_submission(store, claim_of("digits"))
    end_submission(store, end_of("digits", "Failed"), may_be_resumed=True)
    before = set(store.objects)
    end_submission(store, end_of("digits", "Succeeded", NOW + 9 * HOUR), may_be_resumed=True)
    assert set(store.objects) == before


def test_an_end_can_be_settled_again() -> None:
    store = MemoryStore()
    open_submission(store, claim_of("digits"))
    end = end_submission(store, end_of("digits", "Failed"), may_be_resumed=True).record

    for _ in range(2):
        settle_submission(store, end, may_be_resumed=False)

    assert (opened(store), list(list_newest_runs(store))) == ([], ["digits"])
