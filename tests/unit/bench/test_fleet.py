"""What the benchmark of many trainings makes of its measurements."""

from typing import Any

from bench.fleet.report import AIMS, block, values
from bench.fleet.trainings import advance
from chaos.programs import initial_state

COSTS = {"Tiphys plugin": (100.0, 10.0), "Tiphys controller": (80.0, 5.0), "etcd": (300.0, 40.0)}


def look(memory_factor: float, cpu_factor: float) -> dict[str, dict[str, float]]:
    return {
        part: {"rss_mib": mib * memory_factor, "cpu_seconds": cpu * cpu_factor} for part, (mib, cpu) in COSTS.items()
    }


def hour(**changes: Any) -> dict[str, Any]:
    gaps = {"pod evicted": (3.0, 9.0), "node lost": (4.0, 30.0), "for one of higher priority": (60.0, 99.0)}
    return {
        "settings": {"runs": 10, "minutes": 5.0, "fault_seconds": 5.0, "seed": 1},
        "faults": {"pod evicted": 7, "node lost": 2},
        "next_pod_seconds": {why: {"n": 3, "p50": p50, "p99": p99} for why, (p50, p99) in gaps.items()},
        "acknowledged": 1234,
        "ended_as_undisturbed": 10,
        "of": 10,
        "must_not_happen": {},
        "costs": {"0": look(1, 1), "50": look(1.1, 2), "300": look(1.32, 7)},
        **changes,
    }


def test_values_take_the_worst_fault_but_not_those_that_wait_for_gpus():
    found = values({"parts": {"hour": hour()}})
    assert (found["hour_next_pod_p50"], found["hour_next_pod_p99"]) == (4.0, 30.0)
    assert (found["hour_service_mib"], found["hour_growth"]) == (132.0, 1.2)
    assert (found["hour_lost"], found["hour_doubled"]) == (0, 0)


def test_values_count_checkpoints_and_trainings_that_are_lost():
    found = values({"parts": {"hour": hour(ended_as_undisturbed=8, must_not_happen={"lost": 3, "doubled": 1})}})
    assert (found["hour_lost"], found["hour_doubled"]) == (5, 1)
    assert not AIMS["hour_lost"].met(5)


def test_block_shows_what_is_missed_and_the_cpu_between_the_looks():
    lines = block({"parts": {"hour": hour()}})
    assert "| the same, p99 | 30 | **missed**: ≤ 20 |" in lines
    assert "| etcd | 396 | 80.0 |" in lines
    assert any("2 × node lost, 7 × pod evicted. 1,234 checkpoints" in line for line in lines)


def test_state_of_a_training_depends_on_each_step_and_on_its_run():
    whole, parts = advance(initial_state("a"), 20), advance(advance(initial_state("a"), 10), 10)
    assert (whole["step"], whole["chain"].tobytes()) == (20, parts["chain"].tobytes())
    assert advance(initial_state("b"), 20)["chain"].tobytes() != whole["chain"].tobytes()
    assert advance(initial_state("a"), 19)["chain"].tobytes() != whole["chain"].tobytes()
