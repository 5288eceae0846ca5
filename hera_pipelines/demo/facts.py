"""What the demo reads to see whether its promises were kept.

Everything is asked of storage and of the step log, nothing of the processes
that the demo started: what counts is what is left when they are gone.

Counts the work that was done, so that the demo can count what was done twice.

A killed trainer can leave no last words, and its last checkpoint does not tell
how far it got. So each executed step is one line in a file of its own attempt,
written before the next step begins; the page cache keeps it when the process is
killed. Only the demo reads it; nothing in resuming depends on it.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from hera_pipelines.demo.fault_injection import PromiseBrokenError
from tiphys.protocol import environment
from tiphys.records import AttemptEnd, CheckpointManifest, CheckpointRef, Event, Outcome
from tiphys.store import (
    Attempt,
    LineageLayout,
    Store,
    all_attempts,
    lineage_of,
    read_events,
    read_record,
    step_attempts,
)


class Executed(NamedTuple):
    """One execution of one global step."""

    attempt: int
    pid: int
    global_step: int
    at: datetime


class StepLog:
    """The log of one attempt, below ``folder``; without a folder it keeps nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / f"{int(os.environ.get(environment.ATTEMPT, '0')):04d}.log" if folder else None
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def append(self, global_step: int, at: datetime) -> None:
        """Note that ``global_step`` has been executed by this process."""
        if self._descriptor is not None:
            os.write(self._descriptor, f"{os.getpid()} {global_step} {at.isoformat()}\n".encode())


def read_steps(folder: Path) -> list[Executed]:
    """Every execution on record, attempt by attempt; a line cut short by a kill is left out."""
    return [entry for path in sorted(folder.glob("*.log")) for entry in _read(path)]


def executed_again(steps: Iterable[Executed]) -> int:
    """How many executions were repetitions of a global step that had been executed before."""
    return sum(count - 1 for count in Counter(step.global_step for step in steps).values())


def seconds_lost(steps: list[Executed]) -> list[float]:
    """For every interruption: seconds until training was again where it had been.

    That is from the last execution of an attempt to the first time that a later
    attempt executed the same global step: waiting, starting, loading and
    repeating all count.
    """
    attempts = sorted({step.attempt for step in steps})
    lost = []
    for attempt in attempts[:-1]:
        last = max((s for s in steps if s.attempt == attempt), key=lambda s: s.global_step)
        again = [s.at for s in steps if s.attempt > attempt and s.global_step >= last.global_step]
        if again:
            lost.append((min(again) - last.at).total_seconds())
    return lost


def _read(path: Path) -> list[Executed]:
    attempt = int(path.stem)
    entries = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            pid, step, at = line.split()
            entries.append(Executed(attempt, int(pid), int(step), datetime.fromisoformat(at)))
    return entries


TRAIN = "train"


@dataclass(frozen=True)
class RunFacts:
    """One run of the demo. ``step_log`` is the folder that its trainer writes to."""

    store: Store
    run: str
    step_log: Path

    def steps(self, attempt: int | None = None) -> list[Executed]:
        """Every step that was executed, by any attempt or by one."""
        return [step for step in read_steps(self.step_log) if attempt in (None, step.attempt)]

    def last_step(self) -> Executed:
        """The step that was executed last; the process that did it is the trainer."""
        return self.steps()[-1]

    def newest_commit(self, attempt: int) -> CheckpointRef | None:
        """The newest checkpoint that this attempt of the training step has committed."""
        layout = LineageLayout(lineage_of(self.run, TRAIN))
        found = (layout.parse_checkpoint(info.key) for info in self.store.list(layout.manifests))
        return next((ref for ref in found if ref and ref.attempt == attempt), None)

    def manifest(self, checkpoint: CheckpointRef) -> CheckpointManifest:
        """The manifest of a committed checkpoint."""
        key = LineageLayout(checkpoint.lineage).manifest(checkpoint.attempt, checkpoint.global_step)
        return read_record(self.store, key, CheckpointManifest)

    def training(self) -> list[Attempt]:
        """All attempts of the training step."""
        return step_attempts(self.store, self.run, TRAIN)

    def attempts_by_step(self) -> dict[str, int]:
        """How often each step was tried."""
        return {step: len(attempts) for step, attempts in all_attempts(self.store, self.run).items()}

    def finished(self, step: str) -> AttemptEnd:
        """The end of the attempt that finished a step; `PromiseBrokenError` if none did."""
        for attempt in reversed(step_attempts(self.store, self.run, step)):
            if attempt.end and attempt.end.outcome == Outcome.DONE:
                return attempt.end
        raise PromiseBrokenError(f"run {self.run}: step {step} has no result")

    def model_digest(self) -> str:
        """SHA-256 of the model's bytes as they lie in storage now, not as anybody recorded them."""
        output = next(output for output in self.finished(TRAIN).outputs if output.name == "model")
        return hashlib.sha256(self.store.read(output.key)).hexdigest()

    def output_value(self, step: str, name: str) -> str:
        """Value of an output parameter of a finished step."""
        return next(output.value or "" for output in self.finished(step).outputs if output.name == name)

    def skipping_event(self) -> Event | None:
        """The event that says a checkpoint was passed over while loading."""
        events = read_events(self.store, self.run)
        return next((event for event in events if event.name == "checkpoint.skipped"), None)
