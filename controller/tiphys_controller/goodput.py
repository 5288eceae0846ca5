"""Measures where the time of a run went, and what each cause of failure cost.

Each attempt is split into phases. Training is useful only up to the checkpoint from which a later attempt resumed, or
up to the result. Lost is what an attempt that failed held its GPUs for without that; the start of one that did not fail
is neither. Which training is kept is traced backwards: from what the newest attempt saved or finished, to the
checkpoint it started from, and so on. All but the readers at the end is pure.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cached_property
from itertools import pairwise

from pydantic import Field

from tiphys.errors import IntegrityError, ObjectMissingError
from tiphys.lineage.attempt_phases import KeptTraining, PhaseSpan, TimePhase, split_phases
from tiphys.lineage.restored_starts import find_restored_starts
from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.select import read_newest_commit
from tiphys.lineage.validity import read_manifest
from tiphys.records import AttemptEndOutcome, Cause, CheckpointRef, Event, LastCheckpoint, Record, Timestamp, task_name
from tiphys.store import Attempt, Store, Submission
from tiphys.store.runs import ALL_ATTEMPTS, read_concurrently

INTERRUPTED = "interrupted"
STOPPED = "stopped"
"""What ended an attempt whose workflow a person stopped. It is no failure, and the pause after it costs nothing."""


class AttemptTimeUsage(Record):
    """Time usage of one attempt."""

    attempt: int
    submission: int
    outcome: AttemptEndOutcome | None
    """None while it runs."""
    failed_by: str
    """Its `Cause`; ``fenced`` if a later submission fenced it; `STOPPED` if a person did; `INTERRUPTED` if no end is
    recorded, and its Workflow has ended; empty if it is done or runs."""
    spans: tuple[PhaseSpan, ...]

    def seconds(self, phase: TimePhase) -> float:
        """Seconds spent in ``phase``."""
        return sum(span.seconds for span in self.spans if span.phase is phase)

    @property
    def held_seconds(self) -> float:
        """Seconds for which it held its GPUs."""
        return sum(span.seconds for span in self.spans)

    @property
    def lost_seconds(self) -> float:
        """Seconds that its failure cost: all but its useful training, since its start-up has to be repeated.

        An attempt that did not fail, or that a person stopped, loses what it discarded.
        """
        if self.failed_by in ("", STOPPED):
            return self.seconds(TimePhase.DISCARDED)
        return self.held_seconds - self.seconds(TimePhase.USEFUL)


class Recovery(Record):
    """From the end of a program to the first step of the next attempt, in seconds."""

    after: int
    """The attempt that failed."""
    failed_by: str
    pause: float = 0.0
    """After a stop, until the claim of the next submission; no part of the recovery."""
    detect: float
    """Until the end record."""
    decide: float
    """Until the claim of the next submission; 0 if Argo retried the step, and after a stop."""
    submit: float
    """Until the binding of its Workflow."""
    wait: float
    """Until the admission of the next attempt: back-off, and waiting for GPUs."""
    start: float
    load: float
    first_step: float

    @property
    def seconds(self) -> float:
        return float(sum(getattr(self, part) for part in RECOVERY_PARTS))


RECOVERY_PARTS = ("detect", "decide", "submit", "wait", "start", "load", "first_step")
"""Parts of a recovery, in order."""


class StepTimeUsage(Record):
    """Time usage of one step, or of one item of a fan-out."""

    step: str
    name: str = ""
    """Name for people, such as ``fit[2]``."""
    item: str = ""
    """Value of the item for people; empty for a step."""
    queue: str = ""
    """Empty for a step without GPUs."""
    gpus: int
    """GPUs of one attempt."""
    began_at: Timestamp
    ended_at: Timestamp
    """End of its last attempt; the time of the report if it runs."""
    entries: tuple[AttemptTimeUsage, ...]
    recoveries: tuple[Recovery, ...]

    def seconds(self, phase: TimePhase) -> float:
        """Seconds spent in ``phase``, all attempts together."""
        return sum(entry.seconds(phase) for entry in self.entries)

    @property
    def elapsed_seconds(self) -> float:
        """Seconds from its first admission to its end, without pauses."""
        return max(
            0.0, (self.ended_at - self.began_at).total_seconds() - sum(recovery.pause for recovery in self.recoveries)
        )

    @property
    def held_seconds(self) -> float:
        return sum(entry.held_seconds for entry in self.entries)

    @property
    def lost_seconds(self) -> float:
        return sum(entry.lost_seconds for entry in self.entries)

    def label(self, attempt: int | None = None) -> str:
        """Name and item, such as ``fit[2] lr=0.1``, or those of one attempt: ``fit[2]/3 lr=0.1``."""
        return f"{self.name or self.step}{'' if attempt is None else f'/{attempt}'} {self.item}".rstrip()

    @property
    def gpu_weight(self) -> int:
        """Weight of a second: its GPUs, or 1 for a step without GPUs."""
        return max(1, self.gpus)


class CheckpointMoments(Record):
    """Checkpoints of one step and their times, as storage shows them."""

    starts: Mapping[int, CheckpointRef | None]
    """The checkpoint that each attempt started from."""
    saved: Mapping[int, LastCheckpoint]
    """The newest checkpoint of each attempt that has one."""
    at: Mapping[CheckpointRef, datetime]
    """Times of checkpoints. A removed checkpoint is missing, unless an end record holds its time."""

    @cached_property
    def all_moments(self) -> Mapping[CheckpointRef, datetime]:
        return {**self.at, **{save.checkpoint: save.at for save in self.saved.values()}}


def find_kept_until(attempts: Sequence[Attempt], moments: CheckpointMoments) -> dict[int, datetime]:
    """End of the kept training by attempt; attempts without kept training are absent.

    If the checkpoint that a later attempt started from was removed, its time is unknown. Then the training counts as
    kept up to the attempt's newest checkpoint.
    """
    newest = attempts[-1].claim.attempt
    kept_until = {newest: moments.saved[newest].at} if newest in moments.saved else {}
    number = newest
    while (start := moments.starts.get(number)) is not None and start.attempt < number:
        if start.lineage != attempts[-1].claim.lineage:
            break  # a checkpoint of another run, which accounts for its own time
        moment = moments.all_moments.get(start)
        if moment is None and start.attempt in moments.saved:
            moment = moments.saved[start.attempt].at
        if moment is not None:
            kept_until[start.attempt] = moment
        number = start.attempt
    return kept_until


def find_failure_cause(attempt: Attempt) -> str:
    """Cause of a failed attempt; see `AttemptTimeUsage.failed_by`."""
    if attempt.end is None or attempt.end.outcome is AttemptEndOutcome.DONE:
        return ""
    if attempt.end.outcome is AttemptEndOutcome.FENCED:
        return STOPPED if attempt.end.stopped else "fenced"
    return (attempt.end.cause or Cause.UNKNOWN).value


def measure_attempts(
    attempts: Sequence[Attempt], checkpoint_moments: CheckpointMoments, now: datetime, is_running: bool = False
) -> tuple[AttemptTimeUsage, ...]:
    """Measure the time usage of each attempt; ``is_running`` says whether one without an end still runs."""
    kept_until = find_kept_until(attempts, checkpoint_moments)

    def measure(attempt: Attempt) -> AttemptTimeUsage:
        number, is_open = attempt.claim.attempt, is_running and attempt.end is None
        kept = KeptTraining(kept_until.get(number), checkpoint_moments.saved.get(number))
        return AttemptTimeUsage(
            attempt=number,
            submission=attempt.claim.submission,
            outcome=attempt.end.outcome if attempt.end else None,
            failed_by=find_failure_cause(attempt) or ("" if attempt.end or is_open else INTERRUPTED),
            spans=split_phases(attempt, kept, now, is_open),
        )

    return tuple(map(measure, attempts))


def measure_recoveries(
    attempts: Sequence[Attempt], usages: Sequence[AttemptTimeUsage], submissions: Mapping[int, Submission]
) -> tuple[Recovery, ...]:
    """Measure the recovery between each failed attempt and the next."""
    recoveries = []
    for before, after, old, new in zip(attempts, attempts[1:], usages, usages[1:], strict=False):
        if before.end is None or before.end.outcome is AttemptEndOutcome.DONE:
            continue
        decide, submit, wait = _measure_recovery_waits(before.end.ended_at, after, submissions)
        recoveries.append(
            Recovery(
                after=before.claim.attempt,
                failed_by=find_failure_cause(before),
                detect=old.seconds(TimePhase.DETECTING),
                pause=decide if before.end.stopped else 0.0,
                decide=0.0 if before.end.stopped else decide,
                submit=submit,
                wait=wait,
                start=new.seconds(TimePhase.STARTING),
                load=new.seconds(TimePhase.LOADING),
                first_step=new.seconds(TimePhase.FIRST_STEP),
            )
        )
    return tuple(recoveries)


def _measure_recovery_waits(
    ended_at: datetime, after: Attempt, submissions: Mapping[int, Submission]
) -> tuple[float, float, float]:
    """Seconds from an end to the claim of the next submission, to its binding, and to the next admission."""
    claimed_at = bound_at = ended_at
    submission = submissions.get(after.claim.submission)
    if submission is not None and submission.claim.written_at > ended_at:
        claimed_at = submission.claim.written_at
        bound_at = submission.binding.written_at if submission.binding else claimed_at
    moments = (ended_at, claimed_at, bound_at, after.claim.written_at)
    decide, submit, wait = (max(0.0, (end - begin).total_seconds()) for begin, end in pairwise(moments))
    return decide, submit, wait


class FailureCost(Record):
    """Cost of one cause of failure."""

    failures: int = 0
    lost: float = 0.0
    """GPU-seconds lost, see `AttemptTimeUsage.lost_seconds`."""
    recovery: float = 0.0
    """Seconds from the ends of programs to the first steps of the next attempts."""


class TimeUsage(Record):
    """Time usage of a run, or of all steps of a queue."""

    name: str
    steps: tuple[StepTimeUsage, ...]
    damaged: tuple[str, ...] = Field(default=(), exclude_if=lambda damaged: not damaged)
    """Records that cannot be read, each with its key, what is damaged, and what to do."""

    def gpu_seconds(self, phase: TimePhase) -> float:
        """GPU-seconds of a phase; a step without GPUs counts as one GPU."""
        return sum(step.gpu_weight * step.seconds(phase) for step in self.steps)

    @property
    def held_gpu_seconds(self) -> float:
        """GPU-seconds held."""
        return sum(step.gpu_weight * step.held_seconds for step in self.steps)

    @property
    def lost_gpu_seconds(self) -> float:
        """GPU-seconds lost to failures, which is the sum of `costs`."""
        return sum(step.gpu_weight * step.lost_seconds for step in self.steps)

    @property
    def goodput(self) -> float | None:
        """Useful share of the GPU-seconds that were useful or lost; None if there are none yet.

        The start of what did not fail, waiting for GPUs, and the pause after a stop are in neither. Google Cloud's
        "Goodput metric as a measure of ML productivity" divides by all elapsed time instead.
        """
        useful = self.gpu_seconds(TimePhase.USEFUL)
        return useful / (useful + self.lost_gpu_seconds) if useful or self.lost_gpu_seconds else None

    @property
    def failures(self) -> int:
        return sum(cost.failures for cause, cost in self.costs.items() if cause != STOPPED)

    @property
    def costs(self) -> Mapping[str, FailureCost]:
        """Costs by `AttemptTimeUsage.failed_by`."""
        failures: Counter[str] = Counter()
        lost: defaultdict[str, float] = defaultdict(float)
        recovery: defaultdict[str, float] = defaultdict(float)
        for step in self.steps:
            for entry in step.entries:
                if entry.failed_by:
                    failures[entry.failed_by] += 1
                    lost[entry.failed_by] += step.gpu_weight * entry.lost_seconds
            for part in step.recoveries:
                recovery[part.failed_by] += part.seconds
        return {
            cause: FailureCost(failures=failures[cause], lost=lost[cause], recovery=recovery[cause])
            for cause in sorted(failures)
        }


def measure_time_usage(
    history: RunHistory, now: datetime, window: slice = ALL_ATTEMPTS, lost_at: datetime | None = None
) -> TimeUsage:
    """Measure the time usage of a run.

    Costs some listings, a read per attempt and per batch of events, and a read per start checkpoint whose time no end
    record holds.

    Args:
        history: The run.
        now: End time of running attempts.
        window: The attempts that count, as in `select_attempts`.
        lost_at: The last sign of life of a run whose last Workflow ended without a record; None for others. Its open
            attempts are interrupted, and end there, or at what they have saved or reported later.

    Raises:
        NotFoundError: there is no such run.
        IntegrityError: a record is damaged.
    """
    submissions = {submission.claim.submission: submission for submission in history.submissions}
    pipeline, names, attempts = history.pipeline, history.names, history.read_attempts(window)
    events: defaultdict[str, list[Event]] = defaultdict(list)
    for event in history.events:
        events[event.step].append(event)

    def measure_step(step: str) -> StepTimeUsage:
        step_attempts = attempts[step]
        name = task_name(step)
        spec, volume = pipeline.steps.get(name), pipeline.checkpoint_volume_url(name)
        own_events = events[step]
        moments = _read_checkpoint_moments(None if volume else history.store, step_attempts, own_events)
        last, over_at = step_attempts[-1], now
        if lost_at is not None:
            signs = [lost_at, last.claim.written_at, *(event.at for event in own_events)]
            over_at = max([*signs, *(saved.at for saved in moments.saved.values())])
        ended_at = _find_step_end(last, submissions, min(now, over_at))
        is_running = lost_at is None and ended_at == now
        usages = measure_attempts(step_attempts, moments, ended_at, is_running)
        return StepTimeUsage(
            step=step,
            name=names.name(step),
            item=names.value(step),
            queue=spec.gpu.queue if spec and spec.gpu else "",
            gpus=spec.gpu.gpus if spec and spec.gpu else 0,
            began_at=step_attempts[0].claim.written_at,
            ended_at=ended_at,
            entries=usages,
            recoveries=measure_recoveries(step_attempts, usages, submissions),
        )

    steps = tuple(map(measure_step, names.sort(attempts)))
    return TimeUsage(name=history.run, steps=steps, damaged=history.damaged)


class GpuTime(Record):
    """GPU time of a namespace within one month."""

    namespace: str
    month: str
    """In UTC, such as ``2026-11``."""
    gpu_kind: str
    """Flavor or type; empty where neither the step nor the ledger named one."""
    gpu_seconds: float


def measure_gpu_time(histories: Iterable[tuple[str, RunHistory]], since: datetime, now: datetime) -> list[GpuTime]:
    """Measure the GPU time of runs, each with its namespace: from the claim of an attempt to its end, after ``since``.

    Raises:
        IntegrityError: a record is damaged.
    """
    seconds: defaultdict[tuple[str, str, str], float] = defaultdict(float)
    for namespace, history in histories:
        submissions = {submission.claim.submission: submission for submission in history.submissions}
        ends = [submission.end for submission in submissions.values()]
        if ends and all(end is not None and end.written_at < since for end in ends):
            continue
        for step, attempts in history.read_attempts(ALL_ATTEMPTS).items():
            spec = history.pipeline.steps.get(task_name(step))
            if spec is None or spec.gpu is None:
                continue
            for claim, end in attempts:
                kind = claim.flavor or claim.gpu_type or spec.gpu.gpu_type or ""
                ended_at = _find_step_end(Attempt(claim, end), submissions, now)
                for month, length in _split_by_month(max(claim.written_at, since), ended_at):
                    seconds[month, namespace, kind] += spec.gpu.gpus_for(claim.members) * length
    return [
        GpuTime(month=month, namespace=namespace, gpu_kind=kind, gpu_seconds=total)
        for (month, namespace, kind), total in sorted(seconds.items())
    ]


def _split_by_month(begin: datetime, end: datetime) -> Iterator[tuple[str, float]]:
    """Seconds between the moments, by month of UTC."""
    while begin < end:
        first = begin.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
        following = (first + timedelta(days=32)).replace(day=1)
        yield f"{begin:%Y-%m}", (min(end, following) - begin).total_seconds()
        begin = following


def group_by_queue(usages: Iterable[TimeUsage]) -> list[TimeUsage]:
    """Regroup the steps by the queue that gave them GPUs; steps without GPUs are left out."""
    steps: defaultdict[str, list[StepTimeUsage]] = defaultdict(list)
    for step in (step for account in usages for step in account.steps if step.queue):
        steps[step.queue].append(step)
    return [TimeUsage(name=queue, steps=tuple(steps[queue])) for queue in sorted(steps)]


def _find_step_end(last: Attempt, numbered: Mapping[int, Submission], now: datetime) -> datetime:
    """End of a step; for an attempt without an end record, the recorded end of its Workflow, ``now`` at the latest."""
    if last.end is not None:
        return last.end.ended_at
    by = numbered.get(last.claim.submission)
    return min(now, by.end.written_at) if by is not None and by.end is not None else now


def _read_checkpoint_moments(
    store: Store | None, attempts: Sequence[Attempt], events: Iterable[Event]
) -> CheckpointMoments:
    """``store`` holds the checkpoints; None if they are on a volume that is not visible here."""
    last = attempts[-1].claim
    lineage = last.lineage
    starts = find_restored_starts(attempts, events)
    saved = {
        attempt.claim.attempt: attempt.end.last_checkpoint
        for attempt in attempts
        if attempt.end and attempt.end.last_checkpoint
    }
    if store is None or not lineage:
        return CheckpointMoments(starts=starts, saved=saved, at={})
    if last.attempt not in saved and (newest := read_newest_commit(store, lineage, last.attempt)) is not None:
        saved[last.attempt] = LastCheckpoint.from_manifest(newest)
    recorded = {save.checkpoint for save in saved.values()}
    unrecorded = [
        ref for ref in dict.fromkeys(starts.values()) if ref and ref.lineage == lineage and ref not in recorded
    ]
    at: dict[CheckpointRef, datetime] = {}
    for ref, checkpoint in zip(
        unrecorded, read_concurrently(lambda ref: _read_saved(store, ref), unrecorded), strict=True
    ):
        if checkpoint is not None:
            at[ref] = checkpoint.at
            saved.setdefault(ref.attempt, checkpoint)  # the end record of a fence names no checkpoint
    return CheckpointMoments(starts=starts, saved=saved, at=at)


def _read_saved(store: Store, ref: CheckpointRef) -> LastCheckpoint | None:
    try:
        return LastCheckpoint.from_manifest(read_manifest(store, ref))
    except (IntegrityError, ObjectMissingError):
        return None
