"""What there is to tell about a Workflow, as sentences for the Events beside it: a pure function of what was read.

What Argo shows by itself is left out: that a step has begun, and that it is done.

Title and description of a Workflow for Argo's pages (Markdown): where its run stands and what to do next. Pure.
"""

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import NamedTuple

from tiphys.kube import Object
from tiphys.records import AlertDone, Event, Outcome
from tiphys_controller.kubernetes.events.run_log import AttemptKey, Ended, Opened, RunLog
from tiphys_controller.kubernetes.workflow_view import Place, SeenWorkflow

_TOLD_EVENTS = {
    "checkpoint.skipped": ("CheckpointSkipped", True),
    "checkpoint.save_failed": ("CheckpointNotSaved", True),
    "run.resumed": ("RunResumed", False),
    "lease.forced": ("LeaseForced", True),
}


class News(NamedTuple):
    """One thing to tell. ``key`` is the same whenever it is found again."""

    key: str
    reason: str
    """PascalCase, as Kubernetes wants it."""
    message: str
    warning: bool = False
    at: datetime | None = None
    """When it was recorded; None for what the Workflow object itself says."""


def news_of(workflow: SeenWorkflow, place: Place | None, log: RunLog | None, resume: str) -> list[News]:
    """Everything there is to tell, told before or not. ``resume`` is the command that goes on with the run."""
    told = [*_of_attempts(place, log), *_of_events(place, log)] if place and log else []
    return [*sorted(told, key=_recorded), *_of_workflow(workflow, resume)]


def deleted(resume: str) -> News:
    """The Workflow was deleted before it was over."""
    return News(
        "deleted", "WorkflowDeleted", f"the Workflow was deleted; what is finished is kept: go on with {resume}", True
    )


def agent_deleted(pod: str, uid: str, why: str) -> News:
    """Its agent pod did not work, and was deleted."""
    message = f"agent pod {pod} did not work ({why}) and was deleted, so that Argo makes another"
    return News(f"agent/{uid}", "AgentPodDeleted", message, warning=True)


def leaving(lease: Object) -> News:
    """A training was asked to save and go; ``lease`` as the ledger stores it."""
    asked, deadline = (datetime.fromisoformat(lease["leaving"][when]) for when in ("askedAt", "deadline"))
    message = (
        f"{lease['step']}: attempt {lease['attempt']} was asked to save and go, because another step needs its "
        f"{lease['gpus']} GPUs and goes before it; it is ended at {deadline:%H:%M:%S %Z} at the latest"
    )
    return News(f"leaving/{lease['id']}/{lease['leaving']['askedAt']}", "AttemptPreempted", message, True, asked)


def resumed_by_itself(submission: int, why: str) -> News:
    """The controller has made the next submission without being asked."""
    return News(f"automatic/{submission}", "AutoResumed", f"submission {submission} goes on by itself: {why}")


def would_resume(submission: int, why: str) -> News:
    """The same, if it were allowed to."""
    message = f"submission {submission} would go on by itself, were this no dry run: {why}"
    return News(f"automatic/{submission}/dry-run", "WouldResume", message)


def not_resumed(submission: int, reason: str, why: str, resume: str) -> News:
    """The controller does not go on after this submission, or not now."""
    message = f"not resumed by itself: {why}; {resume} does it now"
    return News(f"not-resumed/{submission}/{reason}", f"AutoResume{reason}", message, warning=True)


def alert_handled(alert: str, name: str, done: AlertDone) -> News:
    """What came of an alert about this run."""
    return News(f"alert/{alert}", "AlertHandled", f"alert {name or alert}: {done.outcome}: {done.message}")


def _recorded(news: News) -> datetime:
    return news.at or datetime.max.replace(tzinfo=UTC)


def _of_attempts(place: Place, log: RunLog) -> Iterator[News]:
    for attempt, opened in sorted(log.opened.items()):
        if opened.submission == place.submission:
            yield from _opened(attempt, opened)
            if (ended := log.ended.get(attempt)) is not None:
                yield from _ended(attempt, ended)


def _opened(attempt: AttemptKey, opened: Opened) -> Iterator[News]:
    step, number = attempt
    if number > 1 or opened.starts_from:
        start = f"from {opened.starts_from}" if opened.starts_from else "from the beginning"
        yield News(
            f"opened/{step}/{number}", "AttemptStarted", f"{step}: attempt {number} starts {start}", at=opened.at
        )
    for index, sentence in enumerate(opened.skipped):
        key = f"skipped/{step}/{number}/{index}"
        yield News(key, "CheckpointSkipped", f"{step}: {sentence}", warning=True, at=opened.at)


def _ended(attempt: AttemptKey, ended: Ended) -> Iterator[News]:
    step, number = attempt
    if ended.outcome is Outcome.DONE:
        return
    cause = f" by {ended.cause.value.replace('_', ' ')}" if ended.cause else ""
    told = f": {ended.message}" if ended.message else ""
    how = "was taken away" if ended.outcome is Outcome.FENCED else "ended"
    reason = "AttemptFenced" if ended.outcome is Outcome.FENCED else "AttemptFailed"
    message = f"{step}: attempt {number} {how}{cause}{told}"
    yield News(f"ended/{step}/{number}", reason, message, warning=True, at=ended.at)


def _of_events(place: Place, log: RunLog) -> Iterator[News]:
    for number, events in sorted(log.events.items()):
        for index, event in enumerate(events):
            if event.name in _TOLD_EVENTS and _submission(event, log) == place.submission:
                reason, warning = _TOLD_EVENTS[event.name]
                about = f"{event.step}: " if event.step else ""
                yield News(f"event/{number}/{index}", reason, f"{about}{event.message}", warning, event.at)


def _submission(event: Event, log: RunLog) -> int | None:
    """The submission in which it happened; None where nothing says."""
    if "submission" in event.data:
        return int(event.data["submission"])
    opened = log.opened.get((event.step, event.attempt or 0))
    return opened.submission if opened else None


def _of_workflow(workflow: SeenWorkflow, resume: str) -> Iterator[News]:
    for wait, message in sorted(workflow.waits.items()):
        # Each reason once for each attempt: the message of the node has the numbers of this moment.
        yield News(f"waits/{wait.node}/{wait.reason}", wait.reason, f"{wait.step} waits for GPUs: {message}")
    if workflow.shutdown:
        how = "terminated" if workflow.shutdown == "Terminate" else "stopped"
        message = f"the Workflow is being {how}; what is finished is kept: go on with {resume} once it has ended"
        yield News(f"shutdown/{workflow.shutdown}", "WorkflowStopped", message)
    if workflow.finished and workflow.phase != "Succeeded":
        why = f": {workflow.message}" if workflow.message else ""
        yield News(
            "failed",
            "RunFailed",
            f"it ended as {workflow.phase}{why}; what is missing runs with {resume}",
            warning=True,
        )


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
