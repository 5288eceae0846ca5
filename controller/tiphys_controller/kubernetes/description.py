"""Title and description of a Workflow for Argo's pages (Markdown): where its run stands and what to do next. Pure."""

from collections import Counter

from tiphys.records import Outcome
from tiphys_controller.kubernetes.place import Place
from tiphys_controller.kubernetes.run_log import RunLog
from tiphys_controller.kubernetes.seen import SeenWorkflow

_LONGEST_LIST = 6


def narration(workflow: SeenWorkflow, place: Place, log: RunLog, resume: str) -> dict[str, str]:
    """``title`` and ``description``. ``resume`` is the command that goes on with the run."""
    number = f" (submission {place.submission})" if place.submission > 1 else ""
    parts = [
        f"Run `{place.run}` of pipeline `{workflow.pipeline}`, submission {place.submission}.",
        _standing(place, log),
        _next(workflow, resume),
    ]
    return {"title": f"{place.run}{number}", "description": " ".join(part for part in parts if part)}


def _standing(place: Place, log: RunLog) -> str:
    done = _by_task({step for (step, _), end in log.ended.items() if end.outcome is Outcome.DONE})
    open_attempts = sorted(
        attempt
        for attempt, opened in log.opened.items()
        if attempt not in log.ended and opened.submission == place.submission
    )
    under_way = [f"{step} (attempt {number})" if number > 1 else step for step, number in open_attempts]
    sentences = [f"Done: {_listed(done)}."] if done else []
    sentences += [f"Under way: {_listed(under_way)}."] if under_way else []
    return " ".join([*sentences, *_last_failure(place, log)])


def _by_task(steps: set[str]) -> list[str]:
    """Items of a fan-out are counted: their step ids tell nobody anything."""
    tasks = Counter(step.partition(".")[0] for step in sorted(steps))
    return [task if task in steps else f"{task} ({count} items)" for task, count in tasks.items()]


def _last_failure(place: Place, log: RunLog) -> list[str]:
    failed = [
        (end.at, step, number, end)
        for (step, number), end in log.ended.items()
        if end.outcome is Outcome.FAILED
        and (opened := log.opened.get((step, number))) is not None
        and opened.submission == place.submission
    ]
    if not failed:
        return []
    _, step, number, end = max(failed, key=lambda one: one[:3])
    cause = f" by {end.cause.value.replace('_', ' ')}" if end.cause else ""
    return [f"Attempt {number} of {step} ended{cause}."]


def _next(workflow: SeenWorkflow, resume: str) -> str:
    if workflow.finished and workflow.phase != "Succeeded":
        return f"It ended as {workflow.phase}: go on with {resume}."
    if workflow.finished:
        return "It succeeded."
    return f"It is being stopped; then go on with {resume}." if workflow.shutdown else ""


def _listed(names: list[str]) -> str:
    more = len(names) - _LONGEST_LIST
    return ", ".join(names[:_LONGEST_LIST]) + (f" and {more} more" if more > 0 else "")
