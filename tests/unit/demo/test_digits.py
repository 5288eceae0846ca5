"""The network really learns, and the same seed gives the same bits, interrupted or not."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hera_pipelines.demo import digits
from hera_pipelines.demo.digits import compute_gradients, initial_state, learn

STEPS = 30


@pytest.fixture(autouse=True)
def _small_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "HIDDEN", 24)
    monkeypatch.setattr(digits, "BATCH", 48)


def patterns() -> tuple[Any, Any]:
    """Ten bright-pixel patterns with noise, one per class: learnable in a blink."""
    generator = np.random.default_rng(1)
    labels = np.tile(np.arange(10), 40)
    images = generator.integers(0, 3, size=(400, 64)).astype(np.float32)
    images[np.arange(400), labels * 6 + 2] = 16
    return images, labels


def train(state: dict[str, Any], until: int) -> dict[str, Any]:
    images, labels = patterns()
    while state["step"] < until:
        learn(state, images / np.float32(16), labels)
    return state


def bits(state: dict[str, Any]) -> list[bytes]:
    return [array.tobytes() for array in (*state["weights"], *state["momentum"])]


def test_training_lowers_the_loss() -> None:
    images, labels = patterns()
    state = initial_state(3)
    losses = [learn(state, images / np.float32(16), labels) for _ in range(300)]
    assert np.mean(losses[-20:]) < 0.5 * np.mean(losses[:20])


def test_a_seed_decides_every_bit_with_and_without_an_interruption() -> None:
    undisturbed = bits(train(initial_state(3), STEPS))
    assert bits(train(copy.deepcopy(train(initial_state(3), STEPS // 2)), STEPS)) == undisturbed
    assert bits(train(initial_state(4), STEPS)) != undisturbed


def test_the_generator_is_part_of_the_state() -> None:
    halfway = copy.deepcopy(train(initial_state(3), STEPS // 2))
    halfway["generator"] = initial_state(3)["generator"]
    assert bits(train(halfway, STEPS)) != bits(train(initial_state(3), STEPS))


def test_gradients_agree_with_finite_differences() -> None:
    generator = np.random.default_rng(0)
    images, labels = generator.random((50, 64)), generator.integers(0, 10, 50)
    weights: list[Any] = [weight.astype(np.float64) for weight in initial_state(5)["weights"]]
    _, gradients = compute_gradients(weights, images, labels)
    for index, gradient in enumerate(gradients):
        place = np.unravel_index(np.abs(gradient).argmax(), gradient.shape)
        sides = []
        for nudge in (1e-6, -1e-6):
            moved = [weight.copy() for weight in weights]
            moved[index][place] += nudge
            sides.append(compute_gradients(moved, images, labels)[0])
        assert (sides[0] - sides[1]) / 2e-6 == pytest.approx(float(gradient[place]), rel=1e-4)


@pytest.mark.parametrize(
    "change", [lambda images: images[:, :60], lambda images: images + 1, lambda images: images - 1]
)
def test_data_that_is_no_digits_fails_the_run(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    images, labels = patterns()
    monkeypatch.setattr(digits, "load_digits", lambda: (images, labels))
    assert len(digits.validate()) == 64
    monkeypatch.setattr(digits, "load_digits", lambda: (change(images), labels))
    with pytest.raises(SystemExit, match="are not digits"):
        digits.validate()


def test_the_model_is_registered_if_it_is_good_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(digits, "load_digits", patterns)
    data = digits.preprocess(seed=2, fingerprint="f" * 64)
    monkeypatch.setattr(digits, "TEST_IMAGES", 100)
    monkeypatch.setattr(digits, "STEPS", 1)
    with pytest.raises(SystemExit, match="the model is not registered"):
        digits.register(data, digits.train_network(data, seed=2, step_log=""))
    monkeypatch.setattr(digits, "STEPS", 400)
    assert digits.register(data, digits.train_network(data, seed=2, step_log=str(tmp_path / "steps"))) > 0.9
    assert len((tmp_path / "steps").read_text().splitlines()) == 400
