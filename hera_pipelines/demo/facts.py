"""What the demo reads to see whether its promises were kept.

Everything is asked of storage and of the step log, nothing of the processes
that the demo started: what counts is what is left when they are gone.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from hera_pipelines.demo.engine import PromiseBrokenError
from hera_pipelines.demo.steplog import Executed, read_steps
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
