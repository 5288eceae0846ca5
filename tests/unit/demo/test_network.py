"""The network really learns, and the same seed gives the same bits."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hera_pipelines.demo.network import (
    Array,
    DatasetSplit,
    Labels,
    TrainingState,
    accuracy,
    initial_state,
    loss_and_gradients,
    read_split,
    sgd_step,
    write_split,
)
from hera_pipelines.demo.preprocess import split_dataset
from hera_pipelines.demo.validate import find_data_problems

STEPS = 30


def digits() -> tuple[Array, Labels]:
    """Ten bright-pixel patterns, one per class, with noise: learnable in a blink."""
    generator = np.random.default_rng(1)
    labels = np.tile(np.arange(10), 40)
    images = generator.integers(0, 3, size=(400, 64)).astype(np.float32)
    images[np.arange(400), labels * 6 + 2] = 16
    return images, labels


def trained(state: TrainingState, until: int) -> TrainingState:
    images, labels = digits()
    while state["step"] < until:
        sgd_step(state, images / np.float32(16), labels, STEPS, batch=32)
    return state


def bits(state: TrainingState) -> list[bytes]:
    return [array.tobytes() for array in (*state["weights"], *state["momentum"])]


def test_training_lowers_the_loss() -> None:
    images, labels = digits()
    state = initial_state(3, hidden=32)
    losses = [sgd_step(state, images / np.float32(16), labels, 300, batch=64) for _ in range(300)]
    assert np.mean(losses[-20:]) < 0.5 * np.mean(losses[:20])


def test_the_same_seed_gives_the_same_bits() -> None:
    assert bits(trained(initial_state(3, 16), STEPS)) == bits(trained(initial_state(3, 16), STEPS))


def test_another_seed_gives_other_bits() -> None:
    assert bits(trained(initial_state(3, 16), STEPS)) != bits(trained(initial_state(4, 16), STEPS))


def test_continuing_from_a_copied_state_gives_the_bits_of_an_uninterrupted_training() -> None:
    halfway = copy.deepcopy(trained(initial_state(3, 16), STEPS // 2))
    assert bits(trained(halfway, STEPS)) == bits(trained(initial_state(3, 16), STEPS))


def test_the_generator_is_part_of_the_state() -> None:
    halfway = copy.deepcopy(trained(initial_state(3, 16), STEPS // 2))
    halfway["generator"] = initial_state(3, 16)["generator"]
    assert bits(trained(halfway, STEPS)) != bits(trained(initial_state(3, 16), STEPS))


def test_gradients_agree_with_finite_differences() -> None:
    generator = np.random.default_rng(0)
    inputs: Any = generator.random((50, 64))
    answers = generator.integers(0, 10, 50)
    weights: list[Any] = [weight.astype(np.float64) for weight in initial_state(5, hidden=6)["weights"]]
    _, gradients = loss_and_gradients(weights, inputs, answers)
    for index, gradient in enumerate(gradients):
        place = np.unravel_index(np.abs(gradient).argmax(), gradient.shape)
        sides = []
        for nudge in (1e-6, -1e-6):
            moved = [weight.copy() for weight in weights]
            moved[index][place] += nudge
            sides.append(loss_and_gradients(moved, inputs, answers)[0])
        assert (sides[0] - sides[1]) / 2e-6 == pytest.approx(float(gradient[place]), rel=1e-4)


def test_accuracy_counts_right_answers() -> None:
    weights: list[Array] = [np.eye(64, 10, dtype=np.float32), np.zeros(10, dtype=np.float32)]
    images = np.eye(10, 64, dtype=np.float32)
    assert accuracy(weights, images, np.arange(10)) == 1.0
    assert accuracy(weights, images, np.zeros(10, dtype=np.int64)) == pytest.approx(0.1)


def test_the_split_loses_no_image_and_repeats_none() -> None:
    images, labels = digits()
    images = np.arange(400 * 64, dtype=np.float32).reshape(400, 64)
    made = split_dataset(images, labels, seed=2)
    together = np.concatenate([made.train_images, made.test_images])
    assert sorted(map(bytes, together)) == sorted(map(bytes, images / np.float32(16)))
    assert len(made.test_labels) == 80


def test_a_split_reads_back_bit_by_bit(tmp_path: Path) -> None:
    made = split_dataset(*digits(), seed=2)
    write_split(tmp_path / "dataset", made)
    again: DatasetSplit = read_split(tmp_path / "dataset")
    assert [array.tobytes() for array in again] == [array.tobytes() for array in made]


def test_good_data_has_no_findings() -> None:
    assert find_data_problems(*digits()) == []


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda images, labels: (images[:, :60], labels), "images have shape"),
        (lambda images, labels: (images * np.float32("nan"), labels), "finite"),
        (lambda images, labels: (images + 1, labels), "between 0 and 16"),
        (lambda images, labels: (images, np.minimum(labels, 8)), "classes are missing or rare"),
    ],
)
def test_damaged_data_is_named(damage: Callable[[Array, Labels], tuple[Array, Labels]], sentence: str) -> None:
    assert any(sentence in finding for finding in find_data_problems(*damage(*digits())))
