"""Reports automatic resumes: an Event of the Workflow, a log entry, and metrics."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
from cachetools import LRUCache

from tiphys.errors import TiphysError
from tiphys.lineage.run_history import RunHistory
from tiphys.records import utc_now
from tiphys.store import Store
from tiphys_controller.auto_resume.act import ReconcileResult
from tiphys_controller.auto_resume.decide import AutoResumeAction
from tiphys_controller.auto_resume.state import (
    AutomationMode,
    AutoResumeLimits,
    RunKey,
    RunObservation,
    SubmissionStatus,
)
from tiphys_controller.goodput import measure_time_usage
from tiphys_controller.kubernetes.auto_resume_loop import TrackedRun
from tiphys_controller.kubernetes.events.messages import (
    EventMessage,
    auto_resumed_message,
    dry_run_message,
    resume_declined_message,
)
from tiphys_controller.kubernetes.metrics import ControllerMetrics
from tiphys_controller.kubernetes.workflow_view import WorkflowView
from tiphys_controller.kubernetes.writer import ClusterWriter

_UNREPORTED_REASONS = ("Runs", "Succeeded", "Elsewhere", "NotAsked", "NotSureYet", "RateLimited", "NothingMissing")
_MAX_RECORDED = 10_000
"""Newest Events that are known to be recorded; one that is repeated has the same name."""
_log = structlog.get_logger()


@dataclass
class AutoResumeRecorder:
    """The `AutoResumeReporter` of a cluster. Records each Event once; event names make that hold across restarts."""

    writer: ClusterWriter
    stores: Callable[[str], Store]
    metrics: ControllerMetrics
    limits: AutoResumeLimits
    monotonic: Callable[[], float]
    _recorded: LRUCache[tuple[RunKey, str], bool] = field(default_factory=lambda: LRUCache(_MAX_RECORDED))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def report_result(self, tracked_run: TrackedRun, result: ReconcileResult) -> None:
        self._count(tracked_run, result)
        message = self._build_message(tracked_run, result)
        if message is None:
            return
        with self._lock:
            is_recorded = self._recorded.get((tracked_run.key, message.key), False)
            self._recorded[tracked_run.key, message.key] = True
        if is_recorded:
            return
        _log.info(
            "resume.decided",
            namespace=tracked_run.key[0],
            run=tracked_run.key[1],
            reason=message.reason,
            message=message.message,
        )
        if tracked_run.workflow is not None:
            self._record_event(tracked_run.workflow, message)

    def report_open_breakers(self, count: int) -> None:
        self.metrics.open_breakers.set(count)

    def report_failure(self, what: str) -> None:
        self.metrics.failures.labels(what).inc()

    def _build_message(self, tracked_run: TrackedRun, result: ReconcileResult) -> EventMessage | None:
        decision, observation = result.decision, result.observation
        if result.resumed and result.resumed.submission is not None:
            return auto_resumed_message(result.resumed.submission, decision.message)
        if decision.action is AutoResumeAction.RESUME and self.limits.mode is AutomationMode.DRY_RUN:
            return dry_run_message(observation.next_submission, decision.message)
        if decision.action is AutoResumeAction.RESUME or decision.reason in _UNREPORTED_REASONS:
            return None
        command = f"`tiphys resume {tracked_run.key[1]} --store {self.stores(tracked_run.key[0]).url}`"
        return resume_declined_message(observation.submission, decision.reason, decision.message, command)

    def _record_event(self, workflow: WorkflowView, message: EventMessage) -> None:
        try:
            self.writer.record_event(workflow, message)
        except TiphysError as error:  # the resume is done; the run's own events record it
            _log.warning("resume.not_reported", namespace=workflow.namespace, workflow=workflow.name, error=str(error))

    def _count(self, tracked_run: TrackedRun, result: ReconcileResult) -> None:
        metrics, decision = self.metrics, result.decision
        if decision.action is not AutoResumeAction.RESUME:
            metrics.not_resumed.labels(decision.reason).inc()
        elif result.resumed is None:
            metrics.would_resume.labels(_cause_label(result.observation)).inc()
        else:
            metrics.resumed.labels(_cause_label(result.observation)).inc()
            metrics.observe_plan(result.resumed.plan)
            self._count_lost(tracked_run.key, result.observation.submission)
            if tracked_run.ended_at is not None:
                metrics.resume_seconds.observe(max(self.monotonic() - tracked_run.ended_at, 0.0))

    def _count_lost(self, key: RunKey, submission: int) -> None:
        """Count the GPU-seconds that the failures of an ended submission have cost."""
        try:
            history = RunHistory.for_display(self.stores(key[0]), key[1])
            usage = measure_time_usage(history, utc_now())
        except TiphysError as error:  # the resume is done; `tiphys report` shows the cost
            _log.warning("resume.not_accounted", namespace=key[0], run=key[1], error=str(error))
            return
        for step in usage.steps:
            for entry in step.entries if step.gpus else ():
                if entry.submission == submission and entry.failed_by:
                    self.metrics.lost_gpu_seconds.labels(entry.failed_by).inc(step.gpus * entry.lost_seconds)


def _cause_label(observation: RunObservation) -> str:
    if observation.status in (SubmissionStatus.WORKFLOW_GONE, SubmissionStatus.UNSENT):
        return observation.status.value
    return observation.cause.value if observation.cause else "unknown"
