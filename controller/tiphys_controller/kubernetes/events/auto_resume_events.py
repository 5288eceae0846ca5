"""Says what the loop did about a run: an Event beside its Workflow, a line in the log, and metrics."""

from collections.abc import Callable

import structlog

from tiphys.errors import TiphysError
from tiphys.records import utc_now
from tiphys.store import Store
from tiphys_controller.auto_resume.act import Attended
from tiphys_controller.auto_resume.decide import Action
from tiphys_controller.auto_resume.state import Limits, Mode, Observed, RunKey, Standing
from tiphys_controller.failure_cost import Phase, accounts
from tiphys_controller.kubernetes.auto_resume_loop import Followed
from tiphys_controller.kubernetes.events.messages import News, not_resumed, resumed_by_itself, would_resume
from tiphys_controller.kubernetes.metrics import Metrics
from tiphys_controller.kubernetes.workflow_view import SeenWorkflow
from tiphys_controller.kubernetes.writer import Writer

_NO_NEWS = ("Runs", "Succeeded", "Elsewhere", "NotAsked", "NotSureYet", "RateLimited", "NothingMissing")
_log = structlog.get_logger()


class ResumeNews:
    """A `Teller` on a cluster. Tells each thing once; the API server knows what was told before it was started."""

    def __init__(
        self,
        writer: Writer,
        stores: Callable[[str], Store],
        metrics: Metrics,
        limits: Limits,
        monotonic: Callable[[], float],
    ) -> None:
        self._writer = writer
        self._stores = stores
        self._metrics = metrics
        self._limits = limits
        self._monotonic = monotonic
        self._told: set[tuple[RunKey, str]] = set()
        self._open: set[RunKey] = set()

    def attended(self, run: Followed, attended: Attended) -> None:
        self._count(run, attended)
        news = self._news(run, attended)
        if news is None or (run.key, news.key) in self._told:
            return
        self._told.add((run.key, news.key))
        _log.info("resume.decided", namespace=run.key[0], run=run.key[1], reason=news.reason, message=news.message)
        if run.workflow is not None:
            self._tell(run.workflow, news)

    def failed(self, what: str) -> None:
        self._metrics.failures.labels(what).inc()

    def _news(self, run: Followed, attended: Attended) -> News | None:
        decision, seen = attended.decision, attended.seen
        if attended.resumed and attended.resumed.submission is not None:
            return resumed_by_itself(attended.resumed.submission, decision.message)
        if decision.action is Action.RESUME and self._limits.mode is Mode.DRY_RUN:
            return would_resume(seen.next_submission, decision.message)
        if decision.action is Action.RESUME or decision.reason in _NO_NEWS:
            return None
        command = f"`tiphys resume {run.key[1]} --store {self._stores(run.key[0]).url}`"
        return not_resumed(seen.submission, decision.reason, decision.message, command)

    def _tell(self, workflow: SeenWorkflow, news: News) -> None:
        try:
            self._writer.tell(workflow, news)
        except TiphysError as error:  # what was done stays done, and is told by the run's own events
            _log.warning("resume.not_told", namespace=workflow.namespace, workflow=workflow.name, error=str(error))

    def _count(self, run: Followed, attended: Attended) -> None:
        metrics, decision = self._metrics, attended.decision
        (self._open.add if decision.reason == "BreakerOpen" else self._open.discard)(run.key)
        metrics.breakers.set(len(self._open))
        if decision.action is not Action.RESUME:
            metrics.not_resumed.labels(decision.reason).inc()
        elif attended.resumed is None:
            metrics.would_resume.labels(_cause(attended.seen)).inc()
        else:
            metrics.resumed.labels(_cause(attended.seen)).inc()
            metrics.note_plan(attended.resumed.plan)
            self._count_lost(run.key, attended.seen.submission)
            if run.ended_at is not None:
                metrics.resume_seconds.observe(max(self._monotonic() - run.ended_at, 0.0))

    def _count_lost(self, key: RunKey, submission: int) -> None:
        """What the failures of a submission have cost, once it is over and another follows."""
        try:
            [account] = accounts(self._stores(key[0]), [key[1]], utc_now())
        except TiphysError as error:  # the run goes on all the same, and `tiphys report` tells it
            _log.warning("resume.not_accounted", namespace=key[0], run=key[1], error=str(error))
            return
        for step in account.steps:
            for entry in step.entries if step.gpus else ():
                if entry.submission == submission and entry.failed_by:
                    lost = max(entry.held - entry.seconds(Phase.USEFUL), 0.0)
                    self._metrics.lost_gpu_seconds.labels(entry.failed_by).inc(step.gpus * lost)


def _cause(seen: Observed) -> str:
    if seen.standing in (Standing.GONE, Standing.UNSENT):
        return seen.standing.value
    return seen.cause.value if seen.cause else "unknown"
