"""Reads and describes the training progress that programs report."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice

from tiphys.errors import IntegrityError, ObjectMissingError
from tiphys.protocol.quantities import format_duration
from tiphys.protocol.step_spec import StepKind, StepSpec
from tiphys.records import AttemptClaim, AttemptEnd, AttemptEndOutcome, TrainingProgress
from tiphys.store import LineageLayout, RunLayout, Store, read_record
from tiphys.store.program_output import list_output_chunks

_MAX_READ_REPORTS = 3
"""A report may be replaced between the listing and the read."""
_MAX_SECONDS_LEFT = 10 * 365 * 86400
NOTHING_REPORTED = (
    "no commit yet, because its program completed no step() of a session, and tiphys-exec reported nothing"
)
_STALE_AFTER = timedelta(minutes=2)


def read_training_progress(store: Store, lineage: str, attempt: int | None = None) -> TrainingProgress | None:
    """Read the newest report of the newest attempt that reports; None if there is none, or it is damaged.

    Costs a listing and a small read.

    With ``attempt`` only a report of this attempt counts.

    Raises:
        StoreError: storage failed.
    """
    layout = LineageLayout(lineage)
    for info in islice(store.list(layout.training_progress), _MAX_READ_REPORTS):
        if info.size > TrainingProgress.max_bytes or attempt not in (None, layout.parse_training_progress(info.key)):
            return None
        try:
            return read_record(store, info.key, TrainingProgress)
        except ObjectMissingError:
            continue
        except IntegrityError:
            return None
    return None


def find_sign_of_life(store: Store, claim: AttemptClaim) -> str:
    """What changes whenever the program of an attempt stores a report or output; it means nothing else.

    Costs two listings.
    """
    report = next(iter(store.list(LineageLayout(claim.lineage).training_progress)), None)
    output = list_output_chunks(store, RunLayout(claim.run), claim.step, claim.attempt)
    return f"{report.key if report else ''} {output[-1].key if output else ''}"


def find_report_time(store: Store, lineage: str) -> datetime | None:
    """Time of the newest report of a lineage, by the clock of its program; None without one. Costs a listing."""
    layout = LineageLayout(lineage)
    newest = next(iter(store.list(layout.training_progress)), None)
    report = layout.parse_checkpoint(newest.key) if newest else None  # its time has the place of the global step
    return datetime.fromtimestamp(report.global_step / 1000, UTC) if report else None


def describe_training_progress(progress: TrainingProgress, now: datetime) -> str:
    """One line: ``step 1,200 of 5,000, loss 0.412, 3.4 steps/s, 18m 38s left, saved 1m 4s ago``.

    If no checkpoint is committed, it ends with the reason: ``no commit yet, because the next save is due in 4m``.
    """
    age = now - progress.written_at
    parts = [] if progress.global_step is None else [describe_step(progress)]
    parts += [f"{name} {value:.4g}" for name, value in _headline_metric(progress)]
    if age > _STALE_AFTER:
        parts.append(f"reported {format_age(age)} ago")
    elif progress.steps_per_second is not None:
        parts.append(f"{progress.steps_per_second:.3g} steps/s")
        if (seconds := estimate_seconds_left(progress, now)) is not None:
            parts.append(f"{format_duration(round(seconds))} left")
    parts.extend(_describe_commit(progress, now))
    return ", ".join(parts)


def _describe_commit(progress: TrainingProgress, now: datetime) -> Iterator[str]:
    if progress.checkpoint_at is not None:
        yield f"saved {format_age(now - progress.checkpoint_at)} ago"
    if progress.hindrance:
        yield f"no commit {'since' if progress.checkpoint_at else 'yet'}, because {progress.hindrance}"


def explain_missing_checkpoints(
    spec: StepSpec, opened_at: datetime, now: datetime, end: AttemptEnd | None, has_commit: Callable[[], bool]
) -> str:
    """Why a training that reports nothing has no checkpoint, as a clause; empty if it is protected, or too young.

    ``has_commit`` is called only for an attempt without an ``end``.
    """
    if spec.kind is not StepKind.TRAIN:
        return ""
    is_done = end is not None and end.outcome is AttemptEndOutcome.DONE
    if spec.checkpoints is None:
        return "" if is_done else "it keeps no checkpoints (checkpoints=None)"
    if ((end.ended_at if end else now) - opened_at).total_seconds() < spec.checkpoints.patience_seconds:
        return ""
    if end is not None:
        return "" if end.last_checkpoint or end.progress or end.progress_unknown else "it committed no checkpoint"
    return "" if has_commit() else NOTHING_REPORTED


def describe_step(progress: TrainingProgress) -> str:
    """``step 1,200 of 5,000``, or without the total if it is unknown."""
    if progress.global_step is None:
        return "no step known yet"
    total = f" of {progress.total_steps:,}" if progress.total_steps else ""
    return f"step {progress.global_step:,}{total}"


def estimate_seconds_left(progress: TrainingProgress, now: datetime) -> float | None:
    """Seconds until the last step at the present pace; None if total or pace is unknown, or beyond ten years."""
    if progress.global_step is None or not progress.total_steps or not progress.steps_per_second:
        return None
    seconds = (progress.total_steps - progress.global_step) / progress.steps_per_second
    return max(0.0, seconds - (now - progress.written_at).total_seconds()) if seconds < _MAX_SECONDS_LEFT else None


def format_age(age: timedelta) -> str:
    """An age in whole seconds; 0s where the clock of the writer is ahead."""
    return format_duration(max(0, round(age.total_seconds())))


def _headline_metric(progress: TrainingProgress) -> list[tuple[str, float]]:
    """The loss, by its usual names, or else the first metric."""
    names = sorted(progress.metrics, key=lambda name: (name != "loss", "loss" not in name))
    return [(name, progress.metrics[name]) for name in names[:1]]
