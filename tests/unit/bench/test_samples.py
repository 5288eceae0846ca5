"""Rounds in turns, medians with their spread, ratios round by round, percentiles and bounds of rates."""

import pytest
from bench.samples import interleaved, median_of, percentile, ratio, seconds, significant, summary, wilson_lower


def test_every_round_takes_each_measurement_once_and_every_second_one_backwards():
    taken: list[str] = []

    def measure(name: str, value: float) -> float:
        taken.append(name)
        return value + len(taken)

    found = interleaved({"a": lambda: measure("a", 10.0), "b": lambda: measure("b", 20.0)}, rounds=3)
    assert taken == ["a", "b", "b", "a", "a", "b"]
    assert found == {"a": [11.0, 14.0, 15.0], "b": [22.0, 23.0, 26.0]}


def test_a_call_is_measured_by_the_clock_that_is_given():
    ticks = iter([5.0, 7.5])
    assert seconds(lambda: None, lambda: next(ticks)) == 2.5


def test_a_ratio_is_taken_round_by_round_so_that_a_slow_round_does_not_move_it():
    found = ratio([2.0, 2.0, 200.0], [1.0, 1.0, 100.0])
    assert found == {"median": 2.0, "quartiles": [2.0, 2.0], "range": [2.0, 2.0], "samples": [2.0, 2.0, 2.0]}


def test_a_ratio_of_other_rounds_is_refused():
    with pytest.raises(ValueError, match="shorter"):
        ratio([1.0, 2.0], [1.0])


def test_the_median_of_a_number_is_the_number():
    assert (median_of(0.5), median_of(summary([1.0, 2.0, 9.0]))) == (0.5, 2.0)


def test_a_summary_has_the_median_the_spread_and_the_measurements():
    assert summary([3.0, 1.0, 2.0, 5.0, 4.0]) == {
        "median": 3.0,
        "quartiles": [2.0, 4.0],
        "range": [1.0, 5.0],
        "samples": [3.0, 1.0, 2.0, 5.0, 4.0],
    }


def test_a_single_measurement_has_no_spread():
    assert summary([7.0]) == {"median": 7.0, "quartiles": [7.0, 7.0], "range": [7.0, 7.0], "samples": [7.0]}


@pytest.mark.parametrize(("value", "rounded"), [(0.0, 0.0), (1234567.0, 1235000.0), (0.00012346, 0.0001235)])
def test_four_digits_are_kept(value: float, rounded: float):
    assert significant(value) == pytest.approx(rounded, rel=1e-4)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([7.0], 50, 7.0),
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([1.0, 2.0], 50, 1.0),
        (list(range(1, 201)), 99, 198),
        ([5.0, 9.0], 99, 9.0),
    ],
)
def test_a_percentile_is_a_value_that_was_measured(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == expected


# Checked against the table of Wilson's intervals in R's binom.confint(method="wilson").
@pytest.mark.parametrize(
    ("successes", "trials", "bound"), [(0, 10, 0.0), (5, 10, 0.2366), (10, 10, 0.7225), (300, 300, 0.9874), (0, 0, 0.0)]
)
def test_wilsons_bound(successes: int, trials: int, bound: float):
    assert wilson_lower(successes, trials) == pytest.approx(bound, abs=1e-4)
