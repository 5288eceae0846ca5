"""Runs the alert handler while this controller leads, and reports results as Events."""

import threading
from collections.abc import Callable, Mapping

import structlog

from tiphys.errors import StoreError, TiphysError, UsageError
from tiphys.records import AlertRecord, AlertResultRecord, RunRecord
from tiphys.store import RunLayout, Store, find_record
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
_log = structlog.get_logger()


class AlertWorker:
    """Handles the pending alerts of all tenants in rounds."""

    def __init__(
        self,
        inbox: AlertInbox,
        rules: AlertRules,
        reconciler: AutoResumeReconciler,
        stores: Callable[[str], Store],
        view: WatchCache,
        writer: ClusterWriter,
        metrics: ControllerMetrics,
        namespaces: tuple[str, ...] | None,
    ) -> None:
        self._inbox = inbox
        self._stores = stores
        self._view = view
        self._writer = writer
        self._metrics = metrics
        self._namespaces = namespaces
        self._handler = AlertHandler(stores, reconciler, rules, self)

    def run(self, stop: threading.Event) -> None:
        """Work until ``stop``."""
        ticks, waiting = 0, 0
        while not stop.is_set():
            arrived = self._inbox.arrived.wait(_TICK_SECONDS)
            self._inbox.arrived.clear()
            ticks += 1
            if (arrived or waiting or ticks >= _FULL_ROUND_TICKS) and not stop.is_set():
                ticks, waiting = 0, self.run_round()

    def run_round(self) -> int:
        """Handle all pending alerts; returns how many must wait."""
        waiting = 0
        for namespace in self._served_namespaces():
            try:
                waiting += self._handler.handle_pending(namespace)
            except StoreError as error:
                self._metrics.failures.labels("alert").inc()
                _log.warning("alerts.unanswered", namespace=namespace, error=str(error))
            except TiphysError as error:
                self._metrics.failures.labels("alert").inc()
                _log.warning("alerts.failed", namespace=namespace, error=str(error))
            except Exception:  # noqa: BLE001  the worker loop: a bug about one alert must not silence all tenants
                self._metrics.failures.labels("alert").inc()
                _log.exception("alerts.crashed", namespace=namespace)
        self._metrics.alerts_waiting.set(waiting)
        return waiting

    def find_run(self, namespace: str, labels: Mapping[str, str]) -> str:
        store, name, workflow = self._stores(namespace), find_run_label(labels), find_workflow_label(labels)
        if not name and workflow:
            view = next((one for one in self._view.workflows() if _has_name(one, namespace, workflow)), None)
            if view is not None and (submission := find_submission(store, view)) is not None:
                return submission.run
            name = workflow  # the first Workflow of a run has the name of the run
        try:
            is_recorded = name and find_record(store, RunLayout(name).run_record, RunRecord)
        except UsageError:  # no run can have such a name
            return ""
        return name if is_recorded else ""

    def find_shutdowns(self, namespace: str) -> Mapping[str, str]:
        return {one.uid: one.shutdown for one in self._view.workflows() if one.namespace == namespace and one.shutdown}

    def record_handled(self, key: RunKey, alert: str, record: AlertRecord, done: AlertResultRecord) -> None:
        self._metrics.alerts.labels(done.outcome).inc()
        _log.info("alert.handled", namespace=key[0], run=key[1], alert=alert, outcome=done.outcome, why=done.message)
        for workflow in self._view.workflows():
            if workflow.namespace != key[0] or key[1] not in (workflow.run, workflow.admitted_run):
                continue
            try:
                self._writer.record_event(workflow, alert_handled_message(alert, record.name, done))
            except TiphysError as error:  # the action is done; the run's own events record it
                _log.warning("alert.not_told", namespace=key[0], workflow=workflow.name, error=str(error))

    def _served_namespaces(self) -> list[str]:
        if self._namespaces is not None:
            return list(self._namespaces)
        return self._view.namespaces()


def _has_name(workflow: WorkflowView, namespace: str, name: str) -> bool:
    return (workflow.namespace, workflow.name) == (namespace, name)
