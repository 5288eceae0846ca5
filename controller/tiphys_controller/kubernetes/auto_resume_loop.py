"""The auto-resume loop: reconciles every run that may have ended.

The watch is fast but forgets; storage is searched at intervals and remembers.
Either is enough: a run whose Workflow was deleted while no controller watched is
found in storage by its open submission, and a run without a recorded end by its
Workflow. `RunTracker`
decides which runs are due, without I/O and in one thread. Each run is
reconciled by at most one thread at a time.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from tiphys.errors import ConflictError, NotFoundError, StoreError, UsageError
from tiphys.service.tenant_guard import TenantGuard
from tiphys.store import Store, list_open_submissions
from tiphys_controller.auto_resume.act import AutoResumeReconciler, ReconcileResult
from tiphys_controller.auto_resume.decide import AutoResumeAction
from tiphys_controller.auto_resume.observation_health import ObservationHealthTracker
from tiphys_controller.auto_resume.state import AutoResumeLimits, RunKey
from tiphys_controller.kubernetes.watch_cache import WatchCache
from tiphys_controller.kubernetes.workflow_view import WorkflowView, find_submission

NEVER = float("inf")
RETRY_SECONDS = 10.0
"""Retry interval after a request failed, or a record was not there yet."""
VANISHED_SECONDS = 60.0
"""For so long the run of a Workflow is looked for that vanished before its run was known; then a search finds it."""
_MAX_SETTLED_RUNS = 1000
"""Settled runs without a Workflow that are kept in memory, so that a search of storage passes over them."""
SLOW_RETRY_SECONDS = 300.0
"""Retry interval after an error that needs a repair."""


@dataclass
class TrackedRun:
    """One run whose pipeline enables automatic resumes."""

    key: RunKey
    due_at: float = NEVER
    is_busy: bool = False
    is_settled: bool = False
    """The run needs no further reconciles until it changes."""
    is_breaker_open: bool = False
    """Whether it was resumed too often without progress, and has no Workflow that runs since."""
    ended_at: float | None = None
    """When its end was noticed, by the monotonic clock; None before."""
    workflow: WorkflowView | None = None
    shutdowns: dict[str, str] = field(default_factory=dict)
    """``spec.shutdown`` of its Workflows, by uid."""


@dataclass
class TrackedWorkflow:
    """One Workflow of a tracked run; ``run_key`` is None until its run is resolved."""

    workflow: WorkflowView
    run_key: RunKey | None = None
    resolve_at: float = 0.0
    is_end_recorded: bool = False
    vanished_at: float = 0.0
    """When it was noticed to be gone."""


class RunTracker:
    """All Workflows that enable automatic resumes, and their runs."""

    def __init__(self, health_tracker: ObservationHealthTracker) -> None:
        self._health_tracker = health_tracker
        self._workflows: dict[str, TrackedWorkflow] = {}
        self._vanished: list[TrackedWorkflow] = []
        self._runs: dict[RunKey, TrackedRun] = {}

    def update(self, workflows: Iterable[WorkflowView], now: float) -> None:
        """Update the runs with the list of all present Workflows."""
        present = {workflow.uid: workflow for workflow in workflows if workflow.auto_resume}
        for uid, workflow in present.items():
            tracked = self._workflows.setdefault(uid, TrackedWorkflow(workflow))
            tracked.workflow = workflow
            if tracked.run_key is not None:
                self._update_run(tracked, self.track(tracked.run_key), now)
        for uid in self._workflows.keys() - present.keys():
            vanished = self._workflows.pop(uid)
            vanished.vanished_at, vanished.resolve_at = now, min(vanished.resolve_at, now + RETRY_SECONDS)
            self._vanished.append(vanished)
        vanished_before, self._vanished = self._vanished, []
        for vanished in vanished_before:
            if vanished.run_key is None:
                if now - vanished.vanished_at < VANISHED_SECONDS:
                    self._vanished.append(vanished)
            elif not vanished.is_end_recorded and vanished.workflow.phase != "Succeeded":
                self._record_end(self.track(vanished.run_key), now, vanished=not vanished.workflow.finished)
        if len(self._runs) > _MAX_SETTLED_RUNS + len(self._workflows):
            self._forget_settled_runs()

    def _forget_settled_runs(self) -> None:
        present = {tracked.run_key for tracked in (*self._workflows.values(), *self._vanished)}
        self._runs = {
            key: run
            for key, run in self._runs.items()
            if key in present or not run.is_settled or run.is_busy or run.due_at < NEVER
        }

    def track(self, key: RunKey) -> TrackedRun:
        """Return the tracked run; start to track it if needed."""
        return self._runs.setdefault(key, TrackedRun(key))

    def count_open_breakers(self) -> int:
        return sum(run.is_breaker_open for run in self._runs.values())

    def find_run(self, key: RunKey) -> TrackedRun | None:
        return self._runs.get(key)

    def take_due(self, now: float) -> Iterator[TrackedRun]:
        """Runs that are due; each is marked busy until its reconcile resets it."""
        for run in self._runs.values():
            if not run.is_busy and run.due_at <= now:
                run.is_busy, run.due_at = True, NEVER
                yield run

    def take_unresolved(self, now: float) -> Iterator[TrackedWorkflow]:
        """Workflows whose run is due to be resolved."""
        for tracked in (*self._workflows.values(), *self._vanished):
            if tracked.run_key is None and tracked.resolve_at <= now:
                tracked.resolve_at = now + (SLOW_RETRY_SECONDS if tracked.workflow.finished else RETRY_SECONDS)
                yield tracked

    def _update_run(self, tracked: TrackedWorkflow, tracked_run: TrackedRun, now: float) -> None:
        workflow = tracked_run.workflow = tracked.workflow
        if workflow.shutdown:
            tracked_run.shutdowns[workflow.uid] = workflow.shutdown
        if not workflow.finished:
            tracked_run.is_breaker_open = False  # `tiphys resume` closed it
        if workflow.finished and not tracked.is_end_recorded:
            tracked.is_end_recorded = True
            if workflow.phase != "Succeeded":
                self._record_end(tracked_run, now, vanished=False)

    def _record_end(self, tracked_run: TrackedRun, now: float, *, vanished: bool) -> None:
        self._health_tracker.record_end(tracked_run.key, vanished=vanished)
        tracked_run.is_settled, tracked_run.due_at, tracked_run.ended_at = False, now, now


_ROUND_SECONDS = 1.0
_AT_ONCE = 8
_HEALTHY_REASONS = ("Runs", "Succeeded", "Elsewhere")


class AutoResumeReporter(Protocol):
    """Reports the loop's results to people and Prometheus."""

    def report_result(self, tracked_run: TrackedRun, result: ReconcileResult) -> None:
        """Report the result of reconciling a run."""

    def report_open_breakers(self, count: int) -> None:
        """Report the number of runs whose circuit breaker is open."""

    def report_failure(self, what: str) -> None:
        """Count a failure that is retried."""


@dataclass
class AutoResumeLoop:
    """The loop. One thread schedules; a pool reconciles runs and searches storage."""

    view: WatchCache
    reconciler: AutoResumeReconciler
    health_tracker: ObservationHealthTracker
    stores: Callable[[str], Store]
    reporter: AutoResumeReporter
    limits: AutoResumeLimits
    monotonic: Callable[[], float]
    tenants: Callable[[], list[str]]
    """Returns the namespaces whose storage is searched."""
    _found_runs: list[RunKey] = field(default_factory=list)
    _sweep_at: float = 0.0
    _is_sweeping: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._tracker = RunTracker(self.health_tracker)
        # Another process may resume the run, or lead.
        self._guard = TenantGuard("resume", partial(self.reporter.report_failure, "resume"), ConflictError)

    def run(self, stop: threading.Event) -> None:
        """Work until ``stop``."""
        version = -1
        with ThreadPoolExecutor(_AT_ONCE, "tiphys-resumer") as pool:
            while not stop.is_set():
                version = self.view.wait(version, _ROUND_SECONDS)
                self.run_round(pool, stop)

    def run_round(self, pool: ThreadPoolExecutor, stop: threading.Event) -> list[Future[None]]:
        """Update the tracker and start every task that is due; returns the started tasks."""
        now = self.monotonic()
        self._tracker.update(self.view.workflows(), now)
        self.reporter.report_open_breakers(self._tracker.count_open_breakers())
        with self._lock:
            found_runs, self._found_runs = self._found_runs, []
        for key in found_runs:
            self._tracker.track(key).due_at = now
        started = [
            pool.submit(self._resolve_run, tracked, stop) for tracked in list(self._tracker.take_unresolved(now))
        ]
        if now >= self._sweep_at and not self._is_sweeping and not self.health_tracker.measure_health("").blind_reason:
            self._is_sweeping, self._sweep_at = True, now + self.limits.sweep_seconds
            started.append(pool.submit(self._sweep, stop))
        return started + [pool.submit(self._reconcile_when_due, run, stop) for run in self._tracker.take_due(now)]

    def _resolve_run(self, tracked: TrackedWorkflow, stop: threading.Event) -> None:
        """Resolve the run of a Workflow from its binding."""
        workflow = tracked.workflow

        def resolve() -> float:
            submission = find_submission(self.stores(workflow.namespace), workflow)
            if submission is not None:
                tracked.run_key = (workflow.namespace, submission.run)
                self.view.wake()
            return 0.0

        if not stop.is_set():
            self._guarded(workflow.namespace, resolve)

    def _sweep(self, stop: threading.Event) -> None:
        """Search storage for runs that the watch missed, and for runs that are not settled."""
        try:
            for namespace in self.tenants():
                self._guarded(namespace, partial(self._search_namespace, namespace, stop))
        finally:
            self._is_sweeping = False

    def _search_namespace(self, namespace: str, stop: threading.Event) -> float:
        opened = list_open_submissions(self.stores(namespace))
        for run in dict.fromkeys(submission.run for submission in opened):
            if stop.is_set():
                break
            if self._needs_reconcile((namespace, run)):
                with self._lock:
                    self._found_runs.append((namespace, run))
        return 0.0

    def _needs_reconcile(self, key: RunKey) -> bool:
        tracked = self._tracker.find_run(key)
        if tracked is not None:
            return not (tracked.is_settled or tracked.is_busy)
        try:
            return self.reconciler.read_policy(key) is not None
        except (NotFoundError, UsageError):
            return False  # not recorded yet, or not compiled by Tiphys; the next sweep reads it again

    def _reconcile_when_due(self, tracked_run: TrackedRun, stop: threading.Event) -> None:
        wait_seconds = RETRY_SECONDS
        try:
            if not stop.is_set():
                wait_seconds = self._guarded(tracked_run.key[0], lambda: self._reconcile_run(tracked_run))
        finally:
            tracked_run.due_at = min(tracked_run.due_at, self.monotonic() + wait_seconds)
            tracked_run.is_busy = False

    def _reconcile_run(self, tracked_run: TrackedRun) -> float:
        """Reconcile a run once; returns the seconds until the next reconcile."""
        result = self.reconciler.reconcile(tracked_run.key, tracked_run.shutdowns)
        decision = result.decision
        tracked_run.is_settled = decision.action is AutoResumeAction.LEAVE_ALONE and decision.reason != "Runs"
        tracked_run.is_breaker_open = decision.reason == "BreakerOpen"
        if result.resumed or decision.reason in _HEALTHY_REASONS:
            self.health_tracker.clear_end(tracked_run.key)
        self.reporter.report_result(tracked_run, result)
        if tracked_run.is_settled:
            self.reconciler.forget_run(tracked_run.key)
        if decision.action is not AutoResumeAction.WAIT:
            return NEVER
        return min(max(decision.wait_seconds, _ROUND_SECONDS), SLOW_RETRY_SECONDS)

    def _guarded(self, namespace: str, action: Callable[[], float]) -> float:
        """Run an action and log its errors; returns the seconds until the next try."""
        with self._guard.visit(namespace=namespace) as visit:
            return action()
        if isinstance(visit.failure, StoreError):
            self.health_tracker.record_outage(namespace)
        return RETRY_SECONDS if isinstance(visit.failure, StoreError | ConflictError) else SLOW_RETRY_SECONDS
