"""The demo's pipeline file, as ``tiphys run`` takes it: a network of NumPy learns handwritten digits.

One seed gives the same bits with or without interruptions: the state of the generator of
random numbers is part of the checkpoint, and BLAS runs on one thread, because the order
in which threads add floats changes the last bits.
"""

import hashlib
import os
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from hera.workflows import Artifact, Env, Parameter
from safetensors.numpy import load_file, save_file

from hera_pipelines import Checkpoints, Pipeline, Retries, step, train
from tiphys import checkpoint

IMAGE = "ghcr.io/tiphys/demo:0.1.0"
ONE_THREAD = [Env(name=name, value="1") for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")]
STEPS, SAVE_EVERY = 2000, 100
BATCH, HIDDEN, TEST_IMAGES = 256, 768, 360

Fingerprint = Annotated[str, Parameter(name="fingerprint")]
Data = Annotated[Path, Artifact(name="data")]
Model = Annotated[Path, Artifact(name="model")]
Accuracy = Annotated[float, Parameter(name="accuracy")]


def load_digits() -> tuple[Any, Any]:
    """scikit-learn's copy of the UCI handwritten digits: 1,797 images of 8×8 pixels from 0 to 16, and their digits."""
    from sklearn import datasets  # type: ignore[import-untyped]  # takes a second, and two of the four steps need none

    images, labels = datasets.load_digits(return_X_y=True)
    return images.astype(np.float32), labels.astype(np.int64)


def initial_state(seed: int) -> dict[str, Any]:
    """Everything that a step of the training depends on: what a checkpoint holds."""
    generator = np.random.default_rng(seed)
    weights = [0.1 * generator.standard_normal(shape, np.float32) for shape in ((64, HIDDEN), (HIDDEN, 10))]
    generator_state, momentum = generator.bit_generator.state, [np.zeros_like(weight) for weight in weights]
    return {"step": 0, "weights": weights, "momentum": momentum, "generator": generator_state}


def compute_gradients(weights: list[Any], images: Any, labels: Any) -> tuple[float, list[Any]]:
    """Mean cross-entropy of the images, and its gradient for each weight."""
    hidden = np.maximum(images @ weights[0], 0)
    scores = hidden @ weights[1]
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    right = np.arange(len(labels)), labels
    loss = float(-np.log(shares[right] + 1e-9).mean())
    shares[right] -= 1
    shares /= len(labels)
    return loss, [images.T @ ((shares @ weights[1].T) * (hidden > 0)), hidden.T @ shares]


def learn(state: dict[str, Any], images: Any, labels: Any) -> float:
    """Advance ``state`` by one step of SGD with momentum; return the mean loss of its batch."""
    generator = np.random.default_rng()
    generator.bit_generator.state = state["generator"]
    batch = generator.integers(0, len(images), BATCH)
    loss, gradients = compute_gradients(state["weights"], images[batch], labels[batch])
    for weight, velocity, gradient in zip(state["weights"], state["momentum"], gradients, strict=True):
        velocity *= 0.9
        velocity -= 0.02 * gradient
        weight += velocity
    state["step"] += 1
    state["generator"] = generator.bit_generator.state
    return loss


@step(image=IMAGE, env=ONE_THREAD)
def validate() -> Fingerprint:
    images, labels = load_digits()
    if images.shape != (len(labels), 64) or images.min() < 0 or images.max() > 16 or set(labels) != set(range(10)):
        raise SystemExit(f"{len(labels)} images are not digits of 8×8 pixels from 0 to 16")
    return hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()


@step(image=IMAGE, env=ONE_THREAD)
def preprocess(seed: int, fingerprint: str) -> Data:
    images, labels = load_digits()
    order = np.random.default_rng(seed).permutation(len(labels))
    save_file({"images": images[order] / np.float32(16), "labels": labels[order]}, "data.safetensors")
    print(f"{len(labels) - TEST_IMAGES} images to train on, {TEST_IMAGES} held out, of {fingerprint[:12]}")
    return Path("data.safetensors")


@train(
    name="train",
    image=IMAGE,
    env=ONE_THREAD,
    # The restart has to read the store, where the demo damages a checkpoint, and not its copy in memory.
    checkpoints=Checkpoints(every=f"{SAVE_EVERY} steps", keep_last=None, near_copy=False),
    retries=Retries(backoff="1s"),
)
def train_network(data: Data, seed: int, step_log: str) -> Model:
    arrays = load_file(data)
    images, labels = arrays["images"][TEST_IMAGES:], arrays["labels"][TEST_IMAGES:]
    # A killed program cannot report its last step, but the page cache keeps what it wrote.
    with checkpoint.session(total_steps=STEPS) as session, Path(step_log or os.devnull).open("ab", buffering=0) as log:
        state = session.restore(default=initial_state(seed))
        while state["step"] < STEPS:
            loss = learn(state, images, labels)
            log.write(f"{os.environ.get('TIPHYS_ATTEMPT', '0')} {os.getpid()} {state['step']}\n".encode())
            if state["step"] % SAVE_EVERY == 0:
                print(f"step {state['step']} of {STEPS}: loss {loss:.4f}", flush=True)
            session.step(state["step"], state, metrics={"loss": round(loss, 4)})
    save_file({f"weight{index}": weight for index, weight in enumerate(state["weights"])}, "model.safetensors")
    return Path("model.safetensors")


@step(image=IMAGE, env=ONE_THREAD)
def register(data: Data, model: Model) -> Accuracy:
    arrays, weights = load_file(data), load_file(model)
    hidden = np.maximum(arrays["images"][:TEST_IMAGES] @ weights["weight0"], 0)
    accuracy = float(np.mean(np.argmax(hidden @ weights["weight1"], axis=1) == arrays["labels"][:TEST_IMAGES]))
    if accuracy < 0.9:
        raise SystemExit(f"test accuracy {accuracy:.2%} is below 90%: the model is not registered")
    return accuracy


with Pipeline(
    "digits", arguments=[Parameter(name="seed", value="7"), Parameter(name="step-log", value="")]
) as pipeline:
    seed = pipeline.get_parameter("seed")
    prepared = preprocess(seed, validate())
    model = train_network(prepared, seed, pipeline.get_parameter("step-log"))
    register(prepared, model)
