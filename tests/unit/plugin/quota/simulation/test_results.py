"""The numbers of a replay, on cases that are counted by hand."""

import pytest
from support.builders.ledger import cohort, queues
from tiphys_plugin.quota.lease import AdmissionReason
from tiphys_plugin.quota.simulation.jobs import TraceJob
from tiphys_plugin.quota.simulation.replay import replay_jobs
from tiphys_plugin.quota.simulation.results import QueueOutcome, SimulationOutcome, compute_jain_index, measure_replay

HOUR = 3600.0


def job(at: float, duration: float, gpus: int, queue: str = "research", **more: object) -> TraceJob:
    return TraceJob(f"{queue}-{at:g}", at * HOUR, duration * HOUR, gpus, queue, **more)  # type: ignore[arg-type]


def of(found: SimulationOutcome, name: str) -> QueueOutcome:
    return next(one for one in found.queues if one.queue == name)


def test_waits_completion_and_slowdown_of_three_jobs_in_a_row():
    """Each takes 2 h and all 4 GPUs; submitted at 0, 1 and 1 h, they wait 0, 1 and 3 h."""
    found = of(
        measure_replay(replay_jobs(queues(research={"*": 4}), [job(0, 2, 4), job(1, 2, 4), job(1, 2, 4)])), "research"
    )
    assert (found.jobs, found.started, found.rejected, found.waiting) == (3, 3, {}, 0)
    assert found.wait is not None
    assert (found.wait.mean, found.wait.p50, found.wait.p90, found.wait.p99, found.wait.most) == (
        pytest.approx(4 / 3 * HOUR),
        HOUR,
        3 * HOUR,
        3 * HOUR,
        3 * HOUR,
    )
    assert found.completion_seconds == pytest.approx((2 + 3 + 5) / 3 * HOUR)
    assert found.slowdown == pytest.approx((1 + 1.5 + 2.5) / 3)
    assert found.gpu_hours == pytest.approx(24)
    assert found.quota_utilisation == pytest.approx(1.0)
    assert found.longest_line == 2


def test_percentiles_are_waits_that_happened():
    """One GPU, a hundred jobs of a second at once: they wait 0 to 99 s."""
    jobs = [TraceJob(f"j{n}", 0, 1, 1, "research") for n in range(100)]
    found = of(measure_replay(replay_jobs(queues(research={"*": 1}), jobs)), "research").wait
    assert found is not None
    assert (found.p50, found.p90, found.p99, found.most) == (49, 89, 98, 99)


def test_a_short_job_is_not_a_thousand_times_slower():
    jobs = [TraceJob("long", 0, 1000, 1, "research"), TraceJob("blink", 0, 0, 1, "research")]
    assert of(measure_replay(replay_jobs(queues(research={"*": 1}), jobs)), "research").slowdown == pytest.approx(
        (1 + 100) / 2
    )


def test_borrowed_gpus_are_those_beyond_the_quota():
    """A queue of 2 holds 6 for 3 h, of which 4 are borrowed; the other holds 1 of its 6 for an hour meanwhile."""
    rules = cohort(research={"gpus": {"A100": 2}}, nightly={"gpus": {"A100": 6}})
    found = measure_replay(replay_jobs(rules, [job(0, 3, 6), job(0, 1, 1, "nightly")]))
    assert of(found, "research").borrowed_gpu_hours == pytest.approx(12)
    assert of(found, "nightly").borrowed_gpu_hours == 0
    assert found.total.borrowed_gpu_hours == pytest.approx(12)
    assert of(found, "research").quota_utilisation == pytest.approx(3.0)
    assert of(found, "nightly").quota_utilisation == pytest.approx(1 / 18)
    assert found.total.quota_utilisation == pytest.approx(19 / 24)


def test_the_inventory_is_used_by_all_together():
    rules = queues({"A100": {"count": 8}, "T4": {"count": 2}}, research={"A100": 4}, nightly={"A100": 4})
    found = measure_replay(replay_jobs(rules, [job(0, 2, 4), job(0, 1, 4, "nightly")]))
    assert found.inventory_utilisation == pytest.approx(12 / 20)
    assert measure_replay(replay_jobs(queues(research={"*": 1}), [job(0, 1, 1)])).inventory_utilisation is None


def test_the_total_is_over_jobs_and_not_over_queues():
    rules = queues(research={"*": 1}, nightly={"*": 1})
    found = measure_replay(replay_jobs(rules, [job(0, 1, 1), job(0, 1, 1), job(0, 1, 1), job(0, 4, 1, "nightly")]))
    assert found.total.wait is not None
    assert found.total.wait.mean == pytest.approx(3 / 4 * HOUR)
    assert (found.total.jobs, found.total.gpu_hours, found.total.longest_line) == (4, pytest.approx(7), 2)
    assert found.span_seconds == 4 * HOUR


def test_a_rejected_job_is_counted_in_its_queue():
    found = measure_replay(
        replay_jobs(queues(research={"*": 1}), [job(0, 1, 2), job(0, 1, 1, "lost"), job(0, 1, 1, "lost")])
    )
    assert of(found, "research").rejected == {AdmissionReason.EXCEEDS_MAX_QUOTA: 1}
    assert of(found, "lost").rejected == {AdmissionReason.QUEUE_UNKNOWN: 2}
    assert found.total.rejected == {AdmissionReason.EXCEEDS_MAX_QUOTA: 1, AdmissionReason.QUEUE_UNKNOWN: 2}
    assert (found.total.wait, found.total.slowdown, found.total.completion_seconds) == (None, None, None)
    assert (found.span_seconds, found.total.quota_utilisation, found.total.gpu_hours) == (0, None, 0)


@pytest.mark.parametrize(
    ("values", "index"), [((1, 1, 1), 1.0), ((1, 0), 0.5), ((3, 1), 0.8), ((1,), None), ((0, 0), None), ((), None)]
)
def test_index_of_jain(values, index):
    assert compute_jain_index(values) == (None if index is None else pytest.approx(index))


def fairness_of(*weights: float, gpus: tuple[int, int]) -> dict[str, float]:
    """Two queues without GPUs of their own that hold so many of a third one's, and always want more."""
    rules = cohort(
        owner={"gpus": {"*": 8}},
        one={"gpus": {"*": 0}, "borrowing_limit": {"*": gpus[0]}, "weight": weights[0]},
        two={"gpus": {"*": 0}, "borrowing_limit": {"*": gpus[1]}, "weight": weights[1]},
    )
    jobs = [job(0, 1, held, name) for name, held in zip(("one", "two"), gpus, strict=True) for _ in range(3)]
    return measure_replay(replay_jobs(rules, jobs)).fairness


def test_queues_that_compete_are_compared_by_what_their_weight_gives_them():
    assert fairness_of(1, 1, gpus=(4, 4)) == {"lab": pytest.approx(1.0)}
    assert fairness_of(1, 3, gpus=(2, 6)) == {"lab": pytest.approx(1.0)}
    assert fairness_of(1, 1, gpus=(6, 2)) == {"lab": pytest.approx(0.8)}  # 1.5 and 0.5 times their due
    assert fairness_of(3, 1, gpus=(4, 4)) == {"lab": pytest.approx(0.8)}  # 2/3 and 2 times


def test_queues_that_never_wait_together_do_not_compete():
    rules = cohort(research={"gpus": {"*": 1}}, nightly={"gpus": {"*": 1}})
    assert measure_replay(replay_jobs(rules, [job(0, 1, 1), job(0, 1, 1, "nightly")])).fairness == {}
