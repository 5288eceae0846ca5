"""Makes the runs of objects: when a notification names them, and when a listing of the bucket finds them.

A notification is handled by the replica that receives it, before it is answered.
The leader lists the buckets, because notifications get lost: a storage service
sends some of them once, and the controller may be down. Both come to the same
run (`tiphys_controller.submit.triggers.start`).

Namespaces take turns, and each has a limited rate, so that the objects of one
tenant do not delay those of another.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import structlog
from cachetools import FIFOCache

from tiphys.errors import ConflictError, FencedError, NotFoundError, SettingsError, StoreError, TiphysError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.records import ObjectVersion
from tiphys.records.trigger import TriggerSource
from tiphys.service.tenant_guard import TenantGuard
from tiphys.store import Store
from tiphys_controller.submit.submitter import ClusterSubmitter, TenantSubmitter
from tiphys_controller.submit.triggers.bucket import Buckets
from tiphys_controller.submit.triggers.catalog import Trigger, TriggerCatalog, TriggerProblem
from tiphys_controller.submit.triggers.notification import NotifiedObject
from tiphys_controller.submit.triggers.start import (
    TriggeredRun,
    build_triggered_pipeline,
    check_object_name,
    find_triggered_run,
    start_triggered_run,
)

_CATALOG_SECONDS = 10.0
"""A new trigger learns of notifications after this time; a listing finds what came before."""
_REMEMBERED_OBJECTS = 100_000
_PARALLEL_DELIVERIES = 8
_PAGES_PER_TURN = 2
_STARTS_PER_TURN = 20
_TICK_SECONDS = 1.0
_REPORTS, _REPORTS_SECONDS = 20, 3600.0
_log = structlog.get_logger()


class TriggerOutcome(StrEnum):
    """What became of an object for one trigger."""

    STARTED = "started"
    REPEATED = "repeated"
    """Its run was made before."""
    DELAYED = "delayed"
    """The rate of the namespace is used up; a listing makes the run."""
    WAITING = "waiting"
    """The run to resume still runs; the next listing tries again."""
    REFUSED = "refused"
    """No run can be made; the log says why. The next listing tries again."""


class TriggerMetrics(Protocol):
    """What the worker reports."""

    def observe_triggered_run(self, source: str) -> None: ...

    def observe_trigger_failure(self) -> None: ...

    def set_trigger_state(self, waiting: int, problems: int) -> None: ...


@dataclass
class _Sweep:
    """How far the listing of a trigger's objects has come."""

    after: str = ""
    """Key of the last object that was looked at; empty before the first."""
    is_due: bool = True
    waiting: int = 0
    waited: int = 0
    """Waiting objects of the last complete listing."""


@dataclass
class _Reports:
    """Reasons for which a trigger made no run, that were logged since ``since`` (seconds of the monotonic clock)."""

    since: float
    reasons: set[str] = field(default_factory=set)


@dataclass
class TriggerWorker:
    """Makes the runs of objects. Thread-safe but for `run` and `run_round`, which the leader calls."""

    catalog: TriggerCatalog
    buckets: Buckets
    stores: Callable[[str], Store]
    submitter: Callable[[], ClusterSubmitter]
    find_template: Callable[[str, str], Manifest | None]
    """Returns a WorkflowTemplate by namespace and name, as it is now."""
    take_start: Callable[[str], float]
    """Takes the right to start a run in a namespace; returns 0, or the seconds until there is one."""
    metrics: TriggerMetrics
    monotonic: Callable[[], float]
    interval_seconds: float
    """Time between two listings of a bucket."""
    _done: FIFOCache[tuple[str, str, str], None] = field(default_factory=lambda: FIFOCache(_REMEMBERED_OBJECTS))
    _reports: dict[tuple[str, str], _Reports] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _deliveries: threading.BoundedSemaphore = field(
        default_factory=lambda: threading.BoundedSemaphore(_PARALLEL_DELIVERIES)
    )
    _sweeps: dict[tuple[str, str], _Sweep] = field(default_factory=dict)

    @property
    def _guard(self) -> TenantGuard:
        return TenantGuard("triggers", self.metrics.observe_trigger_failure)

    def handle_notification(self, notified: Sequence[NotifiedObject]) -> dict[str, int]:
        """Make the runs of the objects that a notification names.

        Returns:
            Numbers of outcomes, one for each trigger that wants an object, and of objects that no trigger wants.

        Raises:
            StoreError: storage or API server does not answer, or too many notifications are in work. The sender must
                repeat the notification; otherwise a listing finds the objects.
        """
        if not self._deliveries.acquire(blocking=False):
            raise StoreError(f"{_PARALLEL_DELIVERIES} notifications are in work; repeat this one")
        try:
            return self._handle(notified)
        finally:
            self._deliveries.release()

    def _handle(self, notified: Sequence[NotifiedObject]) -> dict[str, int]:
        triggers = self.catalog.read(_CATALOG_SECONDS).triggers
        counts = Counter({"unwanted": 0, **{outcome.value: 0 for outcome in TriggerOutcome}})
        failure: StoreError | None = None
        for notice in notified:
            outcomes: list[TriggerOutcome] = []
            for key in notice.keys:
                interested = [trigger for trigger in triggers if self._may_want(trigger, notice.bucket, key)]
                try:
                    outcomes += self._make_runs(interested, notice.bucket, key)
                except StoreError as error:  # the other objects may belong to tenants whose storage answers
                    failure = error
            counts.update([outcome.value for outcome in outcomes] or ["unwanted"])
        if failure is not None:
            raise failure
        return dict(counts)

    def _make_runs(self, triggers: Sequence[Trigger], bucket: str, key: str) -> list[TriggerOutcome]:
        version = self.buckets.find(bucket, key) if triggers else None
        if version is None:
            return []
        outcomes: list[TriggerOutcome] = []
        failure: StoreError | None = None
        for trigger in triggers:
            if not trigger.wants(version):
                continue
            try:
                outcomes.append(self._make_run(trigger, version, "delivered"))
            except StoreError as error:
                failure = error
        if failure is not None:
            raise failure
        return outcomes

    def _may_want(self, trigger: Trigger, bucket: str, key: str) -> bool:
        stored = self.catalog.sources.is_stored_by_tiphys(bucket, key)
        return not stored and trigger.spec.matches(bucket, key)

    def _make_run(self, trigger: Trigger, version: ObjectVersion, source: TriggerSource) -> TriggerOutcome:
        """Make the run of an object that a trigger wants.

        Raises:
            StoreError: storage or API server does not answer.
        """
        identity = (trigger.namespace, trigger.template, version.digest)
        with self._lock:
            if identity in self._done:
                return TriggerOutcome.REPEATED
        try:
            made = self._start(trigger, version, source)
        except TiphysError as error:
            # A tenant can cause a `SettingsError`, and its sender may also report objects of others.
            is_outage = isinstance(error, StoreError) and not isinstance(error, SettingsError)
            if is_outage or isinstance(error, FencedError):
                raise
            self._report(trigger, f"{version.url}: {error}")
            waits = isinstance(error, ConflictError) and trigger.spec.resume
            return TriggerOutcome.WAITING if waits else TriggerOutcome.REFUSED
        except Exception:  # noqa: BLE001  a tenant writes the template, which must not end the work for the others
            self.metrics.observe_trigger_failure()
            _log.exception("trigger.crashed", namespace=trigger.namespace, trigger=trigger.template)
            return TriggerOutcome.REFUSED
        if made is None:
            return TriggerOutcome.DELAYED
        self._remember(identity)
        if not made.is_new:
            return TriggerOutcome.REPEATED
        self.metrics.observe_triggered_run(source)
        _log.info(
            "trigger.started",
            namespace=trigger.namespace,
            trigger=trigger.template,
            object=version.url,
            etag=version.etag,
            source=source,
            run=made.record.run,
            submission=made.record.submission,
        )
        return TriggerOutcome.STARTED

    def _start(self, trigger: Trigger, version: ObjectVersion, source: TriggerSource) -> TriggeredRun | None:
        """The run of an object; None while the rate of the namespace is used up."""
        check_object_name(version)
        store = self.stores(trigger.namespace)
        if (existing := find_triggered_run(store, trigger, version)) is not None:
            return TriggeredRun(existing, is_new=False)
        template = self.find_template(trigger.namespace, trigger.template)
        if template is None:
            raise NotFoundError(f"WorkflowTemplate {trigger.namespace}/{trigger.template} was deleted")
        pipeline = build_triggered_pipeline(trigger, template, version)  # what is refused takes nothing of the rate
        if self.take_start(trigger.namespace):
            return None
        submitter = TenantSubmitter(self.submitter(), trigger.namespace)
        return start_triggered_run(store, submitter, trigger, pipeline, version, source)

    def _remember(self, identity: tuple[str, str, str]) -> None:
        with self._lock:
            self._done[identity] = None

    def _report(self, trigger: Trigger | TriggerProblem, why: str) -> None:
        """Log why a trigger makes no run: a reason once, as each listing comes to it again, and few reasons an hour.

        The number of reasons depends on names of objects, which tenants choose.
        """
        self.metrics.observe_trigger_failure()
        now, reason = self.monotonic(), why[:2000]
        with self._lock:
            reports = self._reports.get((trigger.namespace, trigger.template))
            if reports is None or now - reports.since >= _REPORTS_SECONDS:
                reports = self._reports[trigger.namespace, trigger.template] = _Reports(now)
            is_known = reason in reports.reasons or len(reports.reasons) > _REPORTS
            if not is_known:
                reports.reasons.add(reason)
            is_last = not is_known and len(reports.reasons) > _REPORTS
        if is_last:
            reason = "there are more reasons; `tiphys triggers --test URL` says what becomes of an object"
        if not is_known:
            _log.warning("trigger.refused", namespace=trigger.namespace, trigger=trigger.template, reason=reason)

    def run(self, stop: threading.Event) -> None:
        """List the buckets until ``stop``."""
        listed_at = float("-inf")
        while not stop.is_set():
            now = self.monotonic()
            if is_due := now - listed_at >= self.interval_seconds:
                listed_at = now
            if is_due or any(sweep.is_due for sweep in self._sweeps.values()):
                with self._guard.visit():
                    self.run_round(stop, begin=is_due)
            stop.wait(min(_TICK_SECONDS, self.interval_seconds))

    def run_round(self, stop: threading.Event, *, begin: bool = True) -> None:
        """Give each trigger with objects to look at a turn; ``begin``: all triggers begin a listing, or go on with it.

        Raises:
            StoreError: the API server does not answer.
        """
        listed = self.catalog.read(0.0 if begin else _CATALOG_SECONDS)
        for problem in listed.problems:
            self._report(problem, problem.reason)
        self._sweeps = {
            (trigger.namespace, trigger.template): self._sweeps.get((trigger.namespace, trigger.template)) or _Sweep()
            for trigger in listed.triggers
        }
        known = self._sweeps.keys() | {(problem.namespace, problem.template) for problem in listed.problems}
        with self._lock:
            self._reports = {key: reports for key, reports in self._reports.items() if key in known}
        for trigger in listed.triggers:
            sweep = self._sweeps[trigger.namespace, trigger.template]
            sweep.is_due |= begin
            if sweep.is_due and not stop.is_set():
                self._take_guarded_turn(trigger, sweep, stop)
        waiting = sum(max(sweep.waiting, sweep.waited) for sweep in self._sweeps.values())
        self.metrics.set_trigger_state(waiting, len(listed.problems))

    def _take_guarded_turn(self, trigger: Trigger, sweep: _Sweep, stop: threading.Event) -> None:
        is_done = False
        with self._guard.visit(namespace=trigger.namespace, trigger=trigger.template):
            try:
                self._take_turn(trigger, sweep, stop)
                is_done = True
            except TiphysError as error:
                self._report(trigger, str(error))
        sweep.is_due &= is_done  # after a failure, the next listing goes on here

    def _take_turn(self, trigger: Trigger, sweep: _Sweep, stop: threading.Event) -> None:
        starts = 0
        for _ in range(_PAGES_PER_TURN):
            page = self.buckets.list_page(trigger.spec.bucket, trigger.spec.prefix, sweep.after)
            for version in page.versions:
                if stop.is_set() or starts >= _STARTS_PER_TURN:
                    return
                if self._may_want(trigger, version.bucket, version.key) and trigger.wants(version):
                    outcome = self._make_run(trigger, version, "found")
                    if outcome is TriggerOutcome.DELAYED:
                        return
                    starts += outcome in (TriggerOutcome.STARTED, TriggerOutcome.REFUSED)
                    sweep.waiting += outcome is TriggerOutcome.WAITING
                sweep.after = version.key
            if not page.next_key:
                sweep.after, sweep.is_due, sweep.waiting, sweep.waited = "", False, 0, sweep.waiting
                return
            sweep.after = page.next_key
