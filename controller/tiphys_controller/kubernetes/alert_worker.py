"""Has alerts acted upon while this controller leads, and says beside the Workflow what came of them."""

import threading
from collections.abc import Callable, Mapping

import structlog

from tiphys.errors import StoreError, TiphysError, UsageError
from tiphys.records import AlertDone, AlertRecord, RunRecord
from tiphys.store import RunLayout, Store, find_record
from tiphys_controller.alerts.handler import Orders
from tiphys_controller.alerts.rules import Rules, run_label, workflow_label
from tiphys_controller.alerts.webhook import Inbox
from tiphys_controller.auto_resume.act import Attendant
from tiphys_controller.auto_resume.state import RunKey
from tiphys_controller.kubernetes.events.messages import alert_handled
from tiphys_controller.kubernetes.metrics import Metrics
from tiphys_controller.kubernetes.watch_cache import ClusterView
from tiphys_controller.kubernetes.workflow_view import SeenWorkflow, find_place
from tiphys_controller.kubernetes.writer import Writer

_TICK_SECONDS = 1.0
_PATROL_TICKS = 10
"""Alerts that another replica took in are found by then."""
_log = structlog.get_logger()


class AlertWorker:
    """One round goes through all alerts of all tenants that are not done."""

    def __init__(
        self,
        inbox: Inbox,
        rules: Rules,
        attendant: Attendant,
        stores: Callable[[str], Store],
        view: ClusterView,
        writer: Writer,
        metrics: Metrics,
        namespaces: tuple[str, ...] | None,
    ) -> None:
        self._inbox = inbox
        self._stores = stores
        self._view = view
        self._writer = writer
        self._metrics = metrics
        self._namespaces = namespaces
        self._orders = Orders(stores, attendant, rules, self)

    def run(self, over: threading.Event) -> None:
        """Work until ``over``."""
        ticks, waiting = 0, 0
        while not over.is_set():
            arrived = self._inbox.arrived.wait(_TICK_SECONDS)
            self._inbox.arrived.clear()
            ticks += 1
            if (arrived or waiting or ticks >= _PATROL_TICKS) and not over.is_set():
                ticks, waiting = 0, self.round()

    def round(self) -> int:
        """Do what can be done now; answers how many alerts have to wait."""
        waiting = 0
        for namespace in self._tenants():
            try:
                waiting += self._orders.work(namespace)
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
        store, named, workflow = self._stores(namespace), run_label(labels), workflow_label(labels)
        if not named and workflow:
            seen = next((one for one in self._view.workflows() if _is(one, namespace, workflow)), None)
            if seen is not None and (place := find_place(store, seen)) is not None:
                return place.run
            named = workflow  # the first Workflow of a run has its name
        try:
            known = named and find_record(store, RunLayout(named).record, RunRecord)
        except UsageError:  # no run can have such a name
            return ""
        return named if known else ""

    def shutdowns(self, namespace: str) -> Mapping[str, str]:
        return {one.uid: one.shutdown for one in self._view.workflows() if one.namespace == namespace and one.shutdown}

    def handled(self, key: RunKey, alert: str, record: AlertRecord, done: AlertDone) -> None:
        self._metrics.alerts.labels(done.outcome).inc()
        _log.info("alert.handled", namespace=key[0], run=key[1], alert=alert, outcome=done.outcome, why=done.message)
        for workflow in self._view.workflows():
            if workflow.namespace != key[0] or key[1] not in (workflow.run, workflow.admitted_run):
                continue
            try:
                self._writer.tell(workflow, alert_handled(alert, record.name, done))
            except TiphysError as error:  # what was done stays done, and the run's own events tell it
                _log.warning("alert.not_told", namespace=key[0], workflow=workflow.name, error=str(error))

    def _tenants(self) -> list[str]:
        if self._namespaces is not None:
            return list(self._namespaces)
        return self._view.namespaces()


def _is(workflow: SeenWorkflow, namespace: str, name: str) -> bool:
    return (workflow.namespace, workflow.name) == (namespace, name)
