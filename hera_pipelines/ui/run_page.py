"""Reads what the page of one run shows. Nothing is computed here: each part is what a command of ``tiphys`` prints."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from urllib.parse import unquote, urlsplit

from tiphys_controller.goodput import FailureCost, StepTimeUsage, TimeUsage, measure_time_usage
from tiphys_controller.run_phase import RunPhase, find_last_sign_of_life
from tiphys_controller.runs import AttemptDetail, RunDetail, StepDetail, StepOutput, SubmissionDetail, describe_run
from tiphys_controller.submit.submitter import Submitter, find_obstacles

from hera_pipelines.draw.report_html import ReportChart, format_time, recovery_chart, summarize_usage, time_chart
from hera_pipelines.ui.dag_picture import MAX_TASKS, DagPicture, place_tasks
from hera_pipelines.ui.log_page import AttemptLogs, read_traceback
from hera_pipelines.ui.step_states import StepDisplayState, describe_matter, find_step_state, suggest_command
from tiphys.errors import NotFoundError, StoreError
from tiphys.lineage.run_history import RunHistory
from tiphys.records import AttemptEndOutcome, Preemption
from tiphys.store import Store, Submission

MAX_ATTEMPTS = 100
"""Most attempts, and most outputs, of a page: the records of no others are read."""
MAX_MEASURED = 200
"""Most attempts whose times are measured: the newest of each step."""
_SHARED_FOR = timedelta(seconds=2)
CHARTS = {"times": time_chart, "recoveries": recovery_chart}
"""Pictures of the times of a run, by the name in their address."""


@dataclass(frozen=True)
class StepView:
    """A step with what became of it."""

    detail: StepDetail
    state: StepDisplayState

    @property
    def items_done(self) -> int:
        return sum(item.done for item in self.detail.items)


@dataclass(frozen=True)
class CauseCost:
    """What one cause of failure cost; ``share`` is its part of all that failures lost."""

    cause: str
    cost: FailureCost
    share: float

    @property
    def lost_hours(self) -> str:
        """GPU-hours lost; hours of a run without GPUs."""
        hours = self.cost.lost / 3600
        return f"{hours:,.2f}" if hours >= 0.005 or not hours else "< 0.01"


@dataclass(frozen=True)
class OutputView:
    """An output of a step, with the command that copies it."""

    output: StepOutput
    command: str


@dataclass(frozen=True)
class PreemptionView:
    """An attempt that had to go, with what it cost, in words."""

    attempt: AttemptDetail
    preemption: Preemption
    run: str
    """Run that got its GPUs; empty if none did."""
    reason: str
    """The step that got them, or why it had to go."""
    saved: str
    lost: str

    @classmethod
    def from_attempt(cls, attempt: AttemptDetail, preemption: Preemption) -> "PreemptionView":
        committed, seconds = preemption.committed, preemption.seconds_lost
        reason = preemption.for_step_name or preemption.for_step or preemption.reason
        if preemption.nodes:
            reason = f"{', '.join(preemption.nodes)} fail{'s' if len(preemption.nodes) == 1 else ''} or will be removed"
        return cls(
            attempt=attempt,
            preemption=preemption,
            run="" if preemption.nodes else preemption.for_run,
            reason=(reason or "a request that no longer waited") + (", to other nodes" if preemption.moves else ""),
            saved=f"checkpoint {committed.attempt}-{committed.global_step}" if committed else "no checkpoint",
            lost="not known" if seconds is None else _describe_loss(seconds, preemption.gpus),
        )

    @property
    def seconds_to_go(self) -> float:
        """From the request until all its pods had ended."""
        return max(0.0, (self.preemption.gone_at - self.preemption.asked_at).total_seconds())


def _describe_loss(seconds: float, gpus: int) -> str:
    if not seconds:
        return "nothing"
    return f"{format_time(seconds)} of {gpus} GPU{'' if gpus == 1 else 's'}" if gpus else format_time(seconds)


@dataclass(frozen=True)
class RunView:
    """Everything on the page of a run, or of one of its submissions."""

    detail: RunDetail
    last_submission: Submission | None
    """The newest submission; None if the run was never submitted."""
    matter: str
    command: str
    """What to type next; empty if nothing is to be done."""
    command_effect: str
    steps: tuple[StepView, ...]
    obstacles: tuple[str, ...]
    """What its steps wait for on the cluster, one sentence each."""
    picture: DagPicture | None
    """None for a pipeline of too many tasks."""
    submission: SubmissionDetail | None
    """The submission whose attempts are shown; None for all."""
    attempts: tuple[AttemptDetail, ...]
    """The newest first."""
    page: int
    """Which `MAX_ATTEMPTS` attempts, from 1; each step's newest are on the first page."""
    total_attempts: int
    """Of all submissions."""
    preemptions: tuple[PreemptionView, ...]
    """Those of ``attempts``."""
    figures: tuple[tuple[str, str], ...]
    costs: tuple[CauseCost, ...]
    """The most costly cause first."""
    has_gpus: bool
    outputs: tuple[OutputView, ...]
    """Of the attempts on this page."""
    outputs_page: int
    more_outputs: int
    """Those on later pages of the outputs."""
    charts: tuple[str, ...]
    """Names of the `CHARTS` that have something to show."""
    has_lineage: bool
    failed_attempt: AttemptDetail | None
    """The newest attempt of a step, of a run that failed, that had no better one; None if there is none."""
    traceback: str
    """What the program of that attempt printed last; empty if that is not known."""
    damaged: tuple[str, ...]
    read_at: datetime

    @property
    def states(self) -> dict[str, StepDisplayState]:
        return {step.detail.name: step.state for step in self.steps}

    @property
    def older_attempts(self) -> int:
        """Attempts on later pages."""
        return max(0, self.total_attempts - self.page * MAX_ATTEMPTS)

    @property
    def unmeasured_attempts(self) -> int:
        """Attempts that the figures do not count."""
        return max(0, self.total_attempts - MAX_MEASURED)

    @property
    def is_live(self) -> bool:
        """Whether the page may change by itself."""
        return self.detail.summary.phase.value == "Running"


class UsageReader:
    """Measures the times of runs; a page and its pictures, which are loaded after it, share one measurement."""

    def __init__(self, clock: Callable[[], datetime], submitter: Submitter | None = None) -> None:
        self._clock = clock
        self._submitter = submitter
        self._newest: tuple[str, datetime, TimeUsage] | None = None

    def measure(self, history: RunHistory) -> TimeUsage:
        """The times of the newest `MAX_MEASURED` attempts of a run, as they were at most `_SHARED_FOR` ago."""
        now, newest = self._clock(), self._newest
        if newest is not None and newest[0] == history.run and abs(now - newest[1]) < _SHARED_FOR:
            return newest[2]
        lost_at = find_last_sign_of_life(history.last_submission, self._submitter)
        usage = measure_time_usage(history, now, slice(MAX_MEASURED), lost_at)
        self._newest = history.run, now, usage
        return usage


def open_history(store: Store, run: str, most: int = MAX_MEASURED) -> RunHistory:
    """The history of a run for a page, with the newest ``most`` batches of events."""
    return RunHistory.for_display(store, run, most)


def read_run_view(
    store: Store,
    usages: UsageReader,
    submitter: Submitter | None,
    run: str,
    number: int | None,
    page: int,
    outputs_page: int,
    now: datetime,
    find_logs: AttemptLogs = lambda *_: (),
) -> RunView:
    """Read the page of a run.

    ``page`` says which `MAX_ATTEMPTS` attempts are shown, from 1, ``outputs_page`` which outputs of these; with
    ``number`` only the attempts of that submission. Without ``submitter`` the Workflow is not looked up.

    Raises:
        NotFoundError: there is no such run or submission.
        UsageError: Tiphys did not compile its Workflow.
        IntegrityError: a record without which nothing can be shown is damaged.
        StoreError: the store does not answer.
    """
    window = slice((page - 1) * MAX_ATTEMPTS, page * MAX_ATTEMPTS)
    history = open_history(store, run, max(MAX_MEASURED, window.stop))
    detail, usage = describe_run(history, submitter, window=window), usages.measure(history)
    attempts = sorted(
        (attempt for step in detail.steps for attempt in step.attempts if number in (None, attempt.submission)),
        key=lambda attempt: (attempt.opened_at, attempt.attempt),
        reverse=True,
    )
    steps = tuple(StepView(step, find_step_state(step, detail.summary.phase)) for step in detail.steps)
    outputs = [output for step in detail.steps for output in step.outputs][(outputs_page - 1) * MAX_ATTEMPTS :]
    command, effect = suggest_command(detail)
    failed = _find_failed_attempt(detail, attempts)
    return RunView(
        detail=detail,
        last_submission=history.last_submission,
        matter=describe_matter(detail, now),
        command=command,
        command_effect=effect,
        steps=steps,
        obstacles=_find_obstacles(submitter, detail, now),
        picture=place_tasks({step.name: step.needs for step in detail.steps}) if len(steps) <= MAX_TASKS else None,
        submission=_find_submission(detail, number),
        attempts=tuple(attempts),
        page=page,
        total_attempts=sum(step.total_attempts for step in detail.steps),
        preemptions=tuple(PreemptionView.from_attempt(ended, ended.preempted) for ended in attempts if ended.preempted),
        figures=tuple(summarize_usage(usage)),
        costs=_weigh_costs(usage.costs),
        has_gpus=any(step.gpus for step in usage.steps),
        outputs=tuple(OutputView(output, write_copy_command(store.url, output)) for output in outputs[:MAX_ATTEMPTS]),
        outputs_page=outputs_page,
        more_outputs=max(0, len(outputs) - MAX_ATTEMPTS),
        charts=tuple(name for name, draw in CHARTS.items() if draw(usage.steps).rows),
        has_lineage=any(step.detail.kind == "train" and step.detail.attempts for step in steps),
        failed_attempt=failed,
        traceback="" if failed is None else read_traceback(history, find_logs, failed.step, failed.attempt),
        damaged=tuple(dict.fromkeys((*detail.damaged, *usage.damaged))),
        read_at=now,
    )


def _find_failed_attempt(detail: RunDetail, newest_first: Sequence[AttemptDetail]) -> AttemptDetail | None:
    if detail.summary.phase is not RunPhase.FAILED:
        return None
    newest = {attempt.step: attempt for attempt in reversed(newest_first)}
    failed = [attempt for attempt in newest.values() if attempt.outcome == AttemptEndOutcome.FAILED]
    return max(failed, key=lambda attempt: attempt.opened_at, default=None)


def _find_obstacles(submitter: Submitter | None, detail: RunDetail, now: datetime) -> tuple[str, ...]:
    workflow = detail.summary.workflow
    try:
        return tuple(obstacle.reason for obstacle in find_obstacles(submitter, [workflow], now)[workflow])
    except StoreError as error:
        return (f"what its steps wait for is not known: {error}",)


def find_chart(name: str) -> Callable[[Sequence[StepTimeUsage]], ReportChart]:
    """What draws the chart ``name`` of `CHARTS`.

    Raises:
        NotFoundError: there is no such chart.
    """
    if name not in CHARTS:
        raise NotFoundError(f"there is no picture {name}; there are {', '.join(CHARTS)}")
    return CHARTS[name]


def _weigh_costs(costs: Mapping[str, FailureCost]) -> tuple[CauseCost, ...]:
    total = sum(cost.lost for cost in costs.values()) or 1.0
    weighed = (CauseCost(cause, cost, cost.lost / total) for cause, cost in costs.items())
    return tuple(sorted(weighed, key=lambda row: -row.cost.lost))


def write_copy_command(url: str, output: StepOutput) -> str:
    """Command that copies an output from the store at ``url`` into the working directory."""
    source = f"{url}/{output.key}"
    if url.startswith("file:"):
        return shlex.join(["cp", *(["-r"] if output.directory else []), unquote(urlsplit(source).path), "."])
    if url.startswith("gs:"):
        return shlex.join(["gcloud", "storage", "cp", *(["-r"] if output.directory else []), source, "."])
    if url.startswith("az:"):
        place = urlsplit(source)
        container, _, blob = place.path.lstrip("/").partition("/")
        names = ["--account-name", place.netloc, "--auth-mode", "login"]
        if output.directory:
            options = ["download-batch", "--source", container, "--pattern", f"{blob}/*", "--destination", "."]
        else:
            options = ["download", "--container-name", container, "--name", blob, "--file", blob.rpartition("/")[2]]
        return shlex.join(["az", "storage", "blob", *options, *names])
    if output.directory:
        return shlex.join(["aws", "s3", "cp", "--recursive", source, output.key.rpartition("/")[2]])
    return shlex.join(["aws", "s3", "cp", source, "."])


def _find_submission(detail: RunDetail, number: int | None) -> SubmissionDetail | None:
    if number is None:
        return None
    for submission in detail.submissions:
        if submission.submission == number:
            return submission
    raise NotFoundError(f"run {detail.summary.run} has no submission {number}; it has {len(detail.submissions)}")
