"""Reads what a run left in storage, and adds up what it tells of its time.

Where the time of an attempt went, one phase after the other. Pure.

Useful is only what a later attempt, or the result, rests on: training up to the
checkpoint that was gone on from. The rest is the price of failures.

The account of one step: its attempts in turn, and what was between two of them. Pure.

Which training is kept is told backwards: what the newest attempt has saved or
finished, what that attempt had started from, and so on to the beginning.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from tiphys.errors import IntegrityError, ObjectMissingError
from tiphys.lineage.select import newest_commit
from tiphys.lineage.validity import read_manifest
from tiphys.protocol.compiled_workflow import CompiledPipeline
from tiphys.records import Began, Cause, CheckpointRef, Event, Outcome, Record, Saved, Timestamp
from tiphys.store import Attempt, Store, Submission, all_attempts, read_events, read_run, submissions
from tiphys.store.runs import concurrently


class Phase(StrEnum):
    """What a moment was spent on."""

    STARTING = "starting"
    """From admission until the program opened its session: scheduling, the image, libraries."""
    LOADING = "loading"
    """Restoring a checkpoint."""
    FIRST_STEP = "first_step"
    """From there to the end of the first step, which compiles, warms up and fills caches."""
    USEFUL = "useful"
    """Training that is kept."""
    LOST = "lost"
    """Training that nothing rests on, or that had to be done again."""
    DETECTING = "detecting"
    """From the end of the program until its end was on record; its GPUs are held."""


class Span(Record):
    """A phase of one attempt, and how long it took."""

    phase: Phase
    begin: Timestamp
    end: Timestamp

    @property
    def seconds(self) -> float:
        return (self.end - self.begin).total_seconds()


class Kept(NamedTuple):
    """What is known of an attempt beside its claim and end."""

    until: datetime | None
    """Until when its training is kept; None: nothing of it is."""
    began: Began | None


def spans(attempt: Attempt, kept: Kept, now: datetime) -> tuple[Span, ...]:
    """The phases of an attempt in their order, without those that took no time.

    An attempt that nobody saw begin, because it committed nothing, is lost as a
    whole: starting and training cannot be told apart.

    Args:
        attempt: One that may still run.
        kept: What its checkpoints tell.
        now: The end of what runs.
    """
    opened_at = attempt.claim.written_at
    ended_at = attempt.end.written_at if attempt.end else now
    over_at = (attempt.end.over_at if attempt.end else None) or ended_at
    borders = [opened_at, *_training(attempt, kept, min(over_at, ended_at)), ended_at]
    phases = (*(_BEFORE if kept.began else ()), Phase.USEFUL, Phase.LOST, Phase.DETECTING)
    return tuple(_adjacent(phases, borders))


_BEFORE = (Phase.STARTING, Phase.LOADING, Phase.FIRST_STEP)


def _training(attempt: Attempt, kept: Kept, over_at: datetime) -> Iterator[datetime]:
    """Where each of its phases ends, but for the last."""
    if kept.began is not None:
        yield kept.began.opened_at
        yield (restored := kept.began.restored_at or kept.began.opened_at)
        yield kept.began.first_step_at or restored
    done = attempt.end is not None and attempt.end.outcome is Outcome.DONE
    yield over_at if done else kept.until or attempt.claim.written_at
    yield over_at


def _adjacent(phases: Sequence[Phase], borders: Sequence[datetime]) -> Iterator[Span]:
    """Spans between ``borders``, which clocks that disagree may have put out of order."""
    begin, last = borders[0], max(borders[0], borders[-1])
    for phase, border in zip(phases, borders[1:], strict=True):
        end = min(max(begin, border), last)
        if end - begin > timedelta(0):
            yield Span(phase=phase, begin=begin, end=end)
        begin = end


class Entry(Record):
    """One attempt."""

    attempt: int
    submission: int
    outcome: Outcome | None
    """None while it runs."""
    failed_by: str
    """Its `Cause`; ``fenced`` if another submission took its place; empty if it did not fail."""
    spans: tuple[Span, ...]

    def seconds(self, phase: Phase) -> float:
        """How long it was in ``phase``."""
        return sum(span.seconds for span in self.spans if span.phase is phase)

    @property
    def held(self) -> float:
        """Seconds that it held its GPUs."""
        return sum(span.seconds for span in self.spans)


class Recovery(Record):
    """From the end of a program to the first step of the next attempt, in seconds."""

    after: int
    """The attempt that failed."""
    failed_by: str
    detect: float
    """Until its end was on record."""
    decide: float
    """Until another submission was claimed; 0 where Argo tried again by itself."""
    submit: float
    """Until its Workflow was bound."""
    wait: float
    """Until the next attempt was admitted: back-off, and a turn for GPUs."""
    start: float
    load: float
    first_step: float

    @property
    def seconds(self) -> float:
        return float(sum(getattr(self, part) for part in PARTS))


PARTS = ("detect", "decide", "submit", "wait", "start", "load", "first_step")
"""Parts of a recovery, in their order."""


class StepLedger(Record):
    """All attempts of one step, or of one item of it."""

    step: str
    queue: str = ""
    """Empty for a step without GPUs."""
    gpus: int
    """GPUs of one attempt."""
    began_at: Timestamp
    ended_at: Timestamp
    """The end of its last attempt; for one that runs, the moment of the report."""
    entries: tuple[Entry, ...]
    recoveries: tuple[Recovery, ...]

    def seconds(self, phase: Phase) -> float:
        """How long it was in ``phase``, all attempts together."""
        return sum(entry.seconds(phase) for entry in self.entries)

    @property
    def span(self) -> float:
        """Seconds from its first admission to its end."""
        return max(0.0, (self.ended_at - self.began_at).total_seconds())

    @property
    def held(self) -> float:
        return sum(entry.held for entry in self.entries)

    @property
    def weight(self) -> int:
        """What a second of it counts: its GPUs, or 1 for a step without any."""
        return max(1, self.gpus)


class Known(Record):
    """What storage tells of the checkpoints of one step."""

    starts: Mapping[int, CheckpointRef | None]
    """What each attempt went on from."""
    saved: Mapping[int, Saved]
    """The newest checkpoint of each attempt that has one."""
    at: Mapping[CheckpointRef, datetime]
    """The moment that a checkpoint is of; without those that were removed, unless an end remembers them."""

    @cached_property
    def known_at(self) -> Mapping[CheckpointRef, datetime]:
        return {**self.at, **{one.checkpoint: one.at for one in self.saved.values()}}


def kept_until(attempts: Sequence[Attempt], known: Known) -> dict[int, datetime]:
    """Until when the training of each attempt is kept; attempts of which nothing is kept are absent.

    Where a checkpoint was removed that something started from, so that nobody
    knows its moment, the training of that attempt counts as kept up to its own
    newest one.
    """
    newest = attempts[-1].claim.attempt
    kept = {newest: known.saved[newest].at} if newest in known.saved else {}
    number = newest
    while (start := known.starts.get(number)) is not None and start.attempt < number:
        if start.lineage != attempts[-1].claim.lineage:
            break  # of another run, whose own account it is
        moment = known.known_at.get(start)
        if moment is None and start.attempt in known.saved:
            moment = known.saved[start.attempt].at
        if moment is not None:
            kept[start.attempt] = moment
        number = start.attempt
    return kept


def failed_by(attempt: Attempt) -> str:
    """What ended an attempt that failed; see `Entry`."""
    if attempt.end is None or attempt.end.outcome is Outcome.DONE:
        return ""
    if attempt.end.outcome is Outcome.FENCED:
        return "fenced"
    return (attempt.end.cause or Cause.UNKNOWN).value


def entries(attempts: Sequence[Attempt], known: Known, now: datetime) -> tuple[Entry, ...]:
    """What became of the time of each attempt."""
    kept = kept_until(attempts, known)

    def entry(one: Attempt) -> Entry:
        number = one.claim.attempt
        saved = known.saved.get(number)
        return Entry(
            attempt=number,
            submission=one.claim.submission,
            outcome=one.end.outcome if one.end else None,
            failed_by=failed_by(one),
            spans=spans(one, Kept(kept.get(number), saved.began if saved else None), now),
        )

    return tuple(map(entry, attempts))


def recoveries(
    attempts: Sequence[Attempt], told: Sequence[Entry], submissions: Mapping[int, Submission]
) -> tuple[Recovery, ...]:
    """What was between a failed attempt and the one that followed it."""
    found = []
    for before, after, old, new in zip(attempts, attempts[1:], told, told[1:], strict=False):
        if before.end is None or before.end.outcome is Outcome.DONE:
            continue
        decide, submit, wait = _between(before.end.written_at, after, submissions)
        found.append(
            Recovery(
                after=before.claim.attempt,
                failed_by=failed_by(before),
                detect=old.seconds(Phase.DETECTING),
                decide=decide,
                submit=submit,
                wait=wait,
                start=new.seconds(Phase.STARTING),
                load=new.seconds(Phase.LOADING),
                first_step=new.seconds(Phase.FIRST_STEP),
            )
        )
    return tuple(found)


def _between(ended_at: datetime, after: Attempt, submissions: Mapping[int, Submission]) -> tuple[float, float, float]:
    """Seconds from an end to the claim of the next submission, to its binding, and to the next admission."""
    moments = [ended_at]
    by = submissions.get(after.claim.submission)
    if by is not None and by.claim.written_at > ended_at:
        moments += [by.claim.written_at, by.bound.written_at if by.bound else by.claim.written_at]
    else:
        moments += [ended_at, ended_at]
    moments.append(after.claim.written_at)
    decide, submit, wait = (max(0.0, (end - begin).total_seconds()) for begin, end in pairwise(moments))
    return decide, submit, wait


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
