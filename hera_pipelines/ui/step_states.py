"""Says in a word what became of each step of a run, and in a sentence what is the matter with the run."""

import shlex
from collections.abc import Iterator, Sequence
from datetime import datetime
from enum import StrEnum

from tiphys_controller.run_phase import RunPhase
from tiphys_controller.runs import AttemptDetail, RunDetail, StepDetail

from tiphys.lineage.training_progress import describe_training_progress


class StepDisplayState(StrEnum):
    """What became of a step, in the words of the page."""

    TAKEN_OVER = "taken over"
    """Its result is that of another run, or it was found in the cache."""
    RESUMED = "resumed"
    """It was finished by a later submission than that in which it began."""
    DONE = "done"
    RUNNING = "running"
    WAITING = "waiting"
    """It waits for the steps before it, for GPUs, or for its next attempt."""
    FAILED = "failed"
    STOPPED = "stopped"
    """A person stopped the run while it ran."""
    INTERRUPTED = "interrupted"
    """It ran when its Workflow was lost."""
    UNKNOWN = "unknown"
    """It ran when its Workflow was last seen."""
    NEVER_STARTED = "never started"
    PLAIN = "plain"
    """It keeps no record."""


_DONE = "done"
_STOPPED = "stopped"
_OPEN = ""


def find_step_state(step: StepDetail, phase: RunPhase) -> StepDisplayState:
    if step.kind == "plain":
        return StepDisplayState.PLAIN
    is_running = phase is RunPhase.RUNNING
    outcomes = [attempt.outcome for attempt in step.attempts]
    if is_running and _OPEN in outcomes:
        return StepDisplayState.RUNNING
    if step.done or _is_done(step):
        if not outcomes:
            return StepDisplayState.TAKEN_OVER if step.taken_over else StepDisplayState.NEVER_STARTED
        submissions = {attempt.submission for attempt in step.attempts}
        return StepDisplayState.RESUMED if len(submissions) > 1 else StepDisplayState.DONE
    if is_running:
        return StepDisplayState.WAITING
    newest = set(_newest_outcomes(step).values()) - {_DONE}
    if not newest:
        return StepDisplayState.INTERRUPTED if outcomes else StepDisplayState.NEVER_STARTED
    if newest - {_STOPPED, _OPEN}:
        return StepDisplayState.FAILED
    if _OPEN in newest:
        return StepDisplayState.UNKNOWN if phase is RunPhase.UNKNOWN else StepDisplayState.INTERRUPTED
    return StepDisplayState.STOPPED


def _newest_outcomes(step: StepDetail) -> dict[str, str]:
    """Outcome of the newest attempt of the step, or of each of its items."""
    return {attempt.step: attempt.outcome for attempt in step.attempts}


def _is_done(step: StepDetail) -> bool:
    return set(_newest_outcomes(step).values()) == {_DONE} and all(item.done for item in step.items)


def describe_matter(detail: RunDetail, now: datetime) -> str:
    """One sentence: what is the matter with the run, or that nothing is."""
    summary = detail.summary
    match summary.phase:
        case RunPhase.SUCCEEDED:
            failures = sum(attempt.outcome not in (_DONE, _OPEN) for step in detail.steps for attempt in step.attempts)
            survived = f", although {_count(failures, 'attempt')} ended early" if failures else ""
            return f"Finished: {_describe_done(summary.steps_total)}{survived}."
        case RunPhase.RUNNING:
            return _describe_running(detail, now)
        case RunPhase.FAILED:
            return "; ".join(_describe_failures(detail.steps)) or f"Failed: {summary.reason}."
        case RunPhase.STOPPED:
            return f"Stopped by a person, {_describe_progress(detail)} done."
        case RunPhase.INTERRUPTED:
            return f"Interrupted: {summary.reason}."
        case RunPhase.UNKNOWN:
            return f"Nobody knows whether it still runs: {summary.reason}."


def _describe_running(detail: RunDetail, now: datetime) -> str:
    training = [
        f"{attempt.name}: {_describe_training(attempt, now)}"
        for step in detail.steps
        for attempt in step.attempts
        if attempt.outcome == _OPEN and (attempt.training_progress or attempt.unprotected)
    ]
    return f"Running, {_describe_progress(detail)} done" + (f"; {'; '.join(training[:3])}." if training else ".")


def _describe_progress(detail: RunDetail) -> str:
    return f"{detail.summary.steps_done} of {_count(detail.summary.steps_total, 'step')}"


def _describe_training(attempt: AttemptDetail, now: datetime) -> str:
    progress = attempt.training_progress
    return describe_training_progress(progress, now) if progress else attempt.unprotected


def _describe_failures(steps: Sequence[StepDetail]) -> Iterator[str]:
    for step in steps:
        last = step.attempts[-1] if step.attempts else None
        if not step.done and last is not None and last.outcome not in (_DONE, _OPEN):
            cause = f" by {last.cause.replace('_', ' ')}" if last.cause else ""
            yield f"{last.name or step.name} {last.outcome} in attempt {last.attempt}{cause}: {last.message}"


def suggest_command(detail: RunDetail) -> tuple[str, str]:
    """What to type next, and what it would do; two empty texts if nothing is to be done."""
    match detail.summary.phase:
        case RunPhase.FAILED | RunPhase.STOPPED | RunPhase.INTERRUPTED:
            missing = [step.name for step in detail.steps if not step.done and step.kind != "plain"]
            return _command("resume", detail), f"It runs what is missing{': ' if missing else ''}{', '.join(missing)}."
        case RunPhase.UNKNOWN:
            return _command("plan", detail), "It shows what a resume would run."
        case RunPhase.RUNNING:
            return _command("attach", detail), "It follows the run in a terminal."
    return "", ""


def _command(verb: str, detail: RunDetail) -> str:
    return shlex.join(["tiphys", verb, detail.summary.run, "--store", detail.store])


def _describe_done(steps: int) -> str:
    return "the only step is done" if steps == 1 else f"all {_count(steps, 'step')} are done"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
