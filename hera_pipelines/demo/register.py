"""Step 4: test the model on the held-out images and write its model card."""

import hashlib
import json
from typing import Annotated

import typer
from safetensors.numpy import load_file

from hera_pipelines.demo.network import accuracy, read_split
from tiphys import inputs, outputs


def main(seed: Annotated[int, typer.Option()], least_accuracy: float = 0.9) -> None:
    model = inputs.path("model")
    arrays = load_file(model)
    split = read_split(inputs.path("dataset"))
    weights = [arrays[f"weight{index}"] for index in range(len(arrays))]
    test_accuracy = accuracy(weights, split.test_images, split.test_labels)
    if test_accuracy < least_accuracy:
        raise SystemExit(f"test accuracy {test_accuracy:.4f} is below {least_accuracy}: the model is not registered")
    digest = hashlib.sha256(model.read_bytes()).hexdigest()
    card = {"sha256": digest, "test_accuracy": test_accuracy, "seed": seed}
    outputs.path("card").write_text(json.dumps(card, indent=2, sort_keys=True))
    outputs.path("accuracy").write_text(f"{test_accuracy:.4f}")
    outputs.path("sha256").write_text(digest)
    typer.echo(f"registered: test accuracy {test_accuracy:.4f}")


if __name__ == "__main__":
    typer.run(main)
