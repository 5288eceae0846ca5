"""Builds title and description of a Workflow, which Argo's pages render as Markdown.

Argo's list cuts a description after some twenty characters, so its first words
say what is the matter. Pure functions of what was read.
"""

import re
from collections import Counter
from collections.abc import Sequence

from tiphys.lineage.training_progress import describe_step
from tiphys.records import AttemptEndOutcome, TrainingProgress, task_name
from tiphys_controller.kubernetes.events.run_log import AttemptKey, AttemptOutcome, RunLog
from tiphys_controller.kubernetes.workflow_view import SubmissionRef, WorkflowView

_LONGEST_LIST = 6
_LONGEST_REASON = 300
_PLAIN = str.maketrans("[]<>`", "()‹›'")
_WAIT = re.compile(r"(?<!\d)(?P<gpus>\d+ [^;,]{1,60}) asked.*; position (?P<position>\d+)", re.DOTALL)
"""What the scheduler says of a request that waits."""
_MAX_SEARCHED_CHARACTERS = 2000
"""The search takes quadratic time, and a tenant may write any message into its Workflow."""


def describe_workflow(
    workflow: WorkflowView,
    submission_ref: SubmissionRef,
    log: RunLog,
    resume_command: str,
    trainings: Sequence[tuple[str, TrainingProgress]] = (),
) -> dict[str, str]:
    """``title`` and ``description`` of a Workflow.

    ``trainings`` are the newest reports of its running trainings, by step.
    """
    number = f" (submission {submission_ref.submission})" if submission_ref.submission > 1 else ""
    parts = [
        _describe_state(workflow, submission_ref, log, resume_command, trainings),
        _describe_progress(submission_ref, log),
        f"Run `{submission_ref.run}` of pipeline `{workflow.pipeline}`, submission {submission_ref.submission}.",
    ]
    return {"title": f"{submission_ref.run}{number}", "description": " ".join(part for part in parts if part)}


def describe_refused_workflow(workflow: WorkflowView) -> dict[str, str]:
    """``title`` and ``description`` of a Workflow that ended before it became a submission.

    `argo resubmit` copies the texts of the Workflow that it repeats, and they are not true of the copy.
    """
    why = _shorten(workflow.plugin_failure or workflow.message or "its first step was never reached")
    return {
        "title": workflow.name,
        "description": f"{workflow.phase}: {why}. This Workflow of pipeline `{workflow.pipeline}` is part of no run.",
    }


def _describe_state(
    workflow: WorkflowView,
    submission_ref: SubmissionRef,
    log: RunLog,
    resume_command: str,
    trainings: Sequence[tuple[str, TrainingProgress]],
) -> str:
    """What is the matter, in the words that matter most first."""
    if workflow.finished and workflow.phase == "Succeeded":
        return "Succeeded."
    if workflow.finished and workflow.shutdown:
        return f"Stopped: resume with {resume_command}."
    if workflow.finished:
        return f"{workflow.phase}: {_describe_failure(workflow, submission_ref, log)}; resume with {resume_command}."
    if workflow.shutdown:
        return f"Stopping: then resume with {resume_command}."
    if trainings:
        (step, progress), *others = trainings
        more = f" and {len(others)} more" if others else ""
        commit = f", no commit {'since' if progress.checkpoint_at else 'yet'}, because" if progress.hindrance else ""
        why = f"{commit} {_shorten(progress.hindrance)}" if commit else ""
        return f"Training: {describe_step(progress)} ({log.step_name(step)}{more}){why}."
    if workflow.waits:
        wait, message = min(workflow.waits.items())
        known = _WAIT.search(message[:_MAX_SEARCHED_CHARACTERS])
        what = f"{_shorten(known['gpus'])} at position {known['position']}" if known else "GPUs"
        return f"Waits for {what}: {wait.step}, {_shorten(message)}."
    return ""


def _describe_failure(workflow: WorkflowView, submission_ref: SubmissionRef, log: RunLog) -> str:
    """The last failed attempt with its own words, or else what the plugin or Argo says."""
    done = {step for (step, _), end in log.attempt_outcomes.items() if end.outcome is AttemptEndOutcome.DONE}
    failed = [(step, end) for (step, _), end in _failed_attempts(submission_ref, log) if step not in done]
    if failed:
        step, end = failed[-1]
        message = _shorten(end.message or (end.cause.display_name if end.cause else "failed"))
        about_program = message.removeprefix("the program ")
        name = log.step_name(step)
        return f"{name}: {message}" if about_program == message else f"{name} {about_program}"
    return _shorten(workflow.plugin_failure or workflow.message or "without a message")


def _describe_progress(submission_ref: SubmissionRef, log: RunLog) -> str:
    done = _group_by_task(
        {step for (step, _), end in log.attempt_outcomes.items() if end.outcome is AttemptEndOutcome.DONE}
    )
    under_way = [
        f"{log.step_name(step)} (attempt {number})" if number > 1 else log.step_name(step)
        for step, number in open_attempts(submission_ref, log)
    ]
    sentences = [f"Under way: {_join_names(under_way)}."] if under_way else []
    sentences += [f"Done: {_join_names(done)}."] if done else []
    return " ".join([*sentences, *_describe_last_failure(submission_ref, log)])


def open_attempts(submission_ref: SubmissionRef, log: RunLog) -> list[AttemptKey]:
    """Attempts of this submission without an end."""
    return sorted(
        attempt
        for attempt, opened in log.attempt_starts.items()
        if attempt not in log.attempt_outcomes and opened.submission == submission_ref.submission
    )


def _group_by_task(steps: set[str]) -> list[str]:
    """Task names; items of a fan-out are counted, because their step ids mean nothing to people."""
    tasks = Counter(task_name(step) for step in sorted(steps))
    return [task if task in steps else f"{task} ({count} items)" for task, count in tasks.items()]


def _failed_attempts(submission_ref: SubmissionRef, log: RunLog) -> list[tuple[AttemptKey, AttemptOutcome]]:
    """Failed attempts of this submission, in the order of their ends."""
    failed = [
        (attempt, end)
        for attempt, end in log.attempt_outcomes.items()
        if end.outcome is AttemptEndOutcome.FAILED
        and (opened := log.attempt_starts.get(attempt)) is not None
        and opened.submission == submission_ref.submission
    ]
    return sorted(failed, key=lambda entry: (entry[1].ended_at, entry[0]))


def _describe_last_failure(submission_ref: SubmissionRef, log: RunLog) -> list[str]:
    failed = _failed_attempts(submission_ref, log)
    if not failed:
        return []
    (step, number), end = failed[-1]
    cause = f" by {end.cause.display_name}" if end.cause else ""
    return [f"Attempt {number} of {log.step_name(step)} ended{cause}."]


def _shorten(text: str) -> str:
    """One line without full stop, links and HTML, of a limited length: a program may have written it."""
    line = " ".join(text.translate(_PLAIN).split()).rstrip(".")
    return line if len(line) <= _LONGEST_REASON else f"{line[: _LONGEST_REASON - 1]}…"


def _join_names(names: list[str]) -> str:
    more = len(names) - _LONGEST_LIST
    return ", ".join(names[:_LONGEST_LIST]) + (f" and {more} more" if more > 0 else "")
