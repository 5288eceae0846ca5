"""Why an attempt ended without a result, in words that a reader of an older version can still read.

A training image may hold an older Tiphys than the service that ends its
attempts. So causes that came later are stored as the older, broader one that
they were part of, with the exact one beside it; who does not know that field
reads what it always read.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class Cause(StrEnum):
    """Why an attempt ended without a result. Budgets are kept by cause."""

    PREEMPTION = "preemption"
    INFRASTRUCTURE = "infrastructure"
    OUT_OF_MEMORY = "out_of_memory"
    """Of the host; the GPU's has a cause of its own, because more memory of the pod does not help it."""
    DEADLINE = "deadline"
    USER_ERROR = "user_error"
    OUTPUT_MISSING = "output_missing"
    UNKNOWN = "unknown"
    GPU_OUT_OF_MEMORY = "gpu_out_of_memory"
    HANG = "hang"
    """No step was completed for far longer than before."""
    IMAGE = "image"
    """The registry answered, and has no such image for this pod."""
    STORAGE = "storage"
    """The store of checkpoints was out of reach."""

    @property
    def broader(self) -> "Cause":
        """The cause that this one was part of before it had a name; itself if it always had one."""
        return _BROADER.get(self, self)

    @property
    def words(self) -> str:
        """As a person says it."""
        return self.value.replace("_", " ").replace("gpu", "GPU")


_BROADER: Mapping[Cause, Cause] = {
    Cause.GPU_OUT_OF_MEMORY: Cause.USER_ERROR,
    Cause.HANG: Cause.UNKNOWN,
    Cause.IMAGE: Cause.INFRASTRUCTURE,
    Cause.STORAGE: Cause.INFRASTRUCTURE,
}
_EXACT = "exact_cause"


def for_storage(document: dict[str, Any]) -> dict[str, Any]:
    """``document`` with a ``cause`` that every version knows, and the exact one in a field of its own."""
    cause = document.get("cause")
    if cause is None or Cause(cause).broader == cause:
        return document
    return {**document, "cause": Cause(cause).broader.value, _EXACT: cause}


def from_storage(document: dict[str, Any]) -> dict[str, Any]:
    """What `for_storage` was given; an exact cause that only a later version knows is left out."""
    exact = document.get(_EXACT)
    kept = {name: value for name, value in document.items() if name != _EXACT}
    return {**kept, "cause": exact} if exact in list(Cause) else kept
