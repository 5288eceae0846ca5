"""Step 1: validate the data, and fail the run if it is not what the pipeline expects."""

import hashlib
import sys

import numpy as np
import typer

from hera_pipelines.demo.network import PIXELS, Array, Labels, bundled_digits
from tiphys import outputs


def find_data_problems(images: Array, labels: Labels) -> list[str]:
    """List the problems of the data; empty if it is valid."""
    problems = []
    if images.ndim != 2 or images.shape != (len(labels), PIXELS * PIXELS):
        problems.append(f"images have shape {images.shape}, expected ({len(labels)}, {PIXELS * PIXELS})")
    if not np.isfinite(images).all() or images.min() < 0 or images.max() > 16:
        problems.append("pixels must be finite and between 0 and 16")
    counts = np.bincount(labels, minlength=10)
    if len(counts) != 10 or counts.min() < 0.05 * len(labels):
        problems.append(f"classes are missing or rare: {counts.tolist()}")
    return problems


def main() -> None:
    images, labels = bundled_digits()
    if problems := find_data_problems(images, labels):
        sys.exit("the data is invalid: " + "; ".join(problems))
    fingerprint = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
    outputs.path("fingerprint").write_text(fingerprint)
    typer.echo(f"{len(labels)} images of {PIXELS}×{PIXELS}, ten classes, sha256 {fingerprint[:12]}")


if __name__ == "__main__":
    main()
