"""The benchmark of quotas: its line, and workloads that do what they are there for."""

from itertools import pairwise
from pathlib import Path

import pytest
from bench.quota import line
from bench.quota_campaign import campaign
from bench.quota_core import decisions
from bench.quota_rules import within_limits
from bench.quota_workloads import GANG, WEIGHTS, saturating, stream, weighted_queues
from support.ledger import lease
from tiphys_plugin.quota.lease import Lease
from tiphys_plugin.quota.simulation.replay import replay_jobs
from tiphys_plugin.quota.simulation.results import measure_replay

TESTS = Path(__file__).parents[2]


def test_the_last_line_holds_what_is_compared() -> None:
    report = {
        "core": {
            "1000 on 1000": {"per_second": 512.5, "p99_ms": 18.2},
            "1000 on 9": {"per_second": 1.0, "p99_ms": 9.0},
        },
        "cluster": {"1": {"per_second": 121.8}, "2": {"per_second": 90.0}},
        "starvation": {"ratio": 0.0133},
        "preemption": {"wait_ratio": 0.9, "loss_ratio": 0.04},
        "attained": {"tiresias_ratio": 0.66, "fifo_ratio": 0.4, "jobs": 1494},
        "fairness": {"jain": 0.998},
        "allocation": {"best-fit": {"allocated_percent": 93.9}, "fragmentation": {"allocated_percent": 95.26}},
        "campaigns": {
            "2": {"over_admissions": 0, "double_grants": 1, "leaks": 0},
            "64": {"over_admissions": 0, "double_grants": 2, "leaks": 0},
        },
    }
    assert line(report) == (
        "tiresias_ratio=0.66 fifo_ratio=0.4 bestfit_alloc=93.9 fgd_alloc=95.26 core_per_second=512.5 core_p99_ms=18.2 "
        "cluster_per_second=121.8 high_priority_wait_ratio=0.9 preempt_loss_ratio=0.04 over_admissions=0 leaks=0 "
        "double_grants=3 skip_wait_ratio=0.0133 jain=0.998"
    )


def held(gpus: int, uid: str, queue: str = "one", gpu_type: str = "A100") -> Lease:
    return lease(gpus, uid, queue=queue, gpu_type=gpu_type)


@pytest.mark.parametrize(
    ("leases", "lawful"),
    [
        ([held(4, "a"), held(4, "b"), held(2, "c", "two")], True),
        ([held(4, "a"), held(5, "b")], False),
        ([held(8, "a"), held(4, "c", "two")], False),
        ([held(3, "a", "two", "T4"), held(1, "b", "two", "T4")], False),
        ([held(1, "a"), held(1, "a")], False),
    ],
)
def test_the_watcher_of_the_campaign_sees_what_must_not_be(leases: list[Lease], lawful: bool) -> None:
    assert within_limits(leases) is lawful


def test_a_campaign_asks_kills_and_sweeps_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    found = campaign(requests=200, processes=2, seed=1)
    assert found["requests"] >= 200
    assert found["looks"] > 0
    assert (found["over_admissions"], found["double_grants"], found["leaks"]) == (0, 0, 0)


def test_a_campaign_whose_processes_fail_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(RuntimeError, match="ended with 1 by itself"):
        campaign(requests=200, processes=1, seed=1)


def test_decisions_are_timed_one_by_one() -> None:
    found = decisions(nodes=6, waiting=10, samples=15, seed=1)
    assert (found["nodes"], found["waiting"], found["samples"]) == (6, 10, 15)
    assert found["leases"] > 6
    assert 0 <= found["p50_ms"] <= found["p99_ms"]
    assert found["per_second"] > 0


def test_the_stream_leaves_no_moment_without_a_small_job() -> None:
    small = [job for job in stream(2000, seed=1) if job.name != GANG]
    assert all(later.submit_seconds < job.submit_seconds + job.duration_seconds for job, later in pairwise(small))


def test_queues_that_saturate_get_what_their_weights_promise() -> None:
    found = measure_replay(replay_jobs(weighted_queues(), saturating(hours=3, seed=1)))
    hours = {one.queue: one.gpu_hours for one in found.queues if one.queue in WEIGHTS}
    assert hours["one"] < hours["two"] < hours["four"]
    assert found.fairness["lab"] == pytest.approx(1.0, abs=0.05)
