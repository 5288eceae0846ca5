"""Where the time of a run went.

Time is written as seconds after noon. Attempt 1 is admitted at 0, opens its
session at 10, has its first step at 15, and so on.

| what is told of an attempt | what becomes of its time |
|---|---|
| the next one went on from a checkpoint of it | useful up to the moment of that checkpoint, lost from there on |
| a later one went back past it | lost as a whole, but for getting there |
| it is done | useful to its end |
| it saved nothing | lost: nobody knows when it began to train |
| it saved because it had to stop | nothing is lost after that save |
"""

from datetime import UTC, datetime, timedelta

import pytest
from support.builders.lineage import LINEAGE, RUN, claim_of, commit, end_of, ref, write_claim, write_end, write_run
from support.fakes.memory_store import MemoryStore
from tiphys_controller.goodput import group_by_queue, measure_gpu_time, measure_time_usage

from tiphys.lineage.attempt_phases import TimePhase
from tiphys.lineage.run_history import RunHistory
from tiphys.protocol.step_spec import GpuRequest
from tiphys.records import (
    AttemptEndOutcome,
    Cause,
    Event,
    LastCheckpoint,
    StartTimes,
    SubmissionBinding,
    SubmissionClaim,
    SubmissionEnd,
    SubmissionKind,
)
from tiphys.store import RunLayout, append_events
from tiphys.store import claim_record as claim_record

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def began(opened: float, restored: float | None, first_step: float) -> StartTimes:
    return StartTimes(
        opened_at=at(opened), restored_at=None if restored is None else at(restored), first_step_at=at(first_step)
    )


@pytest.fixture
def store():
    place = MemoryStore()
    write_run(place, gpu=GpuRequest(gpus=4, queue="research"))
    return place


def test_a_damaged_record_is_named_and_the_rest_measured(store):
    opened(store, 1, 0)
    key = RunLayout(RUN).attempt_end("fit", 1)
    store.create(key, b"{garbage")
    opened(store, 2, 100)

    usage = measure_time_usage(RunHistory.for_display(store, RUN), at(200))

    assert [key in message for message in usage.damaged] == [True]
    assert [step.elapsed_seconds for step in usage.steps] == [200]


def opened(store, number, seconds, start=None, submission=1):
    claim = claim_of(number, start, submission=submission)
    write_claim(store, claim.model_copy(update={"written_at": at(seconds)}))


def ended(store, number, seconds, over=None, saved=None, stopped=False, last_alive_at=None, **fields):
    end = end_of(number, **fields)
    reported = {
        "written_at": at(seconds),
        "terminating_at": None if over is None else at(over),
        "last_checkpoint": saved,
        "stopped": stopped,
        "last_alive_at": last_alive_at,
    }
    write_end(store, end.model_copy(update=reported))


def saved(attempt, step, seconds, when, at_stop=False):
    return LastCheckpoint(checkpoint=ref(attempt, step), at=at(seconds), began=when, at_stop=at_stop)


def account(store, now=1000.0):
    return measure_time_usage(RunHistory.for_display(store, RUN), at(now))


def seconds(entry):
    return {phase.value: entry.seconds(phase) for phase in TimePhase if entry.seconds(phase)}


def test_time_up_to_the_checkpoint_that_was_gone_on_from_is_useful_and_the_rest_is_lost(store):
    opened(store, 1, 0)
    ended(store, 1, 103, over=100, saved=saved(1, 50, 80, began(10, None, 15)))
    opened(store, 2, 110, ref(1, 50))
    ended(store, 2, 200, outcome=AttemptEndOutcome.DONE, saved=saved(2, 90, 195, began(118, 120, 125)))
    (step,) = account(store).steps
    first, second = step.entries
    assert seconds(first) == {"starting": 10, "first_step": 5, "useful": 65, "discarded": 20, "detecting": 3}
    assert seconds(second) == {"starting": 8, "loading": 2, "first_step": 5, "useful": 75}
    (recovery,) = step.recoveries
    assert (recovery.after, recovery.failed_by) == (1, "preemption")
    assert recovery.model_dump(include={"detect", "decide", "submit", "wait", "start", "load", "first_step"}) == {
        "detect": 3,
        "decide": 0,
        "submit": 0,
        "wait": 7,
        "start": 8,
        "load": 2,
        "first_step": 5,
    }
    assert recovery.seconds == 25


def test_goodput_counts_what_was_useful_or_lost_by_gpus(store):
    opened(store, 1, 0)
    ended(store, 1, 103, over=100, saved=saved(1, 50, 80, began(10, None, 15)))
    opened(store, 2, 110, ref(1, 50))
    ended(store, 2, 200, outcome=AttemptEndOutcome.DONE, saved=saved(2, 90, 195, began(118, 120, 125)))
    found = account(store)
    assert found.goodput == pytest.approx((65 + 75) / (65 + 75 + 38))
    assert found.lost_gpu_seconds == sum(cost.lost for cost in found.costs.values())
    assert found.held_gpu_seconds == 4 * (103 + 90)
    cost = found.costs["preemption"]
    assert (cost.failures, cost.lost, cost.recovery) == (1, 4 * (103 - 65), 25)
    assert found.failures == 1


def test_an_attempt_that_a_later_one_went_back_past_is_lost(store):
    opened(store, 1, 0)
    ended(store, 1, 100, over=100, saved=saved(1, 50, 80, began(0, None, 0)))
    opened(store, 2, 100, ref(1, 50))
    ended(store, 2, 200, over=200, saved=saved(2, 90, 180, began(100, 100, 100)), cause=Cause.USER_ERROR)
    opened(store, 3, 200, ref(1, 50))
    ended(store, 3, 300, outcome=AttemptEndOutcome.DONE)
    first, second, third = account(store).steps[0].entries
    assert (first.seconds(TimePhase.USEFUL), second.seconds(TimePhase.USEFUL)) == (80, 0)
    assert second.seconds(TimePhase.DISCARDED) == 100
    assert third.seconds(TimePhase.USEFUL) == 100


def test_the_restored_checkpoint_outweighs_the_start_in_the_claim(store):
    """The newest checkpoint was damaged, which only its reader could see."""
    opened(store, 1, 0)
    ended(store, 1, 100, over=100, saved=saved(1, 50, 80, began(0, None, 0)))
    commit(store, ref(1, 20), written_at=at(30))
    opened(store, 2, 100, ref(1, 50))
    append_events(store, RUN, "trainer", [restored(2, "1-20")])
    ended(store, 2, 200, outcome=AttemptEndOutcome.DONE)
    first, _ = account(store).steps[0].entries
    assert seconds(first) == {"useful": 30, "discarded": 70}


def test_an_attempt_that_found_all_checkpoints_damaged_began_from_scratch(store):
    opened(store, 1, 0)
    ended(store, 1, 100, over=100, saved=saved(1, 50, 80, began(0, None, 0)))
    opened(store, 2, 100, ref(1, 50))
    append_events(store, RUN, "trainer", [skipped(2, "1-50")])
    ended(store, 2, 200, outcome=AttemptEndOutcome.DONE)
    first, second = account(store).steps[0].entries
    assert seconds(first) == {"discarded": 100}
    assert seconds(second) == {"useful": 100}


def skipped(attempt, checkpoint):
    return Event(name="checkpoint.skipped", step="fit", attempt=attempt, message="", data={"checkpoint": checkpoint})


def restored(attempt, checkpoint):
    return Event(name="checkpoint.restored", step="fit", attempt=attempt, message="", data={"checkpoint": checkpoint})


def test_a_checkpoint_accounts_for_an_attempt_whose_end_was_written_by_another(store):
    opened(store, 1, 0)
    commit(store, ref(1, 50), written_at=at(80), began=began(10, None, 15))
    ended(store, 1, 100, outcome=AttemptEndOutcome.FENCED)
    opened(store, 2, 100, ref(1, 50))
    ended(store, 2, 200, outcome=AttemptEndOutcome.DONE)
    first, _ = account(store).steps[0].entries
    assert seconds(first) == {"starting": 10, "first_step": 5, "useful": 65, "discarded": 20}


def test_an_attempt_that_saved_nothing_is_lost_as_a_whole(store):
    opened(store, 1, 0)
    ended(store, 1, 100, over=90, cause=Cause.INFRASTRUCTURE)
    opened(store, 2, 100)
    ended(store, 2, 200, outcome=AttemptEndOutcome.DONE)
    assert seconds(account(store).steps[0].entries[0]) == {"discarded": 90, "detecting": 10}


def test_a_running_attempt_counts_up_to_its_newest_checkpoint_and_to_now(store):
    opened(store, 1, 0)
    commit(store, ref(1, 50), written_at=at(80), began=began(10, None, 15))
    found = account(store, now=100)
    assert seconds(found.steps[0].entries[0]) == {"starting": 10, "first_step": 5, "useful": 65, "unsaved": 20}
    assert (found.failures, found.goodput, found.lost_gpu_seconds) == (0, 1.0, 0)


def test_the_start_of_a_run_that_did_not_fail_is_not_lost(store):
    opened(store, 1, 0)
    ended(store, 1, 45, over=42, outcome=AttemptEndOutcome.DONE, saved=saved(1, 9, 40, began(19, 20, 23)))
    found = account(store)
    assert seconds(found.steps[0].entries[0]) == {
        "starting": 19,
        "loading": 1,
        "first_step": 3,
        "useful": 19,
        "detecting": 3,
    }
    assert (found.goodput, found.lost_gpu_seconds) == (1.0, 0)


@pytest.mark.parametrize("ahead", [600, -600])
def test_the_clock_of_a_pod_may_be_wrong(store, ahead):
    opened(store, 1, 0)
    times = began(10 + ahead, None, 15 + ahead)
    ended(store, 1, 100, over=100, saved=saved(1, 50, 80 + ahead, times))
    opened(store, 2, 110, ref(1, 50))
    ended(store, 2, 200, outcome=AttemptEndOutcome.DONE)
    first, _ = account(store).steps[0].entries
    assert first.seconds(TimePhase.USEFUL) == 65
    assert first.held_seconds == 100


def test_an_attempt_without_end_is_over_with_its_workflow(store):
    opened(store, 1, 0)
    commit(store, ref(1, 50), written_at=at(80), began=began(10, None, 15))
    claim = SubmissionClaim(
        run=RUN, submission=1, kind=SubmissionKind.ORIGINAL, workflow_name="w", namespace="n", written_at=at(0)
    )
    claim_record(store, RunLayout(RUN).submission(1), claim)
    sealed = SubmissionEnd(run=RUN, submission=1, status="Failed", written_at=at(90))
    claim_record(store, RunLayout(RUN).submission_end(1), sealed)
    (step,) = account(store, now=1e6).steps
    assert step.elapsed_seconds == 90
    assert step.entries[0].seconds(TimePhase.DISCARDED) == 10
    assert step.entries[0].failed_by == "interrupted"


@pytest.mark.parametrize(("lost", "until"), [(90, 90), (30, 80), (1e7, 1e6)], ids=["alive", "saved later", "ahead"])
def test_an_open_attempt_of_a_lost_run_ends_at_the_last_sign_of_life(store, lost, until):
    opened(store, 1, 0)
    commit(store, ref(1, 50), written_at=at(80), began=began(10, None, 15))
    usage = measure_time_usage(RunHistory.for_display(store, RUN), at(1e6), lost_at=at(lost))
    assert (usage.steps[0].elapsed_seconds, usage.steps[0].entries[0].failed_by) == (until, "interrupted")
    usage = measure_time_usage(RunHistory.for_display(store, RUN), at(1e6))
    assert (usage.steps[0].elapsed_seconds, usage.steps[0].entries[0].failed_by) == (1e6, "")


def test_a_recovery_by_another_submission_tells_deciding_and_submitting_apart(store):
    opened(store, 1, 0)
    ended(store, 1, 100, over=100, outcome=AttemptEndOutcome.FENCED)
    layout = RunLayout(RUN)
    claim = SubmissionClaim(
        run=RUN, submission=2, kind=SubmissionKind.RESUME, workflow_name="w", namespace="n", written_at=at(102)
    )
    claim_record(store, layout.submission(2), claim)
    bound = SubmissionBinding(
        run=RUN, submission=2, cluster="c", namespace="n", workflow_name="w", uid="u", written_at=at(103)
    )
    claim_record(store, layout.submission_binding(2), bound)
    opened(store, 2, 107, submission=2)
    (recovery,) = account(store).steps[0].recoveries
    assert (recovery.decide, recovery.submit, recovery.wait, recovery.failed_by) == (2, 1, 4, "fenced")


def submitted(store, number, seconds):
    claim = SubmissionClaim(
        run=RUN, submission=number, kind=SubmissionKind.RESUME, workflow_name="w", namespace="n", written_at=at(seconds)
    )
    claim_record(store, RunLayout(RUN).submission(number), claim)


def test_a_pause_between_a_stop_and_the_resume_is_neither_useful_nor_lost(store):
    opened(store, 1, 0)
    ended(store, 1, 101, outcome=AttemptEndOutcome.FENCED, stopped=True, saved=saved(1, 50, 100, began(0, None, 0)))
    submitted(store, 2, 90_000)
    opened(store, 2, 90_004, ref(1, 50), submission=2)
    ended(store, 2, 90_054, outcome=AttemptEndOutcome.DONE)
    found = account(store, now=1e6)
    (step,) = found.steps
    assert (step.elapsed_seconds, step.held_seconds, step.seconds(TimePhase.DISCARDED)) == (155, 151, 1)
    assert found.goodput == pytest.approx(150 / 151), "without the pause and the wait"
    (recovery,) = step.recoveries
    assert (recovery.pause, recovery.decide, recovery.wait, recovery.failed_by) == (90_000 - 101, 0, 4, "stopped")
    assert found.failures == 0


def test_a_program_that_saved_because_it_had_to_stop_trained_no_further(store):
    opened(store, 1, 0)
    end = {"outcome": AttemptEndOutcome.FENCED, "stopped": True}
    ended(store, 1, 101, saved=saved(1, 50, 100, began(0, None, 0), at_stop=True), **end)
    opened(store, 2, 200, ref(1, 50), submission=2)
    (step,) = account(store, now=200).steps
    assert seconds(step.entries[0]) == {"useful": 100, "detecting": 1}


def test_a_save_at_a_stop_is_known_by_its_manifest_alone(store):
    opened(store, 1, 0)
    commit(store, ref(1, 50), written_at=at(80), began=began(0, None, 0), reason="sigterm")
    ended(store, 1, 90, outcome=AttemptEndOutcome.FENCED)
    opened(store, 2, 200, ref(1, 50), submission=2)
    (step,) = account(store, now=200).steps
    assert seconds(step.entries[0]) == {"useful": 80, "detecting": 10}


def test_training_before_a_save_at_a_stop_is_lost_where_the_next_attempt_went_back_past_it(store):
    opened(store, 1, 0)
    commit(store, ref(1, 20), written_at=at(30))
    ended(store, 1, 101, over=None, saved=saved(1, 50, 100, began(0, None, 0), at_stop=True))
    opened(store, 2, 200, ref(1, 20), submission=2)
    (step,) = account(store, now=200).steps
    assert seconds(step.entries[0]) == {"useful": 30, "discarded": 70, "detecting": 1}


def test_a_result_counts_to_its_end_also_after_a_save_at_a_stop(store):
    opened(store, 1, 0)
    ended(store, 1, 120, outcome=AttemptEndOutcome.DONE, saved=saved(1, 50, 100, began(0, None, 0), at_stop=True))
    (step,) = account(store).steps
    assert seconds(step.entries[0]) == {"useful": 120}


def test_an_attempt_that_a_resume_ended_is_over_with_its_last_sign_of_life(store):
    opened(store, 1, 0)
    commit(store, ref(1, 50), written_at=at(80), began=began(0, None, 0))
    ended(store, 1, 9000, outcome=AttemptEndOutcome.FENCED, last_alive_at=at(90))
    submitted(store, 2, 9001)
    opened(store, 2, 9002, ref(1, 50), submission=2)
    (step,) = account(store, now=9002).steps
    assert seconds(step.entries[0]) == {"useful": 80, "discarded": 10}
    (recovery,) = step.recoveries
    assert (recovery.decide, recovery.failed_by) == (9001 - 90, "fenced")


def test_clocks_that_disagree_make_no_negative_time(store):
    opened(store, 1, 50)
    ended(store, 1, 40, over=200, saved=saved(1, 5, 10, began(500, 400, 300)))
    opened(store, 2, 30, ref(1, 5))
    ended(store, 2, 60, outcome=AttemptEndOutcome.DONE)
    (step,) = account(store).steps
    assert all(span.seconds > 0 for entry in step.entries for span in entry.spans)
    assert all(value >= 0 for one in step.recoveries for value in one.model_dump().values() if isinstance(value, float))


def test_queues_gather_the_steps_that_they_gave_gpus_to(store):
    opened(store, 1, 0)
    ended(store, 1, 100, outcome=AttemptEndOutcome.DONE)
    (queue,) = group_by_queue([account(store), account(store)])
    assert (queue.name, len(queue.steps), queue.goodput) == ("research", 2, 1.0)


def test_a_run_that_never_began_has_no_goodput(store):
    assert account(store).goodput is None


def test_lineage_of_another_run_is_not_this_runs_time(store):
    opened(store, 1, 0, ref(7, 10, "parent-1/fit"))
    ended(store, 1, 100, outcome=AttemptEndOutcome.DONE)
    assert account(store).goodput == 1.0
    assert LINEAGE != "parent-1/fit"


MARCH, APRIL = datetime(2026, 3, 31, 23, tzinfo=UTC), datetime(2026, 4, 1, 1, tzinfo=UTC)
LATER = datetime(2026, 5, 1, tzinfo=UTC)


def gpu_time(store: MemoryStore, since: datetime, now: datetime = LATER) -> list[tuple[str, str, str, float]]:
    times = measure_gpu_time([("team-a", RunHistory(store, RUN))], since, now)
    return [(time.month, time.namespace, time.gpu_kind, time.gpu_seconds) for time in times]


def test_gpu_time_counts_from_the_claim_to_the_end_in_the_months_in_which_it_was() -> None:
    store = MemoryStore()
    write_run(store, gpu=GpuRequest(gpus=4, gpu_type="A100"))
    write_claim(store, claim_of(1).model_copy(update={"written_at": MARCH}))
    write_end(store, end_of(1).model_copy(update={"written_at": APRIL}))
    write_claim(store, claim_of(2).model_copy(update={"written_at": APRIL + timedelta(hours=1), "flavor": "spot"}))
    assert gpu_time(store, NOON, APRIL + timedelta(hours=2)) == [
        ("2026-03", "team-a", "A100", 4 * 3600.0),
        ("2026-04", "team-a", "A100", 4 * 3600.0),
        ("2026-04", "team-a", "spot", 4 * 3600.0),
    ], "the second runs for an hour now"
    half = MARCH + timedelta(minutes=30)
    assert gpu_time(store, half, APRIL)[0] == ("2026-03", "team-a", "A100", 2 * 3600.0)
    assert gpu_time(store, LATER, LATER) == []


def test_gpu_time_of_an_elastic_training_is_of_the_members_that_it_started_with() -> None:
    store = MemoryStore()
    write_run(store, gpu=GpuRequest(gpus=32, members=4, min_members=2))
    write_claim(store, claim_of(1).model_copy(update={"written_at": APRIL, "members": 3, "gpu_type": "T4"}))
    write_end(store, end_of(1).model_copy(update={"written_at": APRIL + timedelta(hours=1)}))
    assert gpu_time(store, NOON) == [("2026-04", "team-a", "T4", 24 * 3600.0)]


def test_a_step_without_gpus_has_no_gpu_time() -> None:
    store = MemoryStore()
    write_run(store)
    write_claim(store, claim_of(1).model_copy(update={"written_at": APRIL}))
    assert gpu_time(store, NOON) == []
