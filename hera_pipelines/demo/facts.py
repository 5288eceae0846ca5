"""Measurements of the demo's runs, read from storage and from the step log.

The demo trusts only what remains when its processes are gone. A killed trainer
cannot report the step that it reached, and its last checkpoint is older. So the
trainer writes one line per executed step into a file of its attempt before the
next step begins; the page cache keeps the line when the process is killed. Only
the demo reads this step log; a resume does not depend on it.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hera_pipelines.demo.fault_injection import PromiseBrokenError
from tiphys.protocol import environment
from tiphys.records import AttemptEnd, AttemptEndOutcome, CheckpointManifest, CheckpointRef, Event
from tiphys.store import (
    Attempt,
    LineageLayout,
    Store,
    lineage_name,
    read_all_attempts,
    read_events,
    read_record,
    read_step_attempts,
)


class ExecutedStep(NamedTuple):
    """One execution of one global step."""

    attempt: int
    pid: int
    global_step: int


@contextmanager
def open_step_log(folder: Path | None) -> Iterator[Callable[[int], None]]:
    """Yield a function that records that this process executed a global step; without a folder, it writes nothing."""
    if folder is None:
        yield lambda _: None
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{int(os.environ.get(environment.ATTEMPT, '0')):04d}.log"
    with path.open("ab", buffering=0) as file:

        def append(global_step: int) -> None:
            file.write(f"{os.getpid()} {global_step}\n".encode())

        yield append


def read_steps(folder: Path) -> list[ExecutedStep]:
    """Read all executed steps, attempt by attempt; a line that a kill cut short is skipped."""
    return [entry for path in sorted(folder.glob("*.log")) for entry in _read_log(path)]


def count_repeated_steps(steps: Iterable[ExecutedStep]) -> int:
    """Number of executions that repeated an already executed global step."""
    return sum(count - 1 for count in Counter(step.global_step for step in steps).values())


def _read_log(path: Path) -> list[ExecutedStep]:
    lines = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [ExecutedStep(int(path.stem), int(pid), int(step)) for pid, step in lines]


TRAIN_STEP = "train"


@dataclass(frozen=True)
class DemoRunState:
    """One run of the demo. ``step_log`` is the folder of its step logs."""

    store: Store
    run: str
    step_log: Path

    def executed_steps(self, attempt: int | None = None) -> list[ExecutedStep]:
        """Steps that ``attempt``, or by default any attempt, executed."""
        return [step for step in read_steps(self.step_log) if attempt in (None, step.attempt)]

    def last_step(self) -> ExecutedStep:
        """The step that was executed last; its ``pid`` is that of the trainer."""
        return self.executed_steps()[-1]

    def newest_commit(self, attempt: int) -> CheckpointRef | None:
        """The newest checkpoint that this attempt of the training step has committed."""
        layout = LineageLayout(lineage_name(self.run, TRAIN_STEP))
        refs = (layout.parse_checkpoint(info.key) for info in self.store.list(layout.manifests))
        return next((ref for ref in refs if ref and ref.attempt == attempt), None)

    def manifest(self, checkpoint: CheckpointRef) -> CheckpointManifest:
        """The manifest of a committed checkpoint."""
        key = LineageLayout(checkpoint.lineage).manifest(checkpoint.attempt, checkpoint.global_step)
        return read_record(self.store, key, CheckpointManifest)

    def training_attempts(self) -> list[Attempt]:
        """All attempts of the training step."""
        return read_step_attempts(self.store, self.run, TRAIN_STEP)

    def attempts_by_step(self) -> dict[str, int]:
        """Number of attempts of each step."""
        return {step: len(attempts) for step, attempts in read_all_attempts(self.store, self.run).items()}

    def finished_attempt(self, step: str) -> AttemptEnd:
        """End record of the attempt that finished ``step``; raises `PromiseBrokenError` if none did."""
        for attempt in reversed(read_step_attempts(self.store, self.run, step)):
            if attempt.end and attempt.end.outcome == AttemptEndOutcome.DONE:
                return attempt.end
        raise PromiseBrokenError(f"run {self.run}: step {step} has no result")

    def model_digest(self) -> str:
        """SHA-256 of the model's bytes in storage, computed now and not taken from a record."""
        output = next(output for output in self.finished_attempt(TRAIN_STEP).outputs if output.name == "model")
        return hashlib.sha256(self.store.read(output.key)).hexdigest()

    def output_value(self, step: str, name: str) -> str:
        """Value of an output parameter of a finished step."""
        return next(output.value or "" for output in self.finished_attempt(step).outputs if output.name == name)

    def checkpoint_skipped_event(self) -> Event | None:
        """The event that a restore skipped a checkpoint, if there is one."""
        events = read_events(self.store, self.run)
        return next((event for event in events if event.name == "checkpoint.skipped"), None)
