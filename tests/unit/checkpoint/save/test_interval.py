"""How often to save, from what saves cost and how often attempts die.

| grows | the advised interval |
|---|---|
| what a save costs | never falls |
| time between failures | never falls |
| neither may take it | out of its bounds, but for an upload that takes longer |
| no failure yet | is that of the prior, not infinite |
"""

import time
from datetime import UTC, datetime, timedelta

import pytest
from bench.resume.optimum import lost_share
from hypothesis import given
from hypothesis import strategies as st
from support.builders.lineage import LINEAGE, RUN, STEP, claim_of, end_of, write_claim
from support.fakes.memory_store import MemoryStore
from support.stories.sessions import Clock

from tiphys.checkpoint.save.interval import (
    RESTART,
    FailureHistory,
    SaveCost,
    SaveIntervalController,
    advised_interval_seconds,
    daly_interval_seconds,
    open_interval_controller,
    read_failure_history,
    young_interval_seconds,
)
from tiphys.checkpoint.settings import CheckpointSettings, IntervalBounds, SaveInterval, is_save_due
from tiphys.records import AttemptEndOutcome, Cause, utc_now
from tiphys.store import Attempt

DAY = 24 * 3600.0
BEGAN = datetime(2030, 1, 1, tzinfo=UTC)
AUTO = SaveInterval(600.0, "seconds", auto=IntervalBounds(60.0, 3600.0))

costs = st.floats(0.001, 1e5)
times = st.floats(1.0, 1e8)


def attempt(number, hours, cause=Cause.PREEMPTION, outcome=AttemptEndOutcome.FAILED):
    claim = claim_of(number).model_copy(update={"written_at": BEGAN})
    end = end_of(number, cause, outcome=outcome).model_copy(update={"written_at": BEGAN + timedelta(hours=hours)})
    return Attempt(claim, end)


def test_young_and_daly_give_the_numbers_of_their_papers():
    assert young_interval_seconds(60, DAY) == pytest.approx(3220, abs=1)
    # Where saving is cheap the two meet; where it is dear the higher order is shorter.
    assert daly_interval_seconds(1, DAY) == pytest.approx(young_interval_seconds(1, DAY), rel=0.01)
    assert daly_interval_seconds(3600, DAY) < young_interval_seconds(3600, DAY)


@pytest.mark.parametrize(("cost", "mtbf"), [(5, 3600), (60, DAY), (600, 7200)])
def test_dalys_interval_is_where_the_least_time_is_lost(cost, mtbf):
    best = daly_interval_seconds(cost, mtbf)
    lost = lost_share(best, cost, 300, mtbf)
    assert lost <= lost_share(best * 1.3, cost, 300, mtbf)
    assert lost <= lost_share(best / 1.3, cost, 300, mtbf)


def test_an_interval_that_never_gets_through_loses_everything():
    assert lost_share(1e6, 10, 10, 60) == float("inf")


def test_saves_that_cost_nothing_may_follow_each_other_at_once():
    assert lost_share(0, 0, 30, 60) == pytest.approx(lost_share(1e-6, 0, 30, 60))
    assert lost_share(0, 1, 30, 60) == float("inf")


@given(costs, costs, times)
def test_dearer_saves_never_come_more_often(one, other, mtbf):
    cheap, dear = sorted((one, other))
    assert daly_interval_seconds(cheap, mtbf) <= daly_interval_seconds(dear, mtbf) * (1 + 1e-9)


@given(costs, times, times)
def test_rarer_failures_never_bring_more_saves(cost, one, other):
    often, rarely = sorted((one, other))
    assert daly_interval_seconds(cost, often) <= daly_interval_seconds(cost, rarely) * (1 + 1e-9)


@given(st.lists(st.builds(SaveCost, costs, costs), min_size=1, max_size=5), times, costs, costs)
def test_the_advised_interval_stays_within_bounds_and_above_every_upload(saves, mtbf, one, other):
    lowest, highest = sorted((one, other))
    slowest = max(save.upload_seconds for save in saves)
    found = advised_interval_seconds(saves, mtbf, lowest, highest)
    assert max(lowest, slowest) <= found <= max(highest, slowest)


def test_failures_are_counted_by_cause_and_training_time_from_claim_to_end():
    attempts = [
        attempt(1, 2),
        attempt(2, 3),
        attempt(3, 1, Cause.OUT_OF_MEMORY),
        attempt(4, 1, Cause.OUTPUT_MISSING),
        attempt(5, 4, outcome=AttemptEndOutcome.FENCED),
        attempt(6, 5, outcome=AttemptEndOutcome.DONE),
        Attempt(claim_of(7), None),
    ]
    found = read_failure_history(attempts)
    assert found.failures == {"preemption": 2, "out_of_memory": 1, "fenced": 1}
    assert found.training_seconds == 16 * 3600


def test_restarts_in_the_pod_are_failures_of_attempts_that_have_none():
    claim, end = attempt(1, 2, None, outcome=AttemptEndOutcome.DONE)
    found = read_failure_history([Attempt(claim, end.model_copy(update={"incarnations": 4}))])
    assert found.failures == {RESTART: 3}


def test_process_that_was_started_again_counts_the_restarts_of_its_attempt():
    """Its attempt has no end yet, and trains since its claim."""
    store = MemoryStore()
    write_claim(store, claim_of(1).model_copy(update={"written_at": utc_now() - timedelta(hours=2)}))
    settings = CheckpointSettings(RUN, STEP, 1, LINEAGE, "s", "s", save_every=AUTO, incarnation=3)
    history = open_interval_controller(settings, store, time.monotonic)._history
    assert history.failures == {RESTART: 2}
    assert history.training_seconds == pytest.approx(7200, abs=600)


def test_a_clock_that_ran_backwards_counts_as_no_time():
    assert read_failure_history([attempt(1, -5)]) == FailureHistory({"preemption": 1}, 0.0)


def test_no_failure_yet_is_not_never_and_an_early_one_not_always():
    assert FailureHistory().mtbf_seconds() == DAY
    assert FailureHistory({}, DAY).mtbf_seconds() > 2 * DAY
    assert FailureHistory({"preemption": 1}, 10.0).mtbf_seconds() > 3600


def test_failures_every_few_minutes_are_soon_believed():
    assert FailureHistory({"preemption": 1}, 300.0).mtbf_seconds() < DAY / 10
    assert FailureHistory({"preemption": 5}, 1500.0).mtbf_seconds() < 3600


def test_an_attempt_saves_earlier_than_those_before_it_that_died_without_a_save():
    """They could not learn what a save costs."""
    begins = [
        SaveIntervalController(AUTO, FailureHistory({"preemption": n}, n * 300.0), clock=Clock()).current.amount
        for n in range(100)
    ]
    assert begins[0] == 600
    assert begins[1] < 300
    assert begins == sorted(begins, reverse=True)
    assert begins[-1] == AUTO.auto.lowest_seconds


def test_neither_calm_nor_failures_move_where_it_begins_out_of_bounds_or_what_was_set_by_hand():
    assert SaveIntervalController(AUTO, FailureHistory({}, 100 * DAY), clock=Clock()).current.amount == 600
    fixed = SaveInterval(600.0, "seconds")
    assert SaveIntervalController(fixed, FailureHistory({"preemption": 9}, 60.0), clock=Clock()).current == fixed


def test_a_fixed_interval_stays_whatever_is_measured():
    for every in (SaveInterval(600.0, "seconds"), SaveInterval(100, "steps")):
        interval = SaveIntervalController(every, clock=Clock())
        assert interval.observe_save(50.0, 500.0, 1 << 30) is None
        assert interval.current == every
    assert interval.current.unit == "steps"


def test_auto_follows_what_saves_cost_and_tells_only_large_changes():
    interval = SaveIntervalController(AUTO, clock=Clock())
    assert interval.current.amount == 600.0
    change = interval.observe_save(0.1, 10.0, 1 << 30)  # costs 1.1 s
    assert interval.current.amount == pytest.approx(daly_interval_seconds(1.1, DAY))
    assert change is not None
    assert change.message == (
        "a save is due every 7m 15s from now on, 10m until now: the last one stopped the training for 100ms and "
        "uploaded for 10s, and a failure is expected every 1d (0 so far)"
    )
    assert change.data["cost_seconds"] == 1.1
    assert interval.observe_save(0.1, 12.0, 1 << 30) is None
    assert interval.current.amount == pytest.approx(daly_interval_seconds(1.2, DAY))


def test_small_changes_are_reported_once_they_add_up():
    interval = SaveIntervalController(AUTO, clock=Clock())
    interval.observe_save(1.0, 0.0, 1)
    reported = [interval.observe_save(1.0 + 0.12 * n, 0.0, 1) is not None for n in range(12)]
    assert 0 < sum(reported) < 4


def test_failures_of_earlier_attempts_shorten_it_and_quiet_time_lengthens_it():
    clock = Clock()
    calm, troubled = (
        SaveIntervalController(AUTO, clock=clock),
        SaveIntervalController(AUTO, FailureHistory({"preemption": 20}, DAY), clock=clock),
    )
    for interval in (calm, troubled):
        interval.observe_save(2.0, 0.0, 1)
    assert troubled.current.amount < calm.current.amount
    before = troubled.current.amount
    clock.advance(5 * DAY)
    troubled.observe_save(2.0, 0.0, 1)
    assert troubled.current.amount > before


def test_a_single_slow_save_does_not_decide_the_cost_of_saves():
    interval = SaveIntervalController(AUTO, clock=Clock())
    for stall in (1.0, 1.0, 400.0, 1.0, 1.0):
        interval.observe_save(stall, 0.0, 1)
    assert interval.current.amount == pytest.approx(daly_interval_seconds(1.0, DAY))


def test_the_schedule_follows_it():
    interval = SaveIntervalController(AUTO, clock=Clock())
    interval.observe_save(0.1, 0.0, 1)
    assert interval.current.amount < 200
    assert is_save_due(interval.current, seconds_since_save=200, last_step=1, global_step=2)
    assert not is_save_due(AUTO, seconds_since_save=200, last_step=1, global_step=2)
