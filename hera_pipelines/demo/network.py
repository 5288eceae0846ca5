"""A network with two hidden layers for 8×8 digits, in NumPy, and its dataset file.

The demo trains a real network without a framework. All numbers come from float32
arithmetic in a fixed order and from one seeded generator, whose state is part of
the training state. So one seed gives the same bits with or without interruptions.
"""

from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

Array = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]
PIXELS = 8


class TrainingState(TypedDict):
    """Complete state of the training: everything that the next step depends on. A checkpoint holds it."""

    step: int
    weights: list[Array]
    momentum: list[Array]
    generator: dict[str, object]


def initial_state(seed: int, hidden: int) -> TrainingState:
    """He-initialised weights and biases, before the first step."""
    generator = np.random.default_rng(seed)
    sizes = (PIXELS * PIXELS, hidden, hidden, 10)
    weights: list[Array] = []
    for rows, columns in pairwise(sizes):
        weights.append(generator.standard_normal((rows, columns), dtype=np.float32) * np.float32((2 / rows) ** 0.5))
        weights.append(np.zeros(columns, dtype=np.float32))
    return TrainingState(
        step=0,
        weights=weights,
        momentum=[np.zeros_like(w) for w in weights],
        generator=dict(generator.bit_generator.state),
    )


def sgd_step(state: TrainingState, images: Array, labels: Labels, total: int, batch: int) -> float:
    """Advance ``state`` by one step of momentum SGD, in place; return the mean loss of the batch."""
    generator = np.random.default_rng()
    generator.bit_generator.state = state["generator"]
    picked = generator.integers(0, len(images), size=batch)
    inputs = _shift_images(images[picked], generator)
    loss, gradients = loss_and_gradients(state["weights"], inputs, labels[picked])
    rate = np.float32(0.05 * 0.5 * (1 + np.cos(np.pi * state["step"] / total)))
    for weight, velocity, gradient in zip(state["weights"], state["momentum"], gradients, strict=True):
        velocity *= np.float32(0.9)
        velocity -= rate * gradient
        weight += velocity
    state["step"] += 1
    state["generator"] = dict(generator.bit_generator.state)
    return loss


def accuracy(weights: list[Array], images: Array, labels: Labels) -> float:
    """Share of ``images`` that the network classifies correctly."""
    return float(np.mean(np.argmax(_forward(weights, images)[-1], axis=1) == labels))


def loss_and_gradients(weights: list[Array], inputs: Array, labels: Labels) -> tuple[float, list[Array]]:
    """Mean cross-entropy of the batch, and its gradients in the order of ``weights``."""
    layers = _forward(weights, inputs)
    logits = layers[-1] - layers[-1].max(axis=1, keepdims=True)
    probabilities = np.exp(logits)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    loss = float(-np.log(probabilities[rows, labels] + np.float32(1e-9)).mean())
    probabilities[rows, labels] -= np.float32(1)
    delta: Array = probabilities / np.float32(len(labels))
    gradients: list[Array] = []
    for index in range(len(weights) - 2, -1, -2):
        below = layers[index // 2]
        gradients[:0] = [below.T @ delta, delta.sum(axis=0)]
        if index:
            delta = (delta @ weights[index].T) * (below > 0)
    return loss, gradients


def _forward(weights: list[Array], inputs: Array) -> list[Array]:
    """Activations of every layer, the inputs first and the logits last."""
    layers = [inputs]
    for index in range(0, len(weights), 2):
        linear = layers[-1] @ weights[index] + weights[index + 1]
        layers.append(linear if index == len(weights) - 2 else np.maximum(linear, np.float32(0)))
    return layers


def _shift_images(images: Array, generator: np.random.Generator) -> Array:
    """Augment the images: shift each by up to one pixel in both directions."""
    count = len(images)
    padded = np.zeros((count, PIXELS + 2, PIXELS + 2), dtype=np.float32)
    padded[:, 1:-1, 1:-1] = images.reshape(count, PIXELS, PIXELS)
    down, right = generator.integers(0, 3, size=(2, count))
    window = np.arange(PIXELS)
    rows = down[:, None, None] + window[None, :, None]
    columns = right[:, None, None] + window[None, None, :]
    moved: Array = padded[np.arange(count)[:, None, None], rows, columns].reshape(count, -1)
    return moved


class DatasetSplit(NamedTuple):
    """Images as rows of 64 values from 0 to 1, and their digits; no image is in both parts."""

    train_images: Array
    train_labels: Labels
    test_images: Array
    test_labels: Labels


def bundled_digits() -> tuple[Array, Labels]:
    """scikit-learn's copy of the UCI hand-written digits: 1,797 images of 8×8, values from 0 to 16."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # takes a second to import; two of the four programs do not need it

    bunch = load_digits()
    return bunch.data.astype(np.float32), bunch.target.astype(np.int64)


def write_split(path: Path, split: DatasetSplit) -> None:
    """Write ``split`` as safetensors: the same arrays give the same bytes."""
    save_file({name: np.ascontiguousarray(array) for name, array in split._asdict().items()}, path)


def read_split(path: Path) -> DatasetSplit:
    """Read what `write_split` wrote."""
    return DatasetSplit(**load_file(path))
