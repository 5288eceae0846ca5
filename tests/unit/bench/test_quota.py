"""The benchmark of quotas: its line, and workloads that do what they are there for."""

from itertools import pairwise

import pytest
from bench.quota import line
from bench.quota_core import decisions
from bench.quota_workloads import GANG, WEIGHTS, saturating, stream, weighted_queues
from tiphys_plugin.simulation import outcome, replay


def test_the_last_line_holds_what_is_compared() -> None:
    report = {
        "core": {"1000": {"per_second": 512.5, "p99_ms": 18.2}, "10000": {"per_second": 1.0, "p99_ms": 9.0}},
        "starvation": {"ratio": 0.0133},
        "fairness": {"jain": 0.998},
    }
    assert line(report) == "core_per_second=512.5 core_p99_ms=18.2 skip_wait_ratio=0.0133 jain=0.998"


def test_decisions_are_timed_one_by_one() -> None:
    found = decisions(leases=20, waiting=10, samples=15, seed=1)
    assert (found["leases"], found["waiting"], found["samples"]) == (20, 10, 15)
    assert 0 <= found["p50_ms"] <= found["p99_ms"]
    assert found["per_second"] > 0


def test_the_stream_leaves_no_moment_without_a_small_job() -> None:
    small = [job for job in stream(2000, seed=1) if job.name != GANG]
    assert all(later.submit_seconds < job.submit_seconds + job.duration_seconds for job, later in pairwise(small))


def test_queues_that_saturate_get_what_their_weights_promise() -> None:
    found = outcome(replay(weighted_queues(), saturating(hours=3, seed=1)))
    hours = {one.queue: one.gpu_hours for one in found.queues if one.queue in WEIGHTS}
    assert hours["one"] < hours["two"] < hours["four"]
    assert found.fairness["lab"] == pytest.approx(1.0, abs=0.05)
