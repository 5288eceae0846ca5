"""Trials are decided where the pipeline is written: the same each time, all different, and no more than fit."""

import itertools
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hera_pipelines import choice, grid, integers, log_uniform, random_search, uniform
from hera_pipelines.sweeps import SweepSpec
from tiphys.errors import UsageError
from tiphys.protocol.fan_out import assign_item_ids

SPACE = {"lr": log_uniform(1e-4, 1e-1), "width": choice(64, 128)}


def search(trials: int, seed: int = 7, **space: Any) -> SweepSpec:
    return random_search(trials, space or SPACE, seed=seed)


def test_a_grid_holds_every_combination_in_order() -> None:
    assert grid(lr=[0.1, 0.01], width=[64, 128]).trials == (
        {"lr": 0.1, "width": 64},
        {"lr": 0.1, "width": 128},
        {"lr": 0.01, "width": 64},
        {"lr": 0.01, "width": 128},
    )


def test_names_that_are_no_keyword_are_given_as_a_mapping() -> None:
    assert grid({"learning-rate": [1]}, width=(2,)).trials == ({"learning-rate": 1, "width": 2},)
    assert random_search(1, {"seed": choice(3)}, seed=7).trials == ({"seed": 3},)


def test_values_of_numpy_become_those_of_json() -> None:
    found = grid(lr=np.array([0.5, 1.5]), width=np.arange(2), half=[np.float32(0.25)]).trials[-1]
    assert found == {"lr": 1.5, "width": 1, "half": 0.25}
    assert {type(value) for value in found.values()} == {float, int}


def test_the_same_seed_draws_the_same_trials_whatever_else_is_asked() -> None:
    """These values are in people's Workflows: a change of them would be a change of their runs."""
    assert search(3).trials == (
        {"lr": 0.006863, "width": 64},
        {"lr": 0.0001049, "width": 128},
        {"lr": 0.02062, "width": 128},
    )
    assert search(10).trials[:3] == search(3).trials
    assert search(3, seed=8).trials != search(3).trials
    reordered = search(3, width=SPACE["width"], lr=SPACE["lr"])
    assert [assign_item_ids("fit", [trial]) for trial in reordered.trials] == [
        assign_item_ids("fit", [trial]) for trial in search(3).trials
    ]
    with_more = search(3, **SPACE, decay=uniform(0, 1))
    assert [trial["lr"] for trial in with_more.trials] == [trial["lr"] for trial in search(3).trials]


def test_a_search_of_all_there_is_finds_all() -> None:
    drawn = search(6, width=choice("a", "b"), depth=integers(1, 3)).trials
    found = {(trial["width"], trial["depth"]) for trial in drawn}
    assert found == set(itertools.product("ab", [1, 2, 3]))


@given(seed=st.integers(), low=st.floats(1e-12, 1e3), factor=st.floats(1.001, 1e9))
def test_drawn_numbers_stay_within_their_bounds_and_are_short(seed: int, low: float, factor: float) -> None:
    high = low * factor
    for trial in random_search(5, seed=seed, x=log_uniform(low, high), y=uniform(-high, high)).trials:
        for name, bounds in (("x", (low, high)), ("y", (-high, high))):
            value = trial[name]
            assert isinstance(value, float)
            assert bounds[0] <= value <= bounds[1]
            assert value in bounds or len(Decimal(repr(value)).normalize().as_tuple().digits) <= 4


def test_a_logarithmic_scale_treats_orders_of_magnitude_alike() -> None:
    drawn = [trial["lr"] for trial in search(400, lr=log_uniform(1e-4, 1)).trials]
    decades = [sum(10**-n <= float(lr) < 10 ** (1 - n) for lr in drawn) for n in (1, 2, 3, 4)]
    assert all(70 < count < 130 for count in decades)


def test_trials_are_described_by_their_search() -> None:
    assert grid(lr=[0.1, 0.2]).description == "grid of 2: lr=[0.1, 0.2]"
    assert search(2).description == "random search of 2, seed 7: lr=log_uniform(0.0001, 0.1), width=choice(64, 128)"


@pytest.mark.parametrize(
    ("space", "complaint"),
    [
        ({}, "no parameters, so there would be no trials"),
        ({"lr": []}, "grid: lr has no values"),
        ({"lr": [0.1, 0.2, 0.1]}, "grid: lr has 0.1 twice"),
        ({"lr": [1, 1.0]}, "grid: lr has 1.0 twice"),
        ({"lr": [math.nan]}, "grid: lr cannot be nan"),
        ({"lr": [np.float64("inf")]}, "grid: lr cannot be inf"),
        ({"lr": "0.1"}, r"grid: lr is '0.1', which is not a list of values; write \['0.1'\]"),
        ({"lr": 0.1}, "not a list of values"),
        ({"layers": [[64, 64]]}, "write a list as a text"),
        ({"seed": [2**63]}, "Kubernetes stores no whole number of that size"),
        ({"lr": [None]}, "grid: lr cannot be None"),
        ({"name": ["{{workflow.name}}"]}, "replace the braces as a tag"),
        ({"a": range(1000), "b": range(1000)}, "grid has 1000000 trials, and one Workflow holds 500"),
        ({"a": (n for n in range(501))}, "grid has 501 trials"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(space: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        grid(space)


@pytest.mark.parametrize(
    ("trials", "space", "complaint"),
    [
        (0, SPACE, "0 is not a number of trials"),
        (2.5, SPACE, "2.5 is not a number of trials"),
        (True, SPACE, "True is not a number of trials"),
        (1_000_000, SPACE, "random_search has 1000000 trials, and one Workflow holds 500"),
        (3, {}, "no parameters"),
        (3, {"lr": [0.1, 0.2]}, r"lr is \[0.1, 0.2\], which is not a distribution"),
        (3, {"width": choice(64, 128)}, "there are only 2 different trials for trials=3"),
        (9, {"x": uniform(1, 1.0001)}, "too few different trials"),
    ],
)
def test_a_search_that_makes_no_sense_is_refused(trials: Any, space: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        random_search(trials, space, seed=7)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: choice(), "choice.* has no values"),
        (lambda: choice("a", "a"), "has 'a' twice"),
        (lambda: uniform(2, 1), "nothing lies between its bounds"),
        (lambda: uniform(0, math.nan), "cannot be nan"),
        (lambda: uniform("0", 1), "its bounds are numbers"),
        (lambda: log_uniform(0, 1), "begins above 0"),
        (lambda: integers(0.5, 2), "whole numbers"),
        (lambda: random_search(1, seed=0.5, lr=uniform(0, 1)), "seed must be a whole number"),
        (lambda: grid({"lr": [1]}, lr=[2]), "lr is given twice"),
    ],
)
def test_a_distribution_that_makes_no_sense_is_refused(make: Any, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        make()
