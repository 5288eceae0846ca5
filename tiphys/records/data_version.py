"""The version of data that a step reads and no step made, as the tool that manages the data names it.

Tiphys never reads such data. Its version alone enters the step key, so that a
result that was computed from other data is not reused.
"""

from typing import Annotated

from pydantic import Field, NonNegativeInt

from tiphys.records.base import Record


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
