"""Runs the alert handler while this controller leads, and reports results as Events.

Tenants take turns. A turn looks at a limited number of stored objects and handles
a limited number of alerts, and the next one goes on behind them: the thousands of
alerts of one tenant delay another tenant by a turn. Nothing is kept of an alert
between two turns but how far its tenant has come.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby

import structlog

from tiphys.errors import TiphysError, UsageError
from tiphys.records import AlertRecord, AlertResultRecord, RunRecord
from tiphys.service.tenant_guard import TenantGuard
from tiphys.store import RunLayout, Store, find_record
from tiphys.store.base import ObjectInfo
from tiphys.store.layout import ALERTS, parse_alert
from tiphys_controller.alerts.handler import AlertHandler
from tiphys_controller.alerts.rules import AlertRules, find_run_label, find_workflow_label
from tiphys_controller.alerts.webhook import AlertInbox
from tiphys_controller.auto_resume.act import AutoResumeReconciler
from tiphys_controller.auto_resume.state import RunKey
from tiphys_controller.kubernetes.events.messages import alert_handled_message
from tiphys_controller.kubernetes.metrics import ControllerMetrics
from tiphys_controller.kubernetes.watch_cache import WatchCache
from tiphys_controller.kubernetes.workflow_view import WorkflowView, find_submission
from tiphys_controller.kubernetes.writer import ClusterWriter

_TICK_SECONDS = 1.0
_FULL_ROUND_TICKS = 10
"""Rounds without a local alert: they find alerts that another replica stored."""
_ALERTS_PER_TURN = 20
_OBJECTS_PER_TURN = 2000
"""Objects listed in a turn; most of them belong to alerts that were handled."""
_OBJECTS_PER_LISTING = 50
"""What a listing counts beside its objects, because an empty one is a request as well."""
_SHARDS = tuple(f"{number:02x}" for number in range(256))
_log = structlog.get_logger()


@dataclass
class AlertWorker:
    """Handles the pending alerts of all tenants in rounds, in which each tenant has a turn."""

    inbox: AlertInbox
    rules: AlertRules
    reconciler: AutoResumeReconciler
    stores: Callable[[str], Store]
    view: WatchCache
    writer: ClusterWriter
    metrics: ControllerMetrics
    tenants: Callable[[], list[str]]
    _sweeps: "dict[str, AlertSweep]" = field(default_factory=dict)
    has_backlog: bool = False
    """Whether the last round left alerts to look at."""

    def __post_init__(self) -> None:
        self._guard = TenantGuard("alerts", self.metrics.failures.labels("alert").inc)
        self._handler = AlertHandler(self.stores, self.reconciler, self.rules, self)

    def run(self, stop: threading.Event) -> None:
        """Work until ``stop``."""
        ticks, waiting = 0, 0
        while not stop.is_set():
            arrived = self.inbox.arrived.wait(0 if self.has_backlog else _TICK_SECONDS)
            self.inbox.arrived.clear()
            ticks += 1
            if (arrived or waiting or self.has_backlog or ticks >= _FULL_ROUND_TICKS) and not stop.is_set():
                ticks, waiting = 0, self.run_round()

    def run_round(self) -> int:
        """Give each tenant a turn; returns how many of the alerts looked at must wait."""
        self._sweeps = {name: self._sweeps.get(name) or AlertSweep() for name in self.tenants()}
        self.has_backlog = False
        for namespace, sweep in self._sweeps.items():
            with self._guard.visit(namespace=namespace):
                self._take_turn(namespace, sweep)
                self.has_backlog |= bool(sweep.after)
        waiting = sum(max(sweep.waiting, sweep.waited) for sweep in self._sweeps.values())
        self.metrics.alerts_waiting.set(waiting)
        return waiting

    def _take_turn(self, namespace: str, sweep: "AlertSweep") -> None:
        pending = sweep.find_next_pending(self.stores(namespace))
        sweep.count_waiting(self._handler.handle_pending(namespace, pending))

    def find_run(self, namespace: str, labels: Mapping[str, str]) -> str:
        store, name, workflow = self.stores(namespace), find_run_label(labels), find_workflow_label(labels)
        if not name and workflow:
            view = next((found for found in self.view.workflows() if _has_name(found, namespace, workflow)), None)
            if view is not None and (submission := find_submission(store, view)) is not None:
                return submission.run
            name = workflow  # the first Workflow of a run has the name of the run
        try:
            is_recorded = name and find_record(store, RunLayout(name).run_record, RunRecord)
        except UsageError:  # no run can have such a name
            return ""
        return name if is_recorded else ""

    def find_shutdowns(self, namespace: str) -> Mapping[str, str]:
        return {
            workflow.uid: workflow.shutdown
            for workflow in self.view.workflows()
            if workflow.namespace == namespace and workflow.shutdown
        }

    def record_handled(self, key: RunKey, alert: str, record: AlertRecord, done: AlertResultRecord) -> None:
        self.metrics.alerts.labels(done.outcome).inc()
        if not key[1]:
            _log.warning("alert.unmatched", namespace=key[0], alert=alert, name=record.name, why=done.message)
            return
        _log.info("alert.handled", namespace=key[0], run=key[1], alert=alert, outcome=done.outcome, why=done.message)
        for workflow in self.view.workflows():
            if workflow.namespace != key[0] or key[1] not in (workflow.run, workflow.admitted_run):
                continue
            try:
                self.writer.record_event(workflow, alert_handled_message(alert, record.name, done))
            except TiphysError as error:  # the action is done; the run's own events record it
                _log.warning("alert.not_reported", namespace=key[0], workflow=workflow.name, error=str(error))


def _has_name(workflow: WorkflowView, namespace: str, name: str) -> bool:
    return (workflow.namespace, workflow.name) == (namespace, name)


@dataclass
class AlertSweep:
    """How far the worker has come with the alerts of one tenant. It goes through them again and again."""

    after: str = ""
    """Id of the last alert that was looked at; empty before the first and after the last."""
    passed: int = 0
    """Objects listed since the first."""
    waiting: int = 0
    """Alerts found waiting since the first."""
    waited: int = 0
    """The same of the sweep before."""

    def find_next_pending(self, store: Store) -> dict[str, set[str]]:
        """Kinds of the stored records by the id of the alert, of the next alerts that fired and have no result.

        Raises:
            StoreError: storage is out of reach; the next call goes on where this one began.
        """
        pending: dict[str, set[str]] = {}
        objects = 0
        for prefix in self._remaining_prefixes():
            objects += _OBJECTS_PER_LISTING
            for alert, infos in groupby(store.list(prefix), _alert_directory):
                if alert <= self.after:
                    continue
                kinds = set()
                for info in infos:
                    objects += 1
                    if parsed := parse_alert(info.key):
                        kinds.add(parsed[1])
                if "firing" in kinds and "result" not in kinds:
                    pending[alert] = kinds
                if len(pending) >= _ALERTS_PER_TURN or objects >= _OBJECTS_PER_TURN:
                    self.after, self.passed = alert, self.passed + objects
                    return pending
        self.after, self.passed = "", 0
        return pending

    def count_waiting(self, waiting: int) -> None:
        """Count the alerts of the last turn that must wait."""
        self.waiting += waiting
        if not self.after:
            self.waiting, self.waited = 0, self.waiting

    def _remaining_prefixes(self) -> Iterator[str]:
        # A listing cannot begin in the middle: a few objects are listed again, to skip them. Where they are many, one
        # listing for each first byte goes on close to the place, because ids are evenly spread hashes.
        if self.passed < _OBJECTS_PER_TURN:
            return iter((ALERTS,))
        return (f"{ALERTS}{shard}" for shard in _SHARDS if shard >= self.after[:2])


def _alert_directory(info: ObjectInfo) -> str:
    return info.key.removeprefix(ALERTS).partition("/")[0]
