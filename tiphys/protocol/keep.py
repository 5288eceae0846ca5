"""Which checkpoints an author wants to keep, in the words that he writes and that travel to the trainer."""

import re
from typing import Literal

from pydantic import NonNegativeFloat, PositiveInt

from tiphys.errors import UsageError
from tiphys.records import Record

DELETE_AFTER_SECONDS = 600.0
"""Long enough to notice a wrong policy and pin what it would take; short against what storage costs."""

_BEST = re.compile(r"(?P<metric>.+?):(?P<order>min|max)(?::(?P<count>\d+))?")
_STEPS = re.compile(r"(\d+)\s*steps?")


class Best(Record):
    """The ``count`` checkpoints whose ``metric`` is lowest or highest."""

    metric: str
    order: Literal["min", "max"]
    count: PositiveInt = 1

    def __str__(self) -> str:
        return f"{self.metric}:{self.order}:{self.count}"


class Keep(Record):
    """What retention leaves of a lineage. Where there is none, everything stays."""

    last: PositiveInt
    """How many of the newest valid ones."""
    every_steps: PositiveInt | None = None
    """The first valid one from each multiple of so many global steps on, for ever; None for no such anchors."""
    best: Best | None = None
    delay_seconds: NonNegativeFloat = DELETE_AFTER_SECONDS
    """How long an expired one stays, in case somebody still wants it."""


def parse_best(text: str, where: str) -> Best:
    """``loss:min:2``, or ``loss:min`` for one; ``where`` begins the message of the error."""
    match = _BEST.fullmatch(text.strip())
    if not match or (count := int(match["count"] or 1)) == 0:
        raise UsageError(
            f"{where}{text!r} is not valid: write a metric, min or max, and how many to keep, such as loss:min:2"
        )
    return Best(metric=match["metric"], order="min" if match["order"] == "min" else "max", count=count)


def parse_every(text: str, where: str) -> int:
    """``1000 steps``; ``where`` begins the message of the error."""
    match = _STEPS.fullmatch(text.strip())
    if not match or int(match[1]) == 0:
        raise UsageError(f"{where}{text!r} is not valid: write a number of global steps, such as 1000 steps")
    return int(match[1])
