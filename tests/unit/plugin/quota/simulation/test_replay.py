"""The laws of a replay, for any jobs under any queues.

| law                                                        | policies   |
|------------------------------------------------------------|------------|
| nobody holds more than quotas, cohort and inventory allow  | all        |
| who is not rejected starts, once, and ends                 | all        |
| GPUs are held for as long as the job takes, or its limit   | all        |
| who fits on an idle cluster does not wait                  | all        |
| the same jobs and queues give the same replay              | all        |
| more quota serves no fewer jobs, and equal ones no later   | all        |
| strict order of arrival                                    | fifo       |
| a gang is not starved by small jobs                        | tiphys     |
"""

import math
import random
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.builders.ledger import cohort, queues, strict
from tiphys_plugin.quota.lease import AdmissionReason
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.simulation.jobs import ReplayResult, TraceJob
from tiphys_plugin.quota.simulation.replay import POLICIES, replay_jobs
from tiphys_plugin.quota.simulation.results import build_timeline, measure_replay

TYPES = ("A100", "T4", None)
NAMES = ("research", "nightly")

jobs_of_any_kind = st.lists(
    st.builds(
        TraceJob,
        name=st.just("job"),
        submit_seconds=st.integers(0, 40).map(float),
        duration_seconds=st.integers(0, 30).map(float),
        gpus=st.sampled_from([1, 2, 4, 8]),
        queue=st.sampled_from([*NAMES, "unknown"]),
        gpu_type=st.sampled_from(TYPES),
        priority=st.sampled_from([0, 0, 5]),
        limit_seconds=st.sampled_from([None, None, 5, 30]),
    ),
    max_size=25,
)
quotas = st.fixed_dictionaries({"A100": st.integers(0, 8), "*": st.integers(0, 6)})
stock = st.none() | st.just({"A100": {"count": 6}, "T4": {"count": 4}})
rules_of_any_kind = st.builds(
    lambda one, two, shared, inventory: (
        cohort(inventory, research={"gpus": one, "weight": 2}, nightly={"gpus": two})
        if shared
        else queues(inventory, research=one, nightly=two)
    ),
    quotas,
    quotas,
    st.booleans(),
    stock,
)
policies = pytest.mark.parametrize("policy", POLICIES)


def assert_nobody_holds_too_much(done: ReplayResult) -> None:
    rules = done.queues
    for span in build_timeline(done):
        for queue in rules.queues:
            for pool in queue.gpus:
                assert span.held[queue.name, pool] <= rules.max_gpus(queue, pool)
        for pool in ("A100", "*"):
            together = sum(span.held[name, pool] for name in NAMES)
            assert together <= sum(queue.gpus[pool] for queue in rules.queues)
        if rules.inventory is not None:
            assert span.held.total() <= sum(one.count for one in rules.inventory.values())
            assert sum(span.held[name, "A100"] for name in NAMES) <= rules.inventory["A100"].count


@policies
@given(rules=rules_of_any_kind, jobs=jobs_of_any_kind)
@settings(max_examples=40)
def test_every_job_has_one_fate_and_quotas_hold(policy: str, rules: Queues, jobs: list[TraceJob]) -> None:
    done = replay_jobs(rules, jobs, POLICIES[policy])
    assert_nobody_holds_too_much(done)
    assert done.never_started == ()
    fates = Counter([run.job for run in done.runs] + [job for job, _ in done.rejected])
    assert fates == Counter(jobs)
    for run in done.runs:
        assert run.started_seconds >= run.submitted_seconds == run.job.submit_seconds
        assert run.ended_seconds - run.started_seconds == min(
            run.job.duration_seconds, run.job.limit_seconds or math.inf
        )
    assert done == replay_jobs(rules, jobs, POLICIES[policy])


@policies
@given(rules=rules_of_any_kind, jobs=jobs_of_any_kind)
@settings(max_examples=30)
def test_a_job_that_is_alone_does_not_wait(policy: str, rules: Queues, jobs: list[TraceJob]) -> None:
    for job in jobs[:3]:
        done = replay_jobs(rules, [job], POLICIES[policy])
        assert all(run.started_seconds == run.submitted_seconds for run in done.runs)


@policies
@given(jobs=jobs_of_any_kind, less=quotas, more=quotas)
@settings(max_examples=30)
def test_more_quota_rejects_no_job(
    policy: str, jobs: list[TraceJob], less: dict[str, int], more: dict[str, int]
) -> None:
    larger = {pool: less[pool] + more[pool] for pool in less}
    few = replay_jobs(queues(research=less, nightly=less), jobs, POLICIES[policy])
    many = replay_jobs(queues(research=larger, nightly=larger), jobs, POLICIES[policy])
    assert len(many.runs) >= len(few.runs)


@policies
@given(
    gpus=st.integers(1, 4),
    arrivals=st.lists(st.integers(0, 50), min_size=1, max_size=20),
    less=st.integers(4, 8),
    more=st.integers(0, 8),
)
@settings(max_examples=30)
def test_more_quota_never_ends_equal_jobs_later(
    policy: str, gpus: int, arrivals: list[int], less: int, more: int
) -> None:
    # Unequal ones may: Graham's anomalies (1966).
    jobs = [TraceJob(f"j{n}", float(at), 10, gpus, "research") for n, at in enumerate(arrivals)]
    few, many = (replay_jobs(queues(research={"*": quota}), jobs, POLICIES[policy]) for quota in (less, less + more))
    ends = [sorted(run.ended_seconds for run in done.runs) for done in (few, many)]
    assert all(later <= sooner for sooner, later in zip(*ends, strict=True))


@given(rules=rules_of_any_kind, jobs=jobs_of_any_kind)
@settings(max_examples=30)
def test_fifo_starts_in_order_of_arrival(rules: Queues, jobs: list[TraceJob]) -> None:
    done = replay_jobs(rules, jobs, POLICIES["fifo"])
    # Those that start at one moment have no order.
    started = sorted(done.runs, key=lambda run: (run.started_seconds, run.submitted_seconds))
    assert [run.submitted_seconds for run in started] == sorted(run.submitted_seconds for run in started)


def starts(done: ReplayResult) -> dict[str, float]:
    return {run.job.name: run.started_seconds for run in done.runs}


def test_a_policy_has_its_order() -> None:
    """4 GPUs, 3 of them held until 10 s; who comes needs 4, then 1 for longer, then 1 for a short time."""
    jobs = [
        TraceJob("holder", 0, 10, 3, "research", limit_seconds=10),
        TraceJob("large", 1, 10, 4, "research", limit_seconds=10),
        TraceJob("long", 2, 20, 1, "research", limit_seconds=20),
        TraceJob("short", 3, 5, 1, "research", limit_seconds=5),
    ]
    rules = queues(research={"*": 4})
    assert starts(replay_jobs(rules, jobs, POLICIES["fifo"])) == {"holder": 0, "large": 10, "long": 20, "short": 20}
    assert starts(replay_jobs(rules, jobs, POLICIES["skip"])) == {"holder": 0, "long": 2, "short": 10, "large": 22}
    assert starts(replay_jobs(rules, jobs)) == {"holder": 0, "short": 3, "large": 10, "long": 20}


def test_a_stopped_queue_starts_no_job_and_holds_up_no_other() -> None:
    rules = Queues.model_validate(
        {"queues": [{"name": "research", "gpus": {"*": 4}, "stopped": True}, {"name": "nightly", "gpus": {"*": 4}}]}
    )
    jobs = [TraceJob("a", 0, 1, 1, "research"), TraceJob("b", 0, 1, 1, "nightly")]
    for policy in POLICIES.values():
        done = replay_jobs(rules, jobs, policy)
        assert [job.name for job in done.never_started] == ["a"]
        assert starts(done) == {"b": 0}


def test_owners_of_queues_hold_for_jobs_that_name_their_namespace() -> None:
    rules = Queues.model_validate(
        {"queues": [{"name": "research", "gpus": {"A100": 8}, "namespaces": ["ml"], "max_priority": 5}]}
    )

    def job(name: str, **fields: Any) -> TraceJob:
        return TraceJob(name, 0, 10, 1, "research", "A100", **fields)

    jobs = [job("own", namespace="ml"), job("foreign", namespace="vision"), job("unnamed"), job("urgent", priority=9)]
    done = replay_jobs(rules, jobs)
    assert {one.job.name for one in done.runs} == {"own", "unnamed"}
    assert {one.name: why for one, why in done.rejected} == {
        "foreign": AdmissionReason.QUEUE_NOT_ALLOWED,
        "urgent": AdmissionReason.PRIORITY_TOO_HIGH,
    }


def test_the_rejected_jobs_are_listed_with_their_reason() -> None:
    jobs = [
        TraceJob("size", 0, 1, 9, "research"),
        TraceJob("type", 0, 1, 1, "research", gpu_type="T4"),
        TraceJob("queue", 0, 1, 1, "nobody"),
    ]
    done = replay_jobs(queues(research={"A100": 8}), jobs)
    assert {job.name: why for job, why in done.rejected} == {
        "size": AdmissionReason.EXCEEDS_MAX_QUOTA,
        "type": AdmissionReason.NO_MATCHING_GPU_TYPE,
        "queue": AdmissionReason.QUEUE_UNKNOWN,
    }


def test_a_job_beyond_its_limit_is_ended() -> None:
    done = replay_jobs(queues(research={"*": 1}), [TraceJob("a", 0, 100, 1, "research", limit_seconds=30)])
    assert done.runs[0].ended_seconds == 30


def test_a_queue_with_less_recent_usage_goes_first() -> None:
    """What is over counts, as in the service: both hold nothing when both ask for what a third one lends."""
    rules = cohort(owner={"gpus": {"*": 4}}, used={"gpus": {"*": 0}}, fresh={"gpus": {"*": 0}})
    jobs = [
        TraceJob("before", 0, 3600, 2, "used"),
        TraceJob("blocker", 3600, 100, 4, "owner"),
        TraceJob("again", 3601, 10, 4, "used"),
        TraceJob("first", 3602, 10, 4, "fresh"),
    ]
    assert starts(replay_jobs(rules, jobs)) == {"before": 0, "blocker": 3600, "first": 3700, "again": 3710}
    assert starts(replay_jobs(rules, jobs, POLICIES["skip"]))["again"] == 3700


def test_progress_is_reported_to_the_last_job() -> None:
    progress: list[int] = []
    jobs = [TraceJob("a", 0, 1, 1, "research"), TraceJob("b", 0, 1, 1, "research"), TraceJob("c", 0, 1, 1, "unknown")]
    replay_jobs(queues(research={"*": 1}), jobs, advance=progress.append)
    assert sum(progress) == 3


def test_a_replay_runs_few_cycles_while_no_request_fits() -> None:
    jobs = [TraceJob("holder", 0, 100, 4, "research"), *(TraceJob(f"j{n}", n, 1, 1, "research") for n in range(1, 50))]
    assert replay_jobs(queues(research={"*": 4}), jobs).cycles < 20


GANG, GPUS = "gang", 64
HORIZON_SECONDS, ARRIVES_SECONDS = 4000.0, 1000.0


def one_queue() -> Queues:
    return Queues.model_validate({"queues": [{"name": "all", "gpus": {"*": GPUS}}]})


def lending_queues() -> Queues:
    """The small jobs live on what the queue of the gang lends."""
    names = {"all": GPUS, "small": 0}
    document = [{"name": name, "gpus": {"*": gpus}, "cohort": "lab"} for name, gpus in names.items()]
    return Queues.model_validate({"queues": document})


def stream(horizon_seconds: float, seed: int, queue: str = "all", declared: bool = True) -> list[TraceJob]:
    """Small jobs that never let all GPUs be free at once, none of which has to wait, and one that needs all GPUs."""
    draw = random.Random(seed)
    small = []
    for number in range(int(horizon_seconds / 10)):
        duration = draw.randint(100, 300)
        limit = duration if declared else None
        small.append(
            TraceJob(f"small-{number}", 10.0 * number, duration, draw.randint(1, 2), queue, limit_seconds=limit)
        )
    return [*small, TraceJob(GANG, ARRIVES_SECONDS, 600, GPUS, "all", limit_seconds=600 if declared else None)]


def gang_wait(replay: ReplayResult) -> float:
    gang = next(run for run in replay.runs if run.job.name == GANG)
    return gang.started_seconds - gang.submitted_seconds


def gang_bound(replay: ReplayResult) -> float:
    """All that the gang has to wait for: the ends of what runs when it comes. Nobody waits before it."""
    before = [run for run in replay.runs if run.submitted_seconds < ARRIVES_SECONDS]
    assert all(run.started_seconds <= ARRIVES_SECONDS for run in before)
    return max(run.started_seconds + run.job.duration_seconds for run in before) - ARRIVES_SECONDS


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize(("rules", "small"), [(one_queue(), "all"), (lending_queues(), "small")])
def test_a_gang_is_not_starved_by_an_endless_stream_of_small_jobs(rules: Queues, small: str, declared: bool) -> None:
    rules, jobs = strict(rules), stream(HORIZON_SECONDS, seed=6, queue=small, declared=declared)
    others = [job for job in jobs if job.name != GANG]
    assert all(later.submit_seconds < job.submit_seconds + job.duration_seconds for job, later in pairwise(others))
    done = replay_jobs(rules, jobs)
    assert 0 < gang_wait(done) <= gang_bound(done) <= 300
    # The same jobs starve it where nothing is reserved: not one second is all free before the stream ends.
    plain = replay_jobs(rules, jobs, POLICIES["skip"])
    assert gang_wait(plain) >= HORIZON_SECONDS - 10 - ARRIVES_SECONDS


WEIGHTS = {"one": 1, "two": 2, "four": 4}


def weighted_queues() -> Queues:
    """Three queues without GPUs of their own borrow the same 64."""
    borrowers = [{"name": name, "gpus": {"*": 0}, "cohort": "lab", "weight": w} for name, w in WEIGHTS.items()]
    return Queues.model_validate({"queues": [{"name": "owner", "gpus": {"*": GPUS}, "cohort": "lab"}, *borrowers]})


def saturating(hours: float, seed: int) -> list[TraceJob]:
    """Each queue asks for twice what its weight gives it, all the time."""
    return [job for name in WEIGHTS for job in _asking(name, hours * 3600, random.Random(f"{seed} {name}"))]


def _asking(name: str, horizon_seconds: float, draw: random.Random) -> Iterator[TraceJob]:
    due = GPUS * WEIGHTS[name] / sum(WEIGHTS.values())
    at, number = 0.0, 0
    while at < horizon_seconds:
        gpus, duration = draw.choice((1, 1, 2, 4)), draw.randint(1200, 3600)
        yield TraceJob(f"{name}-{number}", at, duration, gpus, name)
        at, number = at + gpus * duration / (2 * due), number + 1


def test_queues_that_saturate_get_what_their_weights_promise() -> None:
    found = measure_replay(replay_jobs(weighted_queues(), saturating(hours=3, seed=1)))
    hours = {one.queue: one.gpu_hours for one in found.queues if one.queue in WEIGHTS}
    assert hours["one"] < hours["two"] < hours["four"]
    assert found.fairness["lab"] == pytest.approx(1.0, abs=0.05)


def test_jobs_draw_from_flavors():
    flavors = [
        {"name": "own", "gpu_type": "A100", "node_labels": {"pool": "own"}},
        {"name": "idle", "gpu_type": "A100", "node_labels": {"pool": "idle"}, "spot": True},
    ]
    rules = Queues.model_validate({"queues": [{"name": "research", "gpus": {"own": 4, "idle": 4}}], "flavors": flavors})
    given_jobs = [
        TraceJob(f"job-{n}", 0.0, 10.0, 4, "research", "A100", spot=use)
        for n, use in enumerate(["no", "no", "allowed"])
    ] + [TraceJob("too-large", 0.0, 10.0, 8, "research", "A100", spot="allowed")]
    replayed = replay_jobs(rules, given_jobs)
    assert {run.job.name: run.started_seconds for run in replayed.runs} == {"job-0": 0.0, "job-1": 10.0, "job-2": 0.0}
    assert [job.name for job, _ in replayed.rejected] == ["too-large"]
