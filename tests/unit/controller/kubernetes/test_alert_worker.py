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
from tiphys.records import AlertRecord, AlertResultRecord, SubmissionBinding, SubmissionClaim, SubmissionKind
from tiphys.store import RunLayout


class Events:
    """Names of the Workflows beside which an Event was written."""

    def __init__(self) -> None:
        self.workflows: list[str] = []
        self.namespaces: set[str] = set()

    def record_event(self, found: WorkflowView, message: Any) -> None:
        self.workflows.append(found.name)
        self.namespaces.add(found.namespace)


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


def test_an_alert_concerns_the_workflows_of_its_own_tenant_alone() -> None:
    """Another tenant has a Workflow of the same name and the same run, which is stopped."""
    draw, view, events = Irregular(), WatchCache(), Events()
    (near, far), (run, name) = draw.namespaces(2), draw.run_names(2)
    stores = {namespace: MemoryStore(namespace=namespace) for namespace in (far, near)}
    for namespace, store in stores.items():
        own = run if namespace == near else f"{run}-of-another"
        where = {"run": own, "submission": 1, "namespace": namespace, "workflow_name": name}
        claim = SubmissionClaim(**where, kind=SubmissionKind.ORIGINAL)
        store.create(RunLayout(own).submission(1), claim.to_bytes())
        binding = SubmissionBinding(**where, cluster="west", uid=f"uid-of-{namespace}")
        store.create(RunLayout(own).submission_binding(1), binding.to_bytes())
        found = workflow(name, namespace=namespace, run=own, uid=f"uid-of-{namespace}", spec={"shutdown": "Stop"})
        again = workflow("again", namespace=namespace, run=run, uid=f"again-of-{namespace}")
        view.apply_workflow_change(namespace, ListSnapshot([found, again]))
    inbox = AlertInbox(stores.__getitem__, (near, far))
    worker = AlertWorker(inbox, {}, None, stores.__getitem__, view, events, ControllerMetrics(), lambda: [near, far])  # type: ignore[arg-type]
    record = AlertRecord(name="RunFailed", status="firing", fingerprint="f", starts_at="2026-01-01T00:00:00Z")

    assert worker.find_run(near, {"workflow": name}) == run
    assert worker.find_shutdowns(near) == {f"uid-of-{near}": "Stop"}
    worker.record_handled((near, run), "a" * 32, record, AlertResultRecord(outcome="told", message="why"))
    assert events.namespaces == {near}
    assert sorted(events.workflows) == sorted([name, "again"])


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
