"""Which aims are kept, and what a benchmark says where a value has none."""

import pytest
from bench.aims import Aim, has_missed_count, number_line, verdicts
from bench.samples import summary


@pytest.mark.parametrize(
    ("aim", "value", "met"),
    [(Aim("≤", 1.1), 1.1, True), (Aim("≤", 1.1), 1.2, False), (Aim("≥", 3), 3, True), (Aim("≥", 3), 2, False)],
)
def test_an_aim_includes_its_bound(aim: Aim, value: float, met: bool):
    assert aim.met(value) is met


def test_the_median_is_judged_and_its_spread_is_shown():
    measured = {"stall": summary([0.9, 1.0, 1.4]), "leaks": 1, "extra": 7.0}
    assert list(verdicts(measured, {"stall": Aim("≤", 1.3), "leaks": Aim("≤", 0)})) == [
        "kept    stall = 1  [0.95 … 1.2, n=3]  (≤ 1.3)",
        "MISSED  leaks = 1  (≤ 0)",
        "        extra = 7  (not judged)",
    ]


def test_the_last_line_has_the_order_of_the_aims_and_leaves_out_what_was_not_measured():
    aims = {name: Aim("≤", 1) for name in ("b", "a", "c")}
    assert number_line({"a": 2, "b": summary([1.0, 3.0])}, aims) == "b=2 a=2"


def test_a_missed_count_is_a_failure_and_a_missed_time_is_not():
    aims = {"requests": Aim("≤", 30), "seconds": Aim("≤", 1.0)}
    assert not has_missed_count({"requests": 30, "seconds": 2.5, "other": 77}, aims)
    assert has_missed_count({"requests": 31, "seconds": 0.5}, aims)
