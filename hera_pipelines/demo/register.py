"""Step 4: test the model on the images held out and write down what it is."""

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
    reached = accuracy([arrays[f"weight{index}"] for index in range(len(arrays))], split.test_images, split.test_labels)
    if reached < least_accuracy:
        raise SystemExit(f"test accuracy {reached:.4f} is below {least_accuracy}: the model is not registered")
    digest = hashlib.sha256(model.read_bytes()).hexdigest()
    card = {"sha256": digest, "test_accuracy": reached, "seed": seed}
    outputs.path("card").write_text(json.dumps(card, indent=2, sort_keys=True))
    outputs.path("accuracy").write_text(f"{reached:.4f}")
    outputs.path("sha256").write_text(digest)
    typer.echo(f"registered: test accuracy {reached:.4f}")


if __name__ == "__main__":
    typer.run(main)
