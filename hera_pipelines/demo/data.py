"""The bundled digits, and the one file in which the steps hand them on."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import load_file, save_file

from hera_pipelines.demo.network import Array, Labels


class Split(NamedTuple):
    """Images as rows of 64 values from 0 to 1, and their digits; never the same image in both parts."""

    train_images: Array
    train_labels: Labels
    test_images: Array
    test_labels: Labels


def bundled_digits() -> tuple[Array, Labels]:
    """scikit-learn's copy of the UCI hand-written digits: 1,797 images of 8×8, values from 0 to 16."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # takes a second to import, and two of the four programs do without

    bunch = load_digits()
    return bunch.data.astype(np.float32), bunch.target.astype(np.int64)


def write_split(path: Path, split: Split) -> None:
    """Write ``split`` as safetensors: the same arrays give the same bytes."""
    save_file({name: np.ascontiguousarray(array) for name, array in split._asdict().items()}, path)


def read_split(path: Path) -> Split:
    """Read what `write_split` wrote."""
    return Split(**load_file(path))
