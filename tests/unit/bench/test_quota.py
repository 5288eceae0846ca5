"""The benchmark of quotas: its line, and its campaigns."""

from pathlib import Path

import pytest
from bench.aims import number_line
from bench.quota import log_campaign
from bench.quota.campaign import campaign
from bench.quota.cluster import admissions
from bench.quota.decisions import decisions
from bench.quota.report import AIMS, values
from bench.quota.rules import within_limits
from bench.samples import summary
from support.builders.ledger import lease
from support.processes.controller import kubeconfig
from support.servers.kube_server import serving
from tiphys_plugin.quota.lease import Lease

TESTS = Path(__file__).parents[2]


def test_the_last_line_holds_what_is_compared() -> None:
    report = {
        "core": {
            "1000 on 1000": {"over_scan": summary([1.5, 1.6, 1.7]), "p99_over_scan": summary([12.0])},
            "1000 on 9": {"over_scan": summary([9.0]), "p99_over_scan": summary([99.0])},
        },
        "cluster": {
            "services": {
                "1": {"per_second": 110, "p99_ms": 900, "bytes_per_admission": 2000},
                "3": {"per_second": 160, "p99_ms": 950, "bytes_per_admission": 2500},
            }
        },
        "preemption": {"wait_ratio": 0.9, "loss_ratio": 0.04},
        "attained": {"tiresias_ratio": 0.66, "fifo_ratio": 0.4, "jobs": 1494},
        "attained_trace3": {"tiresias_ratio": 0.9, "fifo_ratio": 0.7, "jobs": 1000},
        "frontier": {
            f"muri_trace{number}": {"48": {"ratio": ratio, "gang_wait_hours": 9}, "strict": {"ratio": 2.0}}
            for number, ratio in ((1, 1.2), (3, 1.3))
        },
        "families": {"overloaded_ratio": 0.7, "worst_ratio": 1.1, "jobs": 400},
        "gang_in_stream": {"over_promised": 0.8, "jobs": 100},
        "allocation": {
            "best-fit": {"allocated_percent": 93.9},
            "fragmentation": {"allocated_percent": 95.26},
            "typed": {"best-fit": {"allocated_percent": 80.5}, "fragmentation": {"allocated_percent": 87.9}},
        },
        "campaigns": {
            "2": {"over_admissions": 0, "double_grants": 1, "leaks": 0},
            "64": {"over_admissions": 0, "double_grants": 2, "leaks": 0},
        },
    }
    assert values(report).keys() == AIMS.keys()
    assert number_line(values(report), AIMS) == (
        "tiresias_ratio=0.66 fifo_ratio=0.4 tiresias_ratio_3=0.9 fifo_ratio_3=0.7 backfill_ratio_1=1.2 "
        "backfill_ratio_3=1.3 families_ratio=0.7 families_worst=1.1 gang_over_promised=0.8 "
        "bestfit_alloc=93.9 fgd_alloc=95.26 bestfit_alloc_typed=80.5 fgd_alloc_typed=87.9 decision_over_scan=1.6 "
        "decision_p99_over_scan=12 ledger_per_second_1=110 ledger_per_second_3=160 "
        "ledger_p99_ms_1=900 ledger_bytes_1=2000 high_priority_wait_ratio=0.9 "
        "preempt_loss_ratio=0.04 over_admissions=0 leaks=0 double_grants=3"
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


@pytest.mark.heavy
def test_a_campaign_asks_kills_and_sweeps_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    found = campaign(requests=100, processes=2, seed=1)
    assert found["requests"] >= 100
    assert found["looks"] > 0
    assert (found["over_admissions"], found["double_grants"], found["leaks"]) == (0, 0, 0)


@pytest.mark.heavy
def test_a_campaign_damages_the_log_of_a_ledger_and_nothing_is_granted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setattr(log_campaign, "_DAMAGE_SECONDS", (0.1, 0.3))
    found = log_campaign.log_campaign(requests=100, processes=2, seed=1)
    assert found["requests"] >= 100
    assert found["faults"].keys() & set(log_campaign.DAMAGES)
    assert (found["over_admissions"], found["double_grants"], found["leaks"]) == (0, 0, 0)


def test_a_campaign_whose_processes_fail_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(RuntimeError, match="ended with 1 by itself"):
        campaign(requests=200, processes=1, seed=1)


def test_a_decision_is_timed_in_turns_with_a_plain_scan() -> None:
    found = decisions(nodes=6, waiting=10, samples=30, seed=1)
    assert (found["nodes"], found["waiting"], found["samples"]) == (6, 10, 30)
    assert found["leases"] > 6
    assert 0 < found["p50_ms"] <= found["p99_ms"]
    assert found["per_second"] > 0
    assert len(found["over_scan"]["samples"]) == len(found["p99_over_scan"]["samples"]) == 3


@pytest.mark.heavy
def test_admissions_are_measured_in_turns_with_plain_entries_of_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    with serving() as server:
        found = admissions(
            server.api("ml"), kubeconfig(server, tmp_path), rounds=2, seconds=0.1, holders=10, waiters=10
        )
    assert found["services"]["1"]["admissions"] > 0
    assert found["services"]["1"]["bytes_per_admission"] < 8192
    assert len(found["entries_per_second"]["samples"]) == 2
    assert len(found["services"]["3"]["over_entries"]["samples"]) == 2
