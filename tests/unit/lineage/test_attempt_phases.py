"""What a restart in the pod cost is lost time of its attempt, and the rest of the attempt keeps its phases."""

from datetime import UTC, datetime, timedelta

from support.builders.lineage import claim_of, end_of, ref

from tiphys.lineage.attempt_phases import KeptTraining, split_phases
from tiphys.records import AttemptEndOutcome, LastCheckpoint, StartTimes
from tiphys.records.checkpoint import MAX_RESTARTS
from tiphys.store import Attempt

START = datetime(2026, 11, 1, tzinfo=UTC)


def at(second: float) -> datetime:
    return START + timedelta(seconds=second)


def attempt(*restarts: tuple[float, float], skew: float = 0.0, last: float = 90) -> tuple[Attempt, KeptTraining]:
    """Admitted at 0, opened at 5, restored at 6, first step at 10, done at 100."""
    began = StartTimes(opened_at=at(5 + skew), restored_at=at(6 + skew), first_step_at=at(10 + skew))
    for committed, restored in restarts:
        began = began.add_restart(at(committed + skew), at(restored + skew))
    end = end_of(1).model_copy(update={"outcome": AttemptEndOutcome.DONE, "written_at": at(100)})
    claim = claim_of(1).model_copy(update={"written_at": at(0)})
    newest = LastCheckpoint(checkpoint=ref(1, 9), at=at(last + skew), began=began)
    return Attempt(claim, end), KeptTraining(newest.at, newest)


def phases(made: tuple[Attempt, KeptTraining]) -> list[tuple[str, float]]:
    return [(span.phase.value, span.seconds) for span in split_phases(*made, now=at(200))]


def test_restart_in_the_pod_is_lost_time_between_useful_ones() -> None:
    assert phases(attempt((30, 42), (60, 63))) == [
        ("starting", 5),
        ("loading", 1),
        ("first_step", 4),
        ("useful", 20),
        ("discarded", 12),
        ("useful", 18),
        ("discarded", 3),
        ("useful", 37),
    ]


def test_restarts_that_overlap_are_counted_once() -> None:
    """The second process committed nothing, so the third went on from the same commit."""
    assert phases(attempt((30, 42), (30, 50)))[3:] == [
        ("useful", 20),
        ("discarded", 12),
        ("discarded", 8),
        ("useful", 50),
    ]


def test_times_of_a_pod_whose_clock_is_ahead_are_shifted_with_their_restarts() -> None:
    shifted, exact = phases(attempt((30, 42), skew=3600, last=100)), phases(attempt((30, 42), last=100))
    assert shifted == exact


def test_times_of_a_pod_whose_clock_is_behind_are_shifted_no_further_than_to_the_end() -> None:
    assert phases(attempt(skew=-10, last=108)) == [("first_step", 2), ("useful", 98)]


def test_attempt_without_a_restart_has_none() -> None:
    assert phases(attempt())[3:] == [("useful", 90)]


def test_manifest_holds_the_newest_restarts_only() -> None:
    began = StartTimes(opened_at=at(0))
    for second in range(MAX_RESTARTS + 5):
        began = began.add_restart(at(second), at(second + 0.5))
    assert len(began.restarts) == MAX_RESTARTS
    assert began.restarts[0].committed_at == at(5)
