"""Replays with trainings that go: what is compared is measured as it is said to be."""

from pathlib import Path

import pytest
from bench.quota.attained import TRACE, TRACES, absent, attained
from bench.quota.placement import FOLDER
from bench.quota.preemption import BOUND_SECONDS, GPUS, GRACE_SECONDS, HIGH, jobs_of, preemption
from tiphys_plugin.quota.simulation.jobs import PreemptionCosts

ROWS = """job_id,num_gpu,submit_time,duration
0,64,0,36000000
1,8,18000000,600000
2,16,18000000,1200000
"""


def test_an_absent_trace_is_named(tmp_path: Path) -> None:
    assert "set TIPHYS_TRACES to the folder" in str(absent({}))
    assert f"{TRACE} not found in {tmp_path}" in str(absent({FOLDER: str(tmp_path)}))
    for name in TRACES:
        (tmp_path / name).write_text(ROWS)
    assert absent({FOLDER: str(tmp_path)}) is None


def test_short_trainings_go_before_a_long_one_that_pays_for_its_way_back(tmp_path: Path) -> None:
    """The long one takes ten hours; after five, and 20 min, it saves, waits for 20 min, and needs 300 s to return."""
    (tmp_path / TRACE).write_text(ROWS)
    found = attained(tmp_path / TRACE, saves=(0.0,))
    long = 36_000 + 30 + 1200 + 300
    assert found["attained"]["mean_completion_seconds"] == round((long + 2 * 1200 + 630 + 1230) / 3)
    assert found["attained"]["preemptions"] == 1
    assert found["fifo_skip"]["mean_completion_seconds"] == round((36_000 + 18_600 + 19_200) / 3)
    assert found["fifo_ratio"] == pytest.approx((long + 2 * 1200 + 630 + 1230) / (36_000 + 18_600 + 19_200), abs=1e-3)
    other = found["with_other_save_seconds"]["0"]
    assert other["mean_completion_seconds"] == round((long - 30 + 2 * 1200 + 600 + 1200) / 3)


def test_the_cluster_is_full_before_those_of_high_priority_come() -> None:
    jobs = jobs_of(2.0, 5, seed=1)
    first = min(job.submit_seconds for job in jobs if job.priority == HIGH)
    assert sum(job.gpus * job.duration_seconds for job in jobs if job.submit_seconds < first) > GPUS * first
    assert len([job for job in jobs if job.priority == HIGH]) == 5


def test_waits_and_losses_are_those_of_the_settings() -> None:
    found = preemption((4.0,), requests=6, seed=3, other_saves=(10.0,))
    assert 0 < found["p99_wait_seconds"]["4"] <= GRACE_SECONDS + 2 * found["look_every_seconds"] < BOUND_SECONDS
    assert found["wait_ratio"] == pytest.approx(found["p99_wait_seconds"]["4"] / BOUND_SECONDS, abs=1e-3)
    quick, slow = found["loss_by_save_seconds"].values()
    assert 0 < quick["gpu_seconds"] < quick["gpu_seconds_if_ended_at_once"]
    assert slow["ratio"] > quick["ratio"] == found["loss_ratio"]
    assert found["checkpoint_every_seconds"] == PreemptionCosts.checkpoint_every_seconds
