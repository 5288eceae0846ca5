"""Replays in which trainings go for others: cases counted by hand, and laws for any jobs.

| law                                                                          |
|------------------------------------------------------------------------------|
| every job ends once, and nobody holds more than quotas and inventory allow   |
| what was trained for good adds up to the job, whatever came in between       |
| all that was held is training for good, training lost, saves and ways back   |
| who saves before it goes loses no training                                   |
| only a lower priority, one behind in its queue or a borrower has to go       |
| two have each other go at most once for each level                           |
| a look at all who wait gives the same as one at the first of each kind       |
"""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler.fair_share import attained_level, attained_level_of
from tiphys_plugin.quota.simulation.jobs import PreemptionCosts, ReplayResult, SimulatedAttempt, SimulatedRun, TraceJob
from tiphys_plugin.quota.simulation.prepare import spread_over_nodes
from tiphys_plugin.quota.simulation.replay import replay_jobs
from tiphys_plugin.quota.simulation.results import build_timeline, measure_replay
from tiphys_plugin.quota.simulation.simulated_cluster import SimulatedCluster

HOUR = 3600.0
COSTS = PreemptionCosts(checkpoint_every_seconds=600, save_seconds=30, restart_seconds=60)


def rules(**changes) -> Queues:
    queue = {"name": "research", "gpus": {"*": 8}, "order": "attained", "attained_gpu_hours": [1, 8]}
    return Queues.model_validate({"queues": [{**queue, "preempts_longer": True, "min_runtime_seconds": 0, **changes}]})


def job(name: str, at: float, seconds: float, gpus: int = 8, **more) -> TraceJob:
    return TraceJob(name, at, seconds, gpus, **{"queue": "research", **more})


def run_of(done: ReplayResult, name: str) -> SimulatedRun:
    return next(run for run in done.runs if run.job.name == name)


LONG, SHORT = job("long", 0, 4 * HOUR), job("short", 2 * HOUR + 100, 600)


def test_a_short_training_starts_once_a_long_one_has_saved_and_gone():
    done = replay_jobs(rules(), [LONG, SHORT], costs=COSTS)
    short, long = run_of(done, "short"), run_of(done, "long")
    assert (short.started_seconds, short.ended_seconds) == (2 * HOUR + 130, 2 * HOUR + 730)
    assert long.attempts == (
        SimulatedAttempt("*", 0, 0, 2 * HOUR + 130, kept_seconds=2 * HOUR + 100),
        SimulatedAttempt(
            "*", 2 * HOUR + 130, 2 * HOUR + 730, 4 * HOUR + 690, kept_seconds=2 * HOUR - 100, restart_seconds=60
        ),
    )
    assert long.lost_gpu_seconds == 8 * (30 + 60)
    total = measure_replay(done).total
    assert (total.preemptions, total.lost_gpu_hours) == (1, pytest.approx(0.2))


def test_a_job_takes_less_time_on_a_faster_type_and_trains_the_rest_on_the_one_that_it_gets_then():
    """It loses the H100 after an hour, which is half of its training, and goes on with the A100."""
    queue = {"name": "research", "gpus": {"H100": 8, "A100": 8}, "preempts_lower_priority": True}
    both = Queues.model_validate({"queues": [queue]})
    wanted = job("either", 0, 4 * HOUR, gpu_type="A100|H100", speed=(1, 2))
    only = job("only", HOUR, HOUR, gpu_type="H100", priority=1)
    assert run_of(replay_jobs(both, [wanted], costs=COSTS), "either").ended_seconds == 2 * HOUR
    run = run_of(replay_jobs(both, [wanted, only], costs=COSTS), "either")
    assert [(one.pool, one.kept_seconds) for one in run.attempts] == [("H100", HOUR), ("A100", 2 * HOUR)]
    assert run.trained_seconds == 3 * HOUR
    assert measure_replay(ReplayResult(both, (run,), (), (), 1)).total.slowdown == pytest.approx(1 + 90 / (3 * HOUR))


def test_the_limit_of_a_job_is_the_same_on_each_type():
    both = Queues.model_validate({"queues": [{"name": "research", "gpus": {"H100": 8, "A100": 8}}]})
    jobs = [job(str(at), at, 4 * HOUR, gpu_type="A100|H100", speed=(1, 2), limit_seconds=9000) for at in (0, 1)]
    done = replay_jobs(both, jobs)
    assert {one.pool: one.held_seconds for run in done.runs for one in run.attempts} == {"H100": 7200, "A100": 9000}


def test_the_type_of_a_job_on_any_quota_is_that_of_its_node():
    nodes = [{"name": kind, "gpu_type": kind, "gpus": 8} for kind in ("A100", "H100")]
    rules = Queues.model_validate({"queues": [{"name": "research", "gpus": {"*": 16}}], "nodes": nodes})
    jobs = [job(str(at), at, HOUR, gpu_type="A100|H100", speed=(1, 2)) for at in (0, 1)]
    assert [run_of(replay_jobs(rules, jobs), name).ended_seconds for name in "01"] == [HOUR / 2, HOUR + 1]


def test_a_training_preempted_without_a_save_repeats_the_lost_part():
    done = replay_jobs(rules(), [LONG, SHORT], costs=PreemptionCosts(600, 30, 60, waits_for_save=False))
    assert run_of(done, "short").started_seconds == SHORT.submit_seconds
    first, second = run_of(done, "long").attempts
    assert (first.kept_seconds, first.lost_seconds, first.held_seconds) == (2 * HOUR, 100, 2 * HOUR + 100)
    assert second.kept_seconds == 2 * HOUR


def test_replays_preempt_only_with_costs_and_permission_of_the_queue():
    for queues, costs in ((rules(), None), (rules(preempts_longer=False), COSTS)):
        assert run_of(replay_jobs(queues, [LONG, SHORT], costs=costs), "short").started_seconds == 4 * HOUR


def test_a_training_that_reaches_the_next_level_is_preempted_for_a_waiting_one():
    """After an hour of 8 GPUs; the one that waits had come long before."""
    done = replay_jobs(rules(), [LONG, job("short", 10, 600)], costs=COSTS)
    assert run_of(done, "short").started_seconds == pytest.approx(HOUR / 8 + 30, abs=1e-3)


def test_the_shortest_time_of_the_queue_is_waited_for():
    done = replay_jobs(rules(min_runtime_seconds=3 * 3600), [LONG, SHORT], costs=COSTS)
    assert run_of(done, "short").started_seconds == 3 * HOUR + 30


def test_a_service_looks_at_its_own_times():
    """Every minute: who has to go is asked at the first look, who waits starts at the next one after the save."""
    done = replay_jobs(rules(), [LONG, SHORT], costs=PreemptionCosts(600, 30, 60, look_every_seconds=60))
    assert run_of(done, "short").started_seconds == 2 * HOUR + 180


def test_priorities_and_loans_have_trainings_go_as_well():
    own = {"name": "research", "gpus": {"*": 4}, "cohort": "lab", "reclaims": True, "preempts_lower_priority": True}
    lab = Queues.model_validate({"queues": [own, {"name": "guests", "gpus": {"*": 4}, "cohort": "lab"}]})
    jobs = [
        job("host", 0, HOUR, 4, queue="guests"),
        job("guest", 1, HOUR, 4, queue="guests"),
        job("owner", 100, HOUR, 4),
        job("urgent", 200, 60, 4, priority=9),
    ]
    done = replay_jobs(lab, jobs, costs=COSTS)
    assert run_of(done, "owner").started_seconds == 130
    assert run_of(done, "urgent").started_seconds == 230
    assert [run_of(done, name).preemptions for name in ("host", "guest", "owner", "urgent")] == [0, 1, 1, 0]


def test_gangs_are_placed_on_nodes_and_go_whole():
    nodes = [{"name": f"n{number}", "gpu_type": "A100", "gpus": 8} for number in range(2)]
    two = Queues.model_validate({"queues": rules(gpus={"*": 16}).model_dump()["queues"], "nodes": nodes})
    jobs = spread_over_nodes([job("gang", 0, HOUR, 16), job("small", 1800, 60, 2)], two)
    assert [one.members for one in jobs] == [2, 1]
    done = replay_jobs(two, jobs, costs=COSTS)
    assert run_of(done, "small").started_seconds == 1830
    assert run_of(done, "gang").ended_seconds == HOUR + 30 + 60 + 60


def test_a_declared_limit_covers_the_way_back():
    done = replay_jobs(rules(), [job("long", 0, 4 * HOUR, limit_seconds=14400), SHORT], costs=COSTS)
    assert sum(one.kept_seconds for one in run_of(done, "long").attempts) == 4 * HOUR


jobs_of_any_kind = st.lists(
    st.builds(
        TraceJob,
        name=st.just("job"),
        submit_seconds=st.integers(0, 3000).map(float),
        duration_seconds=st.integers(0, 4000).map(float),
        gpus=st.sampled_from([1, 2, 4, 8]),
        queue=st.sampled_from(["research", "research", "guests"]),
        priority=st.sampled_from([0, 0, 0, 5]),
        limit_seconds=st.sampled_from([None, None, 3000]),
    ),
    max_size=14,
)
flags = st.fixed_dictionaries(
    {
        "preempts_lower_priority": st.booleans(),
        "min_runtime_seconds": st.sampled_from([0, 0, 300]),
        "reclaims": st.booleans(),
    }
)
costs_of_any_kind = st.builds(
    PreemptionCosts,
    checkpoint_every_seconds=st.sampled_from([100.0, 600.0]),
    save_seconds=st.sampled_from([0.0, 7.0, 40.0]),
    restart_seconds=st.sampled_from([0.0, 50.0]),
    waits_for_save=st.booleans(),
    look_every_seconds=st.sampled_from([0.0, 0.0, 15.0]),
)


class Recorded(SimulatedCluster):
    """Remembers who had whom go, with priority and level of both."""

    seen: list[tuple[tuple[str, int, int], tuple[str, int, int], bool]]

    def preempt(self, selection, preemptor, now):
        for lease in selection.leases:
            asked, own = lease.request, preemptor.request
            queue = self._queues.find(asked.queue)
            first = (own.uid, own.priority, attained_level(self._queues.find(own.queue), own.attained, own.most_gpus))
            other = (asked.uid, asked.priority, attained_level_of(queue, lease, now))
            self.seen.append((first, other, own.queue == asked.queue))
        super().preempt(selection, preemptor, now)


@contextmanager
def recorded() -> Iterator[list]:
    Recorded.seen = []
    with mock.patch("tiphys_plugin.quota.simulation.replay.SimulatedCluster", Recorded):
        yield Recorded.seen


@given(jobs=jobs_of_any_kind, flags=flags, costs=costs_of_any_kind)
@settings(max_examples=40, deadline=None)
def test_laws_of_going_and_coming_back(jobs: list[TraceJob], flags: dict, costs: PreemptionCosts) -> None:
    own = {**rules(gpus={"*": 6}, attained_gpu_hours=[0.25, 1]).model_dump()["queues"][0], "cohort": "lab", **flags}
    lab = Queues.model_validate({"queues": [own, {"name": "guests", "gpus": {"*": 2}, "cohort": "lab"}]})
    with recorded() as seen:
        done = replay_jobs(lab, jobs, costs=costs)
    assert done.never_started == ()
    assert Counter(run.job for run in done.runs) == Counter(jobs)
    for span in build_timeline(done):
        assert span.held.total() <= 8
        assert all(gpus >= 0 for gpus in span.held.values())
    for run in done.runs:
        accounted(run, costs)
    for (_, priority, level), (_, other_priority, other_level), same_queue in seen:
        if same_queue:
            assert (-other_priority, other_level) >= (-priority, level)
    chased = Counter((one[0], other[0]) for one, other, same_queue in seen if same_queue)
    assert all(min(times, chased[other, one]) <= 2 for (one, other), times in chased.items())
    with mock.patch("tiphys_plugin.quota.simulation.simulated_cluster._max_relevant", lambda kind, gpus: len(jobs)):
        assert done == replay_jobs(lab, jobs, costs=costs)


def accounted(run: SimulatedRun, costs: PreemptionCosts) -> None:
    for one in run.attempts:
        assert min(one.kept_seconds, one.lost_seconds, one.restart_seconds) >= 0
        saving = one.held_seconds - one.kept_seconds - one.lost_seconds - one.restart_seconds
        went = one is not run.attempts[-1]
        assert saving == pytest.approx(costs.save_seconds if went and costs.waits_for_save else 0, abs=1e-3)
        assert one.lost_seconds == 0 or not costs.waits_for_save
        assert one.started_seconds >= one.requested_seconds
    expected = min(run.job.duration_seconds, run.job.limit_seconds or math.inf)
    assert run.trained_seconds == pytest.approx(expected, abs=1e-3)
    for before, after in zip(run.attempts, run.attempts[1:], strict=False):
        assert after.requested_seconds == before.ended_seconds
