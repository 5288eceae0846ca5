"""Reads what a run left in storage, and adds up what it tells of its time."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from tiphys.errors import IntegrityError, ObjectMissingError
from tiphys.lineage.newest import newest_commit
from tiphys.lineage.verify import read_manifest
from tiphys.protocol.pipeline import CompiledPipeline
from tiphys.records import CheckpointRef, Event, Record, Saved
from tiphys.store import Attempt, Store, Submission, all_attempts, read_events, read_run, submissions
from tiphys.store.runs import concurrently
from tiphys_controller.economics.ledger import Known, StepLedger, entries, recoveries
from tiphys_controller.economics.spans import Phase


class Cost(Record):
    """What one cause has cost."""

    failures: int = 0
    lost: float = 0.0
    """GPU-seconds that its failures made worthless: lost training, and all that had to begin again."""
    recovery: float = 0.0
    """Seconds from the ends of the programs to the first steps of the attempts that followed."""


class Account(Record):
    """What became of the time of a run, or of all that ran in a queue."""

    name: str
    steps: tuple[StepLedger, ...]

    def gpu_seconds(self, phase: Phase) -> float:
        """GPU-seconds of a phase; a step without GPUs counts as if it had one."""
        return sum(step.weight * step.seconds(phase) for step in self.steps)

    @property
    def held(self) -> float:
        """GPU-seconds held."""
        return sum(step.weight * step.held for step in self.steps)

    @property
    def span(self) -> float:
        """GPU-seconds from the first admission of each step to its end, whether or not it held its GPUs."""
        return sum(step.weight * step.span for step in self.steps)

    @property
    def goodput(self) -> float | None:
        """The share of that which was useful training; None where nothing took any time.

        Source: Google Cloud, "Goodput metric as a measure of ML productivity".
        """
        return self.gpu_seconds(Phase.USEFUL) / self.span if self.span else None

    @property
    def failures(self) -> int:
        return sum(cost.failures for cost in self.costs.values())

    @property
    def costs(self) -> Mapping[str, Cost]:
        """By `Entry.failed_by`."""
        failures: Counter[str] = Counter()
        lost: defaultdict[str, float] = defaultdict(float)
        recovery: defaultdict[str, float] = defaultdict(float)
        for step in self.steps:
            for entry in step.entries:
                if entry.failed_by:
                    failures[entry.failed_by] += 1
                    lost[entry.failed_by] += step.weight * (entry.held - entry.seconds(Phase.USEFUL))
            for one in step.recoveries:
                recovery[one.failed_by] += one.seconds
        return {
            cause: Cost(failures=failures[cause], lost=lost[cause], recovery=recovery[cause])
            for cause in sorted(failures)
        }


def accounts(store: Store, runs: Iterable[str], now: datetime) -> list[Account]:
    """What became of the time of each run. ``now`` is the end of what still runs.

    Costs some listings and a read for each attempt and each batch of events, and
    one for each checkpoint that an attempt started from and no end remembers.

    Raises:
        NotFoundError: there is no such run.
        IntegrityError: a record is damaged.
    """
    return [_account(store, run, now) for run in runs]


def by_queue(found: Iterable[Account]) -> list[Account]:
    """The same steps, by the queue that gave them GPUs; those without GPUs are left out."""
    steps: defaultdict[str, list[StepLedger]] = defaultdict(list)
    for step in (step for account in found for step in account.steps if step.queue):
        steps[step.queue].append(step)
    return [Account(name=queue, steps=tuple(steps[queue])) for queue in sorted(steps)]


def _account(store: Store, run: str, now: datetime) -> Account:
    pipeline = CompiledPipeline.from_manifest(read_run(store, run).workflow)
    attempts, told = all_attempts(store, run), read_events(store, run)
    numbered = {one.claim.submission: one for one in submissions(store, run)}

    def ledger(step: str) -> StepLedger:
        tries = attempts[step]
        name = step.partition(".")[0]
        spec, volume = pipeline.steps.get(name), pipeline.volume(name)
        known = _known(None if volume else store, tries, [event for event in told if event.step == step])
        over = _over(tries[-1], numbered, now)
        rows = entries(tries, known, over)
        return StepLedger(
            step=step,
            queue=spec.gpu.queue if spec and spec.gpu else "",
            gpus=spec.gpu.gpus if spec and spec.gpu else 0,
            began_at=tries[0].claim.written_at,
            ended_at=over,
            entries=rows,
            recoveries=recoveries(tries, rows, numbered),
        )

    return Account(name=run, steps=tuple(map(ledger, sorted(attempts))))


def _over(last: Attempt, numbered: Mapping[int, Submission], now: datetime) -> datetime:
    """The end of a step; of an attempt that nobody has ended, that of its Workflow, if that is on record."""
    if last.end is not None:
        return last.end.written_at
    by = numbered.get(last.claim.submission)
    return min(now, by.end.written_at) if by is not None and by.end is not None else now


def _known(store: Store | None, attempts: Sequence[Attempt], told: Iterable[Event]) -> Known:
    """``store`` is the one of the checkpoints; None where they cannot be seen from here."""
    lineage = attempts[-1].claim.lineage
    restored = {
        event.attempt: ref for event in told if event.name == "checkpoint.restored" and (ref := _named(event, lineage))
    }
    starts = {one.claim.attempt: _start(one, restored.get(one.claim.attempt)) for one in attempts}
    saved = {one.claim.attempt: one.end.saved for one in attempts if one.end and one.end.saved}
    last = attempts[-1].claim
    if store is None or not lineage:
        return Known(starts=starts, saved=saved, at={})
    if last.attempt not in saved and (newest := newest_commit(store, lineage, last.attempt)) is not None:
        saved[last.attempt] = Saved.of(newest)
    remembered = {one.checkpoint for one in saved.values()}
    wanted = [ref for ref in starts.values() if ref is not None and ref.lineage == lineage and ref not in remembered]
    at: dict[CheckpointRef, datetime] = {}
    for ref, found in zip(wanted, concurrently(lambda ref: _saved(store, ref), wanted), strict=True):
        if found is not None:
            at[ref] = found.at
            saved.setdefault(ref.attempt, found)  # an end that a takeover wrote knows nothing of it
    return Known(starts=starts, saved=saved, at=at)


def _start(attempt: Attempt, restored: CheckpointRef | None) -> CheckpointRef | None:
    """What an attempt went on from: what its program restored; its claim alone knows of which run that is."""
    told = attempt.claim.starts_from
    return told if restored is None or str(told) == str(restored) else restored


def _named(event: Event, lineage: str) -> CheckpointRef | None:
    """The checkpoint that an event tells of as ``attempt-step``."""
    attempt, _, step = str(event.data.get("checkpoint", "")).partition("-")
    if not (attempt.isdecimal() and step.isdecimal()):
        return None
    return CheckpointRef(lineage=lineage, attempt=int(attempt), global_step=int(step))


def _saved(store: Store, ref: CheckpointRef) -> Saved | None:
    try:
        return Saved.of(read_manifest(store, ref))
    except (IntegrityError, ObjectMissingError):
        return None
