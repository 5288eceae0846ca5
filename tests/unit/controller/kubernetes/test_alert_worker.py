"""Where an alert is told: beside the Workflows of its run, and of none if it names no run of the store."""

from typing import Any

import pytest
from structlog.testing import capture_logs
from support.builders.argo_objects import workflow
from support.builders.irregular_samples import Irregular
from support.fakes.memory_store import MemoryStore
from tiphys_controller.alerts.webhook import AlertInbox
from tiphys_controller.kubernetes.alert_worker import AlertSweep, AlertWorker
from tiphys_controller.kubernetes.metrics import ControllerMetrics
from tiphys_controller.kubernetes.watch_cache import WatchCache
from tiphys_controller.kubernetes.workflow_view import WorkflowView

from tiphys.kube import ListSnapshot
from tiphys.records import AlertRecord, AlertResultRecord


class Events:
    """Names of the Workflows beside which an Event was written."""

    def __init__(self) -> None:
        self.workflows: list[str] = []

    def record_event(self, found: WorkflowView, message: Any) -> None:
        self.workflows.append(found.name)


@pytest.mark.parametrize(("run", "expected"), [("", []), ("digits-1", ["digits-1"]), ("digits-9", [])])
def test_an_alert_becomes_an_event_of_the_workflows_of_its_run_only(run: str, expected: list[str]) -> None:
    store, view, events, metrics = MemoryStore(), WatchCache(), Events(), ControllerMetrics()
    named, unnamed = workflow("digits-1", run="digits-1"), workflow("unrelated")
    view.apply_workflow_change("ml", ListSnapshot([named, unnamed]))
    inbox = AlertInbox(lambda _: store, lambda: ["ml"])
    worker = AlertWorker(inbox, {}, None, lambda _: store, view, events, metrics, lambda: ["ml"])  # type: ignore[arg-type]
    record = AlertRecord(name="RunFailed", status="firing", fingerprint="f", starts_at="2026-01-01T00:00:00Z")
    done = AlertResultRecord(outcome="unmatched" if not run else "told", message="why")

    with capture_logs() as logs:
        worker.record_handled(("ml", run), "a" * 32, record, done)

    assert events.workflows == expected
    assert [entry["event"] for entry in logs] == ["alert.handled" if run else "alert.unmatched"]
    assert metrics.registry.get_sample_value("tiphys_controller_alerts_handled_total", {"outcome": done.outcome}) == 1


def test_waiting_alerts_of_all_tenants_are_counted_once_in_the_middle_of_a_sweep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    near, far = Irregular().namespaces(2)
    store, metrics = MemoryStore(), ControllerMetrics()
    inbox = AlertInbox(lambda _: store, (near, far))
    worker = AlertWorker(inbox, {}, None, lambda _: store, WatchCache(), Events(), metrics, lambda: [near, far])  # type: ignore[arg-type]
    found = {near: AlertSweep("a", waiting=2, waited=3), far: AlertSweep("b", waiting=1)}

    def take_turn(namespace: str, sweep: AlertSweep) -> None:
        vars(sweep).update(vars(found[namespace]))

    monkeypatch.setattr(worker, "_take_turn", take_turn)
    assert worker.run_round() == 3 + 1
    assert metrics.registry.get_sample_value("tiphys_controller_alerts_waiting") == 4
    assert worker.has_backlog
