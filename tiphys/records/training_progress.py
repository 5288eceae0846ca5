"""Training progress: what a running program says about itself, for people.

Any program of a tenant may write this record, so readers bound it. Nothing acts on
what it says; that it comes is a sign of life of the program.
"""

import re
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from tiphys.records.base import StoredRecord, Timestamp, shortened
from tiphys.records.checkpoint import Metric

MAX_REPORTED_METRICS = 8
MAX_HINDRANCE_CHARACTERS = 240
_METRIC_NAME = re.compile(r"[A-Za-z0-9_.:/@-]{1,40}")


def _plain_metrics(metrics: Any) -> Any:
    """The first metrics whose names are short and plain, so that a name can neither fill nor forge a line."""
    if not isinstance(metrics, dict):
        return metrics
    plain = [(name, metrics[name]) for name in metrics if isinstance(name, str) and _METRIC_NAME.fullmatch(name)]
    return dict(plain[:MAX_REPORTED_METRICS])


def _plain_text(text: Any) -> Any:
    """One line without control characters: errors of storage and of programs have several."""
    if not isinstance(text, str):
        return text
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


_StepCount = Annotated[int, Field(ge=0, lt=10**15)]


class TrainingProgress(StoredRecord):
    """``training-progress/…json``: the newest report of an attempt; ``written_at`` is its time."""

    max_bytes: ClassVar[int] = 4 << 10

    global_step: _StepCount | None = None
    """None: the writer does not know it, such as `tiphys-exec` before the first checkpoint."""
    total_steps: _StepCount | None = None
    """Steps of the whole training; None if the program did not say."""
    steps_per_second: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Pace of the last reports; None before the second one."""
    metrics: Annotated[dict[str, Metric], BeforeValidator(_plain_metrics)] = {}
    """Numbers that the program gave for this step, such as its loss."""
    checkpoint_step: _StepCount | None = None
    """Step of the newest checkpoint that the attempt restored or committed; None without one."""
    checkpoint_at: Timestamp | None = None
    hindrance: Annotated[str, shortened(MAX_HINDRANCE_CHARACTERS), BeforeValidator(_plain_text)] = ""
    """Why the attempt committed no checkpoint yet, or none any more; empty if nothing hinders it."""
