"""Observes, decides and acts on one run at a time.

The auto-resume loop reconciles runs whose Workflow has ended; the alert handler
reconciles the run of an alert. An `AutoResumeRecord` is written before the
resume, so that a controller that crashes in between still counts the attempt.
Only the time since a status was first observed is kept in memory; all counts
come from storage, so the next leader continues with the same brakes.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from cachetools import LRUCache, cachedmethod

from tiphys.errors import ConflictError, IntegrityError, UsageError
from tiphys.faults import failpoint
from tiphys.kube import require_leadership
from tiphys.protocol.auto_resume_policy import AutoResumePolicy, read_auto_resume_policy
from tiphys.records import AutoResumeRecord, ManualStopRecord, RunRecord
from tiphys.store import (
    RunLayout,
    Store,
    claim_record,
    close_submission,
    find_record,
    read_run,
    read_submissions,
)
from tiphys_controller.auto_resume.decide import AutoResumeAction, AutoResumeDecision, decide_auto_resume
from tiphys_controller.auto_resume.observation_health import ObservationHealth, TokenBucket, find_distrust_reason
from tiphys_controller.auto_resume.observe import observe_run
from tiphys_controller.auto_resume.state import (
    AutomationMode,
    AutoResumeLimits,
    RunKey,
    RunObservation,
    SubmissionStatus,
)
from tiphys_controller.submit.fork import fork_run
from tiphys_controller.submit.resume import ResumeResult, resume_run
from tiphys_controller.submit.submission import find_workflow
from tiphys_controller.submit.submitter import ClusterSubmitter, Submitter, TenantSubmitter


def record_intent(store: Store, observation: RunObservation, decision: AutoResumeDecision, alert: str = "") -> None:
    """Record that the next submission is about to be made, so that the next leader completes it after a crash."""
    record = AutoResumeRecord(
        run=observation.run,
        submission=observation.next_submission,
        reason=decision.message,
        cause=observation.cause,
        alert=alert,
        advance=observation.advance,
    )
    claim_record(store, RunLayout(observation.run).auto_resume(observation.next_submission), record)
    failpoint("automatic.after_intent")


def auto_resume_run(
    store: Store, submitter: Submitter, observation: RunObservation, decision: AutoResumeDecision, alert: str = ""
) -> ResumeResult:
    """Record the intent to resume a run, then resume it.

    Raises:
        ConflictError: another process resumed the run, or its Workflow still runs.
        UsageError: the Workflow cannot be pruned.
    """
    if not observation.is_intended:
        record_intent(store, observation, decision, alert)
    return resume_run(store, submitter, observation.run, is_recorded=True)  # by `observe_run`


def stop_workflow(store: Store, submitter: ClusterSubmitter, run: str) -> None:
    """Stop the Workflow of the last submission, so that its programs save a checkpoint.

    Nothing is stopped before the submission is bound: only a binding names the object, not just its name.
    """
    last = read_submissions(store, run)[-1]
    live = find_workflow(submitter, last)
    if live is not None and live.running and last.binding is not None and live.uid == last.binding.uid:
        submitter.stop(live)


def auto_fork_run(store: Store, submitter: Submitter, run: str, fork_name: str) -> None:
    """Fork ``run`` as ``fork_name``, or complete a fork that a crashed controller has begun.

    Raises:
        ConflictError: a change is not allowed by the drift policy.
    """
    if find_record(store, RunLayout(fork_name).run_record, RunRecord) is None:
        fork_run(store, submitter, run, fork_name)
        return
    sent = read_submissions(store, fork_name)
    if not sent or sent[-1].binding is None:
        resume_run(store, submitter, fork_name)


_LEFT_TO_PEOPLE = ("NotAsked", "EndedByPerson", "NeedsPerson")
"""Reasons for which a submission that has ended is never looked at again."""
_MAX_POLICIES = 10_000
"""Runs whose policies are kept in memory."""
_NO_SHUTDOWNS: Mapping[str, str] = MappingProxyType({})


class ReconcileResult(NamedTuple):
    """Outcome of `AutoResumeReconciler.reconcile`. ``resumed`` is set if a resume was attempted."""

    decision: AutoResumeDecision
    observation: RunObservation
    resumed: ResumeResult | None = None


@dataclass
class _RunLock:
    """Lock of one run, kept for as long as threads hold it or wait for it."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    users: int = 0


@dataclass
class AutoResumeReconciler:
    """Decides and acts for single runs. Thread-safe; calls about the same run are serialized."""

    stores: Callable[[str], Store]
    submitter: Callable[[], ClusterSubmitter]
    """Called at each use: the cluster's identity may not be known at first."""
    is_leader: Callable[[], bool]
    """Whether this controller leads; checked right before each action."""
    observation_health: Callable[[str], ObservationHealth]
    monotonic: Callable[[], float]
    limits: AutoResumeLimits

    def __post_init__(self) -> None:
        self._bucket = TokenBucket(self.limits.resumes_per_minute / 60, self.limits.resume_burst, self.monotonic)
        self._status_since: dict[RunKey, tuple[int, SubmissionStatus, float]] = {}
        self._policies: LRUCache[RunKey, AutoResumePolicy | None] = LRUCache(_MAX_POLICIES)
        self._run_locks: dict[RunKey, _RunLock] = {}
        self._lock = threading.Lock()

    @property
    def mode(self) -> AutomationMode:
        """Whether decisions are carried out."""
        return self.limits.mode

    @contextmanager
    def lock_run(self, key: RunKey) -> Iterator[None]:
        """Keep other threads of this controller from acting on a run, so that an observation stays current."""
        with self._lock:
            run_lock = self._run_locks.setdefault(key, _RunLock())
            run_lock.users += 1
        try:
            with run_lock.lock:
                yield
        finally:
            with self._lock:
                run_lock.users -= 1
                if not run_lock.users:
                    del self._run_locks[key]

    def reconcile(
        self,
        key: RunKey,
        shutdowns: Mapping[str, str] = _NO_SHUTDOWNS,
        *,
        alert: str = "",
        observation: RunObservation | None = None,
    ) -> ReconcileResult:
        """Decide about a run, and resume it if a resume is due.

        ``shutdowns`` has ``spec.shutdown`` of the run's Workflows by uid, and ``alert`` is the id of the alert that
        requests the resume. ``observation`` is the run as the caller has just read it under `lock_run`; None: read it.

        Raises:
            StoreError: storage or API server is out of reach; no decision was made.
            FencedError: another controller leads by now.
            ConflictError: another process resumes the run.
            UsageError: the resume policy of the pipeline is not valid.
            IntegrityError: a record is damaged.
        """
        with self.lock_run(key):
            return self._reconcile(key, shutdowns, alert, observation)

    def observe(self, key: RunKey, shutdowns: Mapping[str, str] = _NO_SHUTDOWNS) -> RunObservation:
        """Read everything about a run, even if it is running. Raises as `reconcile` does."""
        store = self.stores(key[0])
        return observe_run(store, self._submitter(key[0]), key[1], self.read_policy(key), shutdowns, is_thorough=True)

    def stop_for_restart(self, key: RunKey, alert: str, observation: RunObservation) -> AutoResumeDecision:
        """Record that a resume of a running run is intended, then stop its Workflow.

        All brakes of an automatic resume hold. The Workflow was stopped only if the decision is
        `AutoResumeAction.RESUME` and the mode is `AutomationMode.ON`.

        ``alert`` is the id of the alert that requests it, ``observation`` the run as `observe` has just returned it
        under `lock_run`.

        Raises:
            StoreError: storage or API server is out of reach.
            FencedError: another controller leads by now.
        """
        waited = self._seconds_in_status(key, observation)
        ended = replace(
            observation, status=SubmissionStatus.FAILED, failures=(), person_reason="", end_message=f"alert {alert}"
        )
        decision = decide_auto_resume(ended, waited, self.limits, requested_by_alert=True)
        if decision.action is not AutoResumeAction.RESUME:
            return decision
        if (delayed := self._decide_delay(key[0], ended)) is not None:
            return delayed
        if self.limits.mode is AutomationMode.ON:
            require_leadership(self.is_leader)
            if not observation.is_intended:
                record_intent(self.stores(key[0]), ended, decision, alert)
            stop_workflow(self.stores(key[0]), self._submitter(key[0]), key[1])
        return decision

    def fork_run(self, key: RunKey, fork_name: str) -> AutoResumeDecision:
        """Fork this run under a name, once. Returns a decision as `stop_for_restart` does."""
        observation = RunObservation(key[1], 0, SubmissionStatus.RUNNING)
        if (delayed := self._decide_delay(key[0], observation)) is not None:
            return delayed
        forked = AutoResumeDecision(AutoResumeAction.RESUME, "Forked", f"run {fork_name} continues from it")
        if self.limits.mode is not AutomationMode.ON:
            return forked
        require_leadership(self.is_leader)
        try:
            auto_fork_run(self.stores(key[0]), self._submitter(key[0]), key[1], fork_name)
        except ConflictError as error:
            return AutoResumeDecision(AutoResumeAction.LEAVE_ALONE, "Refused", str(error))
        return forked

    @cachedmethod(lambda self: self._policies, lock=lambda self: self._lock)
    def read_policy(self, key: RunKey) -> AutoResumePolicy | None:
        """Resume policy of the run's pipeline. It never changes, so it is kept."""
        return read_auto_resume_policy(read_run(self.stores(key[0]), key[1]).workflow)

    def forget_run(self, key: RunKey) -> None:
        """Free the memory kept for a run that is settled."""
        with self._lock:
            self._status_since.pop(key, None)

    def _reconcile(
        self, key: RunKey, shutdowns: Mapping[str, str], alert: str, observation: RunObservation | None
    ) -> ReconcileResult:
        store, submitter = self.stores(key[0]), self._submitter(key[0])
        current = observation or observe_run(store, submitter, key[1], self.read_policy(key), shutdowns)
        decision = decide_auto_resume(
            current, self._seconds_in_status(key, current), self.limits, requested_by_alert=bool(alert)
        )
        if decision.reason == "EndedByPerson":
            self._record_left_alone(store, current)
        if decision.reason in _LEFT_TO_PEOPLE and current.status is SubmissionStatus.FAILED and self._may_write():
            close_submission(store, current.run, current.submission)
        if decision.action is not AutoResumeAction.RESUME:
            return ReconcileResult(decision, current)
        if (delayed := self._decide_delay(key[0], current)) is not None:
            return ReconcileResult(delayed, current)
        if self.limits.mode is not AutomationMode.ON:
            return ReconcileResult(decision, current)
        require_leadership(self.is_leader)
        try:
            resumed = auto_resume_run(store, submitter, current, decision, alert)
        except (UsageError, IntegrityError) as error:
            return ReconcileResult(AutoResumeDecision(AutoResumeAction.LEAVE_ALONE, "Refused", str(error)), current)
        if resumed.submission is None:
            return ReconcileResult(
                AutoResumeDecision(AutoResumeAction.LEAVE_ALONE, "NothingMissing", "all its steps are finished"),
                current,
            )
        return ReconcileResult(decision, current, resumed)

    def _submitter(self, namespace: str) -> ClusterSubmitter:
        return TenantSubmitter(self.submitter(), namespace)

    def _decide_delay(self, namespace: str, observation: RunObservation) -> AutoResumeDecision | None:
        """Delay a resume that is due: the observations are unreliable, or the rate limit is reached."""
        health = self.observation_health(namespace)
        if doubt := find_distrust_reason(
            health, self.limits, vanished=observation.status is SubmissionStatus.WORKFLOW_GONE
        ):
            return AutoResumeDecision(AutoResumeAction.WAIT, "HealthUnknown", doubt, self.limits.healthy_seconds)
        if not observation.is_intended and self.limits.mode is AutomationMode.ON and (seconds := self._bucket.take()):
            message = f"the limit of {self.limits.resumes_per_minute:g} automatic resumes per minute is reached"
            return AutoResumeDecision(AutoResumeAction.WAIT, "RateLimited", message, seconds)
        return None

    def _seconds_in_status(self, key: RunKey, observation: RunObservation) -> float:
        """Seconds since the run was first observed in this status, by the monotonic clock: clocks of writers differ."""
        now = self.monotonic()
        first = self._status_since.get(key)
        if first is None or first[:2] != (observation.submission, observation.status):
            first = self._status_since[key] = (observation.submission, observation.status, now)
        return now - first[2]

    def _may_write(self) -> bool:
        return self.limits.mode is AutomationMode.ON and self.is_leader()

    def _record_left_alone(self, store: Store, observation: RunObservation) -> None:
        """Record that a person ended the run; the Workflow that shows it may be deleted later."""
        if observation.policy is not None and observation.submission and self._may_write():
            record = ManualStopRecord(
                run=observation.run, submission=observation.submission, reason=observation.person_reason
            )
            claim_record(store, RunLayout(observation.run).manual_stop(observation.submission), record)
