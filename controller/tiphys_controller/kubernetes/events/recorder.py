"""Records what happens to a run: Events of its Workflow, its title and its description.

A Workflow's run is read from storage when the Workflow changed, and at intervals
while it runs, so that a busy cluster costs few reads.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple

import structlog

from tiphys.errors import FencedError, StoreError
from tiphys.lineage.training_progress import read_training_progress
from tiphys.records import SubmissionEnd, TrainingProgress
from tiphys.service.tenant_guard import TenantGuard
from tiphys.store import Store, end_submission
from tiphys_controller.kubernetes.events.description import (
    describe_refused_workflow,
    describe_workflow,
    open_attempts,
)
from tiphys_controller.kubernetes.events.messages import (
    EventMessage,
    build_event_messages,
    workflow_deleted_message,
)
from tiphys_controller.kubernetes.events.run_log import AttemptKey, RunLog
from tiphys_controller.kubernetes.metrics import ControllerMetrics
from tiphys_controller.kubernetes.watch_cache import WatchCache
from tiphys_controller.kubernetes.workflow_view import SubmissionRef, WorkflowView, find_submission, possible_run_names
from tiphys_controller.kubernetes.writer import ClusterWriter

LOOK_AFTER_CHANGE_SECONDS = 3.0
"""Argo changes a Workflow several times within a second."""
LOOK_WHILE_RUNNING_SECONDS = 30.0
"""Events of a training program do not change the Workflow object."""
LOOK_AT_TRAININGS_SECONDS = 300.0
"""Argo reconciles a Workflow at each change, so its description follows a training at leisure."""
DESCRIBE_SECONDS_PER_POD = 0.2
"""Each text costs the API server a write of the whole Workflow, a megabyte with 500 pods, and Argo's controller a
conflict: at one text every six seconds that was half of their CPU time."""
_MAX_TRAININGS = 16
EVENT_LIFETIME = timedelta(hours=1)
"""The API server keeps Events for an hour; older ones are not recorded again."""


class StorageLook(NamedTuple):
    """The last read of a run: monotonic time, Workflow state, and whether everything was read and recorded."""

    looked_at: float
    workflow: WorkflowView
    is_complete: bool


def is_look_due(workflow: WorkflowView, last: StorageLook | None, monotonic: float) -> bool:
    """Whether the run of a Workflow is due to be read."""
    if last is None:
        return True
    waited = monotonic - last.looked_at
    if not last.is_complete or _stable_fields(workflow) != _stable_fields(last.workflow):
        return waited >= LOOK_AFTER_CHANGE_SECONDS
    return not workflow.finished and waited >= LOOK_WHILE_RUNNING_SECONDS


def is_description_due(workflow: WorkflowView, described_at: float | None, monotonic: float) -> bool:
    """Whether a changed description may be written: the more pods a running Workflow has, the less often."""
    if described_at is None or workflow.finished or workflow.shutdown:
        return True
    pods = workflow.progress.rpartition("/")[2]
    return monotonic - described_at >= DESCRIBE_SECONDS_PER_POD * (int(pods) if pods.isdecimal() else 0)


def is_long_finished(workflow: WorkflowView, now: datetime) -> bool:
    """Whether the Workflow finished longer ago than Events are kept."""
    return workflow.finished and workflow.finished_at is not None and is_expired(workflow.finished_at, now)


def is_expired(at: datetime, now: datetime) -> bool:
    """Whether an Event of this time would be older than Events are kept."""
    return now - at > EVENT_LIFETIME


def _stable_fields(workflow: WorkflowView) -> WorkflowView:
    # The recorder itself writes annotations, and messages of waits change with each retry.
    return workflow._replace(annotations={}, waits=dict.fromkeys(workflow.waits, ""))


_ROUND_SECONDS = 1.0
_AT_ONCE = 8
_EVENTS_PER_LOOK = 50
_log = structlog.get_logger()


@dataclass
class _RecordedWorkflow:
    """What was read of one Workflow's run, and which Events were recorded."""

    submission_ref: SubmissionRef | None = None
    log: RunLog | None = None
    recorded_keys: set[str] = field(default_factory=set)
    last_look: StorageLook | None = None
    trainings: dict[AttemptKey, TrainingProgress] = field(default_factory=dict)
    trainings_at: float | None = None
    """Monotonic time at which `trainings` was read."""
    described_at: float | None = None
    """Monotonic time at which its title and description were written; None before."""
    has_end: bool = False
    """Whether the end of the submission is known to be recorded."""


@dataclass
class EventRecorder:
    """Reads the run of each Workflow when `is_look_due`, and records what is new."""

    view: WatchCache
    stores: Callable[[str], Store]
    writer: ClusterWriter
    metrics: ControllerMetrics
    now: Callable[[], datetime]
    monotonic: Callable[[], float]
    descriptions: bool = True
    """Whether to write title and description of Workflows too."""
    _recorded: dict[str, _RecordedWorkflow] = field(default_factory=dict)
    last_error: str = ""
    """Error of the last request to storage or API server; empty if it succeeded."""

    def __post_init__(self) -> None:
        self._guard = TenantGuard("look", self.metrics.failures.labels("look").inc)

    def run(self, stop: threading.Event) -> None:
        """Work until ``stop``."""
        version = -1
        with ThreadPoolExecutor(_AT_ONCE, "tiphys-narrator") as pool:
            while not stop.is_set():
                version = self.view.wait(version, _ROUND_SECONDS)
                self.run_round(pool, stop)

    def run_round(self, pool: ThreadPoolExecutor, stop: threading.Event) -> None:
        """Record every Workflow that is due, and deletions."""
        for deleted in self.view.pop_deleted_workflows():
            self._guarded(deleted, self._record_deletion)
        workflows = self.view.workflows()
        self.metrics.workflows.set(sum(not workflow.finished for workflow in workflows))
        present = {workflow.uid for workflow in workflows}
        for uid in self._recorded.keys() - present:
            del self._recorded[uid]
        moment, now = self.monotonic(), self.now()
        due = [workflow for workflow in workflows if self._is_due(workflow, moment, now)]
        list(pool.map(lambda workflow: None if stop.is_set() else self._guarded(workflow, self._record_run), due))

    def _is_due(self, workflow: WorkflowView, moment: float, now: datetime) -> bool:
        recorded = self._recorded.get(workflow.uid)
        if recorded is None:
            if is_long_finished(workflow, now):
                return False
            recorded = self._recorded[workflow.uid] = _RecordedWorkflow()
        return is_look_due(workflow, recorded.last_look, moment)

    def _guarded(self, workflow: WorkflowView, action: Callable[[WorkflowView], None]) -> None:
        with self._guard.visit(namespace=workflow.namespace, workflow=workflow.name) as visit:
            action(workflow)
        if isinstance(visit.failure, FencedError):
            return  # the new leader records it
        self.last_error = str(visit.failure) if isinstance(visit.failure, StoreError) else ""
        if visit.failure is not None and (recorded := self._recorded.get(workflow.uid)) is not None:
            recorded.last_look = StorageLook(self.monotonic(), workflow, is_complete=False)

    def _record_run(self, workflow: WorkflowView) -> None:
        recorded = self._recorded[workflow.uid]
        self.metrics.looks.inc()
        store = self.stores(workflow.namespace)
        self._read_run(recorded, workflow, store)
        _record_missing_end(recorded, workflow, store)
        resume = _resume_command(recorded.submission_ref, workflow, store)
        has_more = self._record_events(recorded, workflow, resume)
        if self.descriptions and recorded.submission_ref and recorded.log:
            trainings = self._read_trainings(recorded, workflow, store)
            texts = describe_workflow(workflow, recorded.submission_ref, recorded.log, resume, trainings)
            self._describe(recorded, workflow, texts)
        elif self.descriptions and workflow.finished and workflow.phase != "Succeeded":
            self._describe(recorded, workflow, describe_refused_workflow(workflow))
        complete = not has_more and (recorded.log is None or recorded.log.is_complete)
        recorded.last_look = StorageLook(self.monotonic(), workflow, complete)

    def _read_run(self, recorded: _RecordedWorkflow, workflow: WorkflowView, store: Store) -> None:
        if workflow.store.rstrip("/") not in ("", store.url.rstrip("/")):
            return  # compiled for another store: the plugin refuses it with a message
        recorded.submission_ref = recorded.submission_ref or find_submission(store, workflow)
        if recorded.submission_ref is not None:
            recorded.log = recorded.log or RunLog(recorded.submission_ref.run)
            recorded.log.read(store)

    def _read_trainings(
        self, recorded: _RecordedWorkflow, workflow: WorkflowView, store: Store
    ) -> list[tuple[str, TrainingProgress]]:
        """Reports of the running trainings; those of the last `LOOK_AT_TRAININGS_SECONDS` are returned again."""
        moment = self.monotonic()
        if recorded.submission_ref is None or recorded.log is None or workflow.finished or workflow.shutdown:
            return []
        running = open_attempts(recorded.submission_ref, recorded.log)
        if recorded.trainings_at is None or moment - recorded.trainings_at >= LOOK_AT_TRAININGS_SECONDS:
            starts = recorded.log.attempt_starts
            trainings = [key for key in running if starts[key].lineage][:_MAX_TRAININGS]
            reports = [read_training_progress(store, starts[key].lineage, key[1]) for key in trainings]
            recorded.trainings = {key: report for key, report in zip(trainings, reports, strict=True) if report}
            if recorded.trainings:
                recorded.trainings_at = moment
        return [(key[0], report) for key, report in recorded.trainings.items() if key in running]

    def _record_events(self, recorded: _RecordedWorkflow, workflow: WorkflowView, resume_command: str) -> bool:
        """Record new Events; returns whether some remain for the next read."""
        now = self.now()
        unrecorded = [
            message
            for message in build_event_messages(workflow, recorded.submission_ref, recorded.log, resume_command)
            if message.key not in recorded.recorded_keys
        ]
        recent = [event for event in unrecorded if event.recorded_at is None or not is_expired(event.recorded_at, now)]
        for event in recent[:_EVENTS_PER_LOOK]:
            self.writer.record_event(workflow, event)
            recorded.recorded_keys.add(event.key)
        return len(recent) > _EVENTS_PER_LOOK

    def _describe(self, recorded: _RecordedWorkflow, workflow: WorkflowView, texts: dict[str, str]) -> None:
        changed = {
            name: text
            for name, text in texts.items()
            if name in workflow.narrated_annotations and workflow.annotations.get(name) != text
        }
        if changed and is_description_due(workflow, recorded.described_at, self.monotonic()):
            self.writer.annotate(workflow, changed)
            recorded.described_at = self.monotonic()

    def _record_deletion(self, workflow: WorkflowView) -> None:
        recorded = self._recorded.get(workflow.uid) or _RecordedWorkflow()
        store = self.stores(workflow.namespace)
        message: EventMessage = workflow_deleted_message(_resume_command(recorded.submission_ref, workflow, store))
        self.writer.record_event(workflow, message)


def _record_missing_end(recorded: _RecordedWorkflow, workflow: WorkflowView, store: Store) -> None:
    """Record the end of a finished Workflow that finalize could not record, as in an outage that outlasted its wait.

    A stopped Workflow is left out: it may have no finalize, and `argo retry` may go on with it.
    """
    ref = recorded.submission_ref
    if ref is None or recorded.has_end or not workflow.finished or workflow.shutdown:
        return
    reason = "" if workflow.phase == "Succeeded" else workflow.plugin_failure or workflow.message
    message = reason[: SubmissionEnd.MAX_MESSAGE_CHARACTERS]
    end = SubmissionEnd(run=ref.run, submission=ref.submission, status=workflow.phase, message=message)
    if end_submission(store, end, may_be_resumed=workflow.auto_resume).is_ours:
        _log.warning("submission.completed", run=ref.run, submission=ref.submission, status=workflow.phase)
    recorded.has_end = True


def _resume_command(submission_ref: SubmissionRef | None, workflow: WorkflowView, store: Store) -> str:
    run = submission_ref.run if submission_ref else next(iter(possible_run_names(workflow)), workflow.name)
    return f"`tiphys resume {run} --store {store.url}`"
