"""One thing that a round comes upon, so that whoever goes the round counts, tells and removes all kinds alike."""

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple


class What(StrEnum):
    """Kinds of things; the value is what metrics and tables call them."""

    UPLOAD = "upload"
    ALERT = "alert"
    AGENT = "agent"
    UNSENT = "unsent"
    GONE = "gone"
    LEASE = "lease"


class Found(NamedTuple):
    """A thing, where it is, and why it is told of."""

    what: What
    where: str
    """URL of a store, or a namespace."""
    name: str
    why: str
    remove: Callable[[], object] | None = None
    """Removes it, and does nothing if it is gone; None for what is only told, because others look after it."""
