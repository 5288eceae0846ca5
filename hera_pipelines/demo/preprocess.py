"""Step 2: scale the pixels and split the data, the same way for the same seed."""

from typing import Annotated

import numpy as np
import typer

from hera_pipelines.demo.network import Array, DatasetSplit, Labels, bundled_digits, write_split
from tiphys import outputs

TEST_SHARE = 0.2


def split_dataset(images: Array, labels: Labels, seed: int) -> DatasetSplit:
    """Shuffle by ``seed``, hold out a fifth for the test, and scale pixels to 0…1."""
    order = np.random.default_rng(seed).permutation(len(labels))
    held_out = round(TEST_SHARE * len(labels))
    test, train = order[:held_out], order[held_out:]
    scaled = images / np.float32(16)
    return DatasetSplit(scaled[train], labels[train], scaled[test], labels[test])


def main(seed: Annotated[int, typer.Option()]) -> None:
    images, labels = bundled_digits()
    split = split_dataset(images, labels, seed)
    write_split(outputs.path("dataset"), split)
    typer.echo(f"{len(split.train_labels)} images to train on, {len(split.test_labels)} held out")


if __name__ == "__main__":
    typer.run(main)
