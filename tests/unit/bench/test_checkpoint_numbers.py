"""The arithmetic of the checkpoint benchmark: what can land, and the line at its end."""

from collections import Counter

import pytest
from bench.checkpoint.foresight import compile_warns
from bench.checkpoint.inflation import compare
from bench.checkpoint.landing import Trial, outcome
from bench.checkpoint.report import AIMS, QUICK_AIMS, table, values
from bench.checkpoint.situations import Cell, Situation, cells
from bench.samples import summary


def test_more_than_three_hundred_trials_can_land_and_meet_every_situation():
    pool = [cell for cell in cells() if cell.allows_landing]
    assert sum(cell.trials for cell in pool) >= 300
    assert min(cell.trials for cell in pool) >= len(Situation)
    assert len(set(cells())) == 27


def test_compile_warns_exactly_where_the_upload_outlasts_the_grace_period():
    verdicts = Counter((cell.allows_landing, compile_warns(cell)) for cell in cells())
    assert verdicts == {(True, False): 23, (False, True): 4}


def test_landings_are_pooled_over_the_cells_that_allow_one():
    lands = Trial(Situation.SAVED, True, "save", 1.0, 75)
    misses = Trial(Situation.FIRST_SAVE, False, "", 5.0, -9)
    hopeless = Trial(Situation.NO_SAVE, False, "leave", 0.1, 75)
    found = outcome({Cell(5, 64, 100.0): [lands, misses], Cell(30, 64, None): [lands], Cell(5, 1024, 50.0): [hopeless]})
    assert (found["landed"], found["trials"], found["hopeless_cells"]) == (2, 3, 1)
    assert found["line"] == {"sigterm_landed_ratio": 0.6667}
    assert found["cells"]["64 MiB, 100 MB/s, 5 s of grace"]["missed"] == ["during the first save: killed"]


def test_inflation_compares_the_steps_of_each_round():
    found = compare([[1.0, 1.0], [1.0], [2.0]], [[1.1, 1.1], [], [2.6]])
    assert found["median_inflation"]["samples"] == [0.1, 0.3]
    assert found["steps"] == [3, 3]


PARTS = {
    "stall": {"first": summary([0.1, 0.2, 0.3]), "line": {"stall_over_memcpy": 1.2}},
    "corruption": {"by_class": {"truncate": "5/5"}, "line": {"good_refused": 0}},
}


def test_the_table_shows_medians_with_their_range():
    assert [row.split() for row in table(PARTS).splitlines()] == [
        ["stall.first", "0.2", "0.1", "…", "0.3", "n=3"],
        ["corruption.by_class.truncate", "5/5"],
    ]


def test_the_values_of_all_parts_are_compared():
    assert values(PARTS) == {"stall_over_memcpy": 1.2, "good_refused": 0}


@pytest.mark.parametrize("name", ["stall_over_memcpy", "durable_ratio", "verify_over_sha256", "step_inflation"])
def test_an_aim_that_needs_a_large_state_is_not_judged_by_a_quick_run(name):
    assert name in AIMS
    assert name not in QUICK_AIMS
