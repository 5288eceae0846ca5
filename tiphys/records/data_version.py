"""The version of data that a step reads and no step made, as the tool that manages the data names it.

Tiphys never reads such data. Its version alone enters the step key, so that a
result that was computed from other data is not reused.
"""

import json
from collections.abc import Iterable
from typing import Annotated

from pydantic import Field, NonNegativeInt

from tiphys.errors import UsageError
from tiphys.records.base import Record

MAX_DATA_BYTES = 16 << 10
"""Most bytes of all versions of one step, as `encode_data_versions` writes them. The Workflow has them twice, and each
claim of the step and each manifest of its checkpoints once."""


class DataVersion(Record):
    """The version of one output of DVC, or of one path of lakeFS."""

    name: Annotated[str, Field(min_length=1, max_length=1024)]
    """As its author wrote it: ``data/train``, or ``lakefs://datasets/main/train``."""
    algorithm: Annotated[str, Field(min_length=1, max_length=32)]
    """``md5`` or another hash of DVC, or ``commit``."""
    digest: Annotated[str, Field(min_length=1, max_length=256)]
    """DVC's hash, with ``.dir`` for a folder, or the id of the commit."""
    uri: Annotated[str, Field(max_length=2048)] = Field(default="", exclude_if=lambda uri: not uri)
    """Where a program reads exactly this version, such as ``lakefs://datasets/<commit>/train``; empty if unknown."""
    size_bytes: NonNegativeInt | None = Field(default=None, exclude_if=lambda size: size is None)
    files: NonNegativeInt | None = Field(default=None, exclude_if=lambda files: files is None)
    """Number of files of a folder; None for a single file, or if unknown."""

    def __str__(self) -> str:
        return f"{self.algorithm} {self.digest}"

    @property
    def identity(self) -> tuple[str, str]:
        """What the step key holds of it: where the data is, and its content."""
        return self.uri or self.name, str(self)

    @property
    def short_version(self) -> str:
        """The version for people: ``md5 1f3a9c04b2d7``."""
        return f"{self.algorithm} {self.digest[:12]}"


def encode_data_versions(versions: Iterable[DataVersion]) -> str:
    """The JSON list of the versions of a step, as its program gets it."""
    return json.dumps([version.model_dump(mode="json") for version in versions])


def check_data_bytes(versions: Iterable[DataVersion]) -> None:
    """Check that the versions of one step are not too long together.

    Raises:
        UsageError: they take more than `MAX_DATA_BYTES`.
    """
    if (size := len(encode_data_versions(versions))) > MAX_DATA_BYTES:
        raise UsageError(
            f"the versions of its data take {size:,} bytes, and those of one step may take {MAX_DATA_BYTES:,} bytes; "
            "declare a folder in the place of its parts, or shorten the paths"
        )
