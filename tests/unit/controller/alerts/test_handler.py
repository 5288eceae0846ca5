"""From a delivery of Alertmanager to one act: taken in durably, pinned to a submission, done once.

| the alert asks for | its run | outcome |
|---|---|---|
| resume | has ended | resumed, however often it is delivered |
| resume | goes on, or a person ended it | left |
| save-and-restart | goes on | stopped, then resumed |
| save-and-restart | goes on, and it was resolved | nothing |
| notify | any | told |
| any of these, where nothing goes on by itself or in a dry run | any | left, with what would have been done |
| anything | is not here | unmatched |
"""

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.builders.compiled_workflows import History, gated, pipeline_of
from support.fakes.counting_store import CountingStore
from support.fakes.submitter import FakeSubmitter
from support.processes.failpoints import dying_at
from tiphys_controller import LiveWorkflow, resume_run, start_run
from tiphys_controller.alerts.handler import AlertHandler, build_fork_name
from tiphys_controller.alerts.rules import (
    AlertAction,
    AlertState,
    HandlerAction,
    choose_alert_action,
    choose_handler_action,
    find_run_label,
    find_workflow_label,
    read_alert_rules,
)
from tiphys_controller.alerts.webhook import AlertInbox, DeliveryReceipt, parse_delivery
from tiphys_controller.auto_resume.act import AutoResumeReconciler, stop_workflow
from tiphys_controller.auto_resume.observation_health import ObservationHealth
from tiphys_controller.auto_resume.state import AutomationMode, AutoResumeLimits, SubmissionStatus
from tiphys_controller.kubernetes.alert_worker import AlertSweep

from tiphys.errors import UsageError
from tiphys.records import AlertResultRecord, AutoResumeRecord, Cause, RunRecord
from tiphys.store import ObjectInfo, RunLayout, Store, find_record, read_events, read_record
from tiphys.store.layout import alert_key

RUN = "digits-1"
STARTS = "2026-05-04T11:00:00.000Z"
RULES = {
    "RunFailed": AlertAction.RESUME,
    "TrainingStalled": AlertAction.SAVE_AND_RESTART,
    "Diverged": AlertAction.FORK,
    "Other": AlertAction.NOTIFY,
}


def alert(name: str = "RunFailed", status: str = "firing", fingerprint: str = "ab12", **labels: str) -> dict[str, Any]:
    given = {"alertname": name, "namespace": "default", "tiphys_run": RUN, **labels}
    annotations = {"summary": f"{name} of {RUN}"}
    stamp = {"startsAt": STARTS, "endsAt": "0001-01-01T00:00:00Z", "fingerprint": fingerprint}
    return {"status": status, "labels": given, "annotations": annotations, **stamp}


def delivery(*alerts: dict[str, Any]) -> dict[str, Any]:
    return {"version": "4", "groupKey": "{}", "status": "firing", "receiver": "tiphys", "alerts": list(alerts)}


class StoppableSubmitter(FakeSubmitter):
    """It remembers which Workflows were asked to end."""

    stopped: list[str]

    def stop(self, workflow: LiveWorkflow, strategy: Any = None) -> None:
        self.stopped = [*getattr(self, "stopped", []), workflow.name]


class Desk:
    """The inbox and the worker of one controller."""

    def __init__(self, store: Store, submitter: StoppableSubmitter, mode: AutomationMode = AutomationMode.ON) -> None:
        self.store, self.submitter = store, submitter
        self.now = 1000.0
        self.shut: dict[str, str] = {}
        self.handled_: list[tuple[str, str]] = []
        self.inbox = AlertInbox(lambda _: store, ("default",))
        self.attendant = AutoResumeReconciler(
            lambda _: store,
            lambda: submitter,  # type: ignore[arg-type, return-value]
            lambda: True,
            lambda _: ObservationHealth(),
            lambda: self.now,
            AutoResumeLimits(mode=mode, resumes_per_minute=6000.0),
        )
        self.orders = AlertHandler(lambda _: store, self.attendant, RULES, self)

    def deliver(self, *alerts: dict[str, Any]) -> DeliveryReceipt:
        return self.inbox.store_delivery(parse_delivery(delivery(*alerts)))

    def work(self) -> int:
        self.now += 1
        return self.orders.handle_pending("default", AlertSweep().find_next_pending(self.store))

    def find_run(self, namespace: str, labels: Mapping[str, str]) -> str:
        named = find_run_label(labels)
        return named if named and self.store.list(RunLayout(named).control) and named == RUN else ""

    def find_shutdowns(self, namespace: str) -> Mapping[str, str]:
        return self.shut

    def record_handled(self, key: tuple[str, str], alert: str, record: Any, done: AlertResultRecord) -> None:
        self.handled_.append((record.name, done.outcome))


@pytest.fixture
def submitter(tmp_path: Path) -> StoppableSubmitter:
    return StoppableSubmitter(tmp_path / "cluster")


@pytest.fixture
def desk(store: Store, submitter: StoppableSubmitter) -> Desk:
    start_run(store, submitter, pipeline_of(gated("prep"), gated("fit", depends="prep")), RUN)
    History(store, RUN).done("prep")
    return Desk(store, submitter)


def ended(desk: Desk) -> None:
    History(desk.store, RUN).failed("fit")
    desk.submitter.end(RUN)


def test_a_thousand_duplicated_and_reordered_deliveries_make_one_resume(desk: Desk, store: Store) -> None:
    ended(desk)
    chance = random.Random(3)
    replicas = [desk, Desk(store, desk.submitter), Desk(store, desk.submitter)]
    firing, resolved = alert(), alert(status="resolved")
    for number in range(1000):
        replica = chance.choice(replicas)
        replica.deliver(*chance.choice([(firing,), (resolved,), (resolved, firing), (firing, firing)]))
        if number % 50 == 0:
            chance.choice(replicas).work()
    for replica in replicas:
        replica.work()
    assert desk.submitter.names() == [RUN, f"{RUN}-2"]
    assert [outcome for one in replicas for _, outcome in one.handled_] == ["resumed"]
    [event] = [one for one in read_events(store, RUN) if one.name == "alert.handled"]
    assert event.data["outcome"] == "resumed"


def test_alerts_about_the_same_end_make_one_resume(desk: Desk) -> None:
    ended(desk)
    desk.deliver(alert(fingerprint="1"), alert(fingerprint="2"))
    assert desk.work() == 0
    desk.submitter.end(f"{RUN}-2")
    assert desk.work() == 0, "they were about the first submission"
    assert desk.submitter.names() == [RUN, f"{RUN}-2"]
    assert [outcome for _, outcome in desk.handled_] == ["resumed", "left"]


@pytest.mark.parametrize("point", ["automatic.after_intent", "resume.after_claim", "resume.after_create"])
def test_a_worker_that_dies_is_followed_by_one_that_finishes(desk: Desk, point: str) -> None:
    ended(desk)
    desk.deliver(alert())
    with dying_at(point):
        desk.work()
    other = Desk(desk.store, desk.submitter)
    other.now += 200
    for _ in range(3):
        other.work()
    assert desk.submitter.names() == [RUN, f"{RUN}-2"]
    assert [outcome for _, outcome in other.handled_] == ["resumed"]


def test_a_run_that_goes_on_is_not_resumed(desk: Desk) -> None:
    desk.deliver(alert())
    desk.work()
    assert desk.handled_ == [("RunFailed", "left")]
    assert desk.submitter.names() == [RUN]


def test_an_alert_does_not_resume_a_run_that_a_person_stopped(desk: Desk) -> None:
    ended(desk)
    desk.shut[f"uid-of-{RUN}"] = "Terminate"
    desk.deliver(alert())
    desk.work()
    assert desk.handled_ == [("RunFailed", "left")]
    assert desk.submitter.names() == [RUN]


def test_a_broken_program_is_left_to_its_author(desk: Desk) -> None:
    History(desk.store, RUN).failed("fit", cause=Cause.USER_ERROR)
    desk.submitter.end(RUN)
    desk.deliver(alert())
    desk.work()
    assert desk.submitter.names() == [RUN]


def test_a_run_is_stopped_so_that_it_saves_and_then_goes_on(desk: Desk) -> None:
    desk.deliver(alert("TrainingStalled"))
    assert desk.work() == 1
    assert desk.submitter.stopped == [RUN]
    assert read_record(desk.store, RunLayout(RUN).auto_resume(2), AutoResumeRecord).alert
    desk.shut[f"uid-of-{RUN}"] = "Stop"
    assert desk.work() == 1
    assert desk.submitter.stopped == [RUN], "asked once"
    ended(desk)
    # Another controller, that knows nothing of it but what is stored.
    other = Desk(desk.store, desk.submitter)
    other.shut = desk.shut
    assert other.work() == 0
    assert desk.submitter.names() == [RUN, f"{RUN}-2"]
    assert other.handled_ == [("TrainingStalled", "restarted")]


def test_stop_of_a_run_spares_another_workflow_that_has_its_name_by_now(desk: Desk) -> None:
    stop_workflow(desk.store, desk.submitter, RUN)
    assert desk.submitter.stopped == [RUN]
    desk.submitter.delete(RUN)
    desk.submitter.create({"metadata": {"name": RUN, "namespace": "default", "uid": "another"}})
    stop_workflow(desk.store, desk.submitter, RUN)
    assert desk.submitter.stopped == [RUN]


def test_a_worker_that_died_before_it_stopped_a_run_does_so_when_it_is_back(desk: Desk) -> None:
    desk.deliver(alert("TrainingStalled"))
    with dying_at("automatic.after_intent"):
        desk.work()
    other = Desk(desk.store, desk.submitter)
    other.deliver(alert("TrainingStalled", status="resolved"))
    assert other.work() == 1
    assert desk.submitter.stopped == [RUN], "it was decided, and the run must not end without a successor"


@pytest.mark.parametrize("point", ["", "start.after_record", "start.after_claim", "start.after_create"])
def test_an_alert_forks_a_run_once(desk: Desk, point: str) -> None:
    desk.deliver(alert("Diverged"))
    if point:
        with dying_at(point):
            desk.work()
    other = Desk(desk.store, desk.submitter)
    for _ in range(3):
        other.deliver(alert("Diverged"))
        other.work()
    name = build_fork_name(RUN, parse_delivery(delivery(alert("Diverged"))).alerts[0].id)
    assert desk.submitter.names() == [RUN, name]
    assert read_record(desk.store, RunLayout(name).run_record, RunRecord).parent == RUN
    assert other.handled_ == [("Diverged", "forked")]


def test_a_run_that_is_well_again_is_not_restarted(desk: Desk) -> None:
    desk.deliver(alert("TrainingStalled", status="resolved"), alert("TrainingStalled"))
    assert desk.work() == 0
    assert desk.handled_ == [("TrainingStalled", "resolved")]
    assert not hasattr(desk.submitter, "stopped")


def test_an_alert_without_a_rule_is_recorded_as_told_only(desk: Desk) -> None:
    ended(desk)
    desk.deliver(alert("Other"), alert("Unheard", fingerprint="2"), alert(fingerprint="3", tiphys_run="nobody"))
    assert desk.work() == 0
    assert sorted(desk.handled_) == [("Other", "told"), ("RunFailed", "unmatched"), ("Unheard", "told")]
    assert desk.submitter.names() == [RUN]


def test_an_alert_about_a_submission_already_resumed_is_left(desk: Desk) -> None:
    ended(desk)
    desk.deliver(alert())
    desk.orders._pin_alert(
        desk.store,
        "default",
        parse_delivery(delivery(alert())).alerts[0].id,
        parse_delivery(delivery(alert())).alerts[0].to_record(),
    )
    resume_run(desk.store, desk.submitter, RUN)
    desk.submitter.end(f"{RUN}-2")
    desk.work()
    assert desk.submitter.names() == [RUN, f"{RUN}-2"]
    assert desk.handled_ == [("RunFailed", "left")]


@pytest.mark.parametrize(
    ("name", "runs"), [("RunFailed", False), ("TrainingStalled", False), ("TrainingStalled", True)]
)
def test_an_alert_scans_the_results_of_its_run_once(desk: Desk, name: str, runs: bool) -> None:
    if not runs:
        ended(desk)
    scanned: list[str] = []

    class ScanCounter(CountingStore):
        def list(self, prefix: str) -> Iterator[ObjectInfo]:
            scanned.append(prefix)
            return super().list(prefix)

    # Without automation nothing is submitted, so all scans belong to the decision.
    counting = Desk(ScanCounter(desk.store), desk.submitter, AutomationMode.OFF)
    counting.deliver(alert(name))
    counting.work()

    assert counting.handled_ == [(name, "left")]
    assert scanned.count(RunLayout(RUN).done_markers) == 1
    assert scanned.count(RunLayout(RUN).attempts) == 1
    assert scanned.count(RunLayout(RUN).all_progress) == 1


FORK = build_fork_name(RUN, parse_delivery(delivery(alert("Diverged"))).alerts[0].id)


@pytest.mark.parametrize(
    ("name", "runs", "would", "why"),
    [
        ("RunFailed", False, "resumed it", "step fit failed by preemption"),
        ("TrainingStalled", False, "resumed it", "step fit failed by preemption"),
        ("TrainingStalled", True, "stopped its Workflow and resumed it", f"TrainingStalled of {RUN}"),
        ("Diverged", True, "forked it", f"run {FORK} continues from it"),
    ],
)
@pytest.mark.parametrize("mode", [AutomationMode.OFF, AutomationMode.DRY_RUN])
def test_an_alert_without_permission_records_the_action_that_was_left_out(
    desk: Desk, mode: AutomationMode, name: str, runs: bool, would: str, why: str
) -> None:
    if not runs:
        ended(desk)
    still = Desk(desk.store, desk.submitter, mode)
    still.deliver(alert(name))

    assert still.work() == 0, "it does not wait for what nobody does"

    assert still.handled_ == [(name, "left")]
    done = read_record(
        desk.store, alert_key(parse_delivery(delivery(alert(name))).alerts[0].id, "result"), AlertResultRecord
    )
    begins = (
        "not done, because automatic resumes are off" if mode is AutomationMode.OFF else f"dry run: would have {would}"
    )
    assert done.message == f"{begins}: {why}"
    assert desk.submitter.names() == [RUN]
    assert not hasattr(desk.submitter, "stopped")
    assert find_record(desk.store, RunLayout(RUN).auto_resume(2), AutoResumeRecord) is None


def test_an_alert_is_the_same_by_fingerprint_and_start(desk: Desk) -> None:
    first, again = parse_delivery(delivery(alert(), {**alert(), "endsAt": STARTS})).alerts
    later = parse_delivery(delivery({**alert(), "startsAt": "2026-05-04T12:00:00.000Z"})).alerts[0]
    assert first.id == again.id != later.id


@pytest.mark.parametrize(
    ("namespaces", "label", "expected"),
    [
        (("ml",), "ml", "ml"),
        (("ml",), "", "ml"),
        (("ml",), "other", ""),
        (("ml", "nlp"), "nlp", "nlp"),
        (("ml", "nlp"), "", ""),
        (None, "any", "any"),
        (None, "", ""),
        (None, "../../x", ""),
        (None, "a/b", ""),
    ],
)
def test_an_alert_belongs_to_the_tenant_of_its_namespace_label(
    namespaces: tuple[str, ...] | None, label: str, expected: str
) -> None:
    inbox = AlertInbox(lambda _: pytest.fail("nothing is stored here"), namespaces)
    assert inbox.find_tenant({"namespace": label} if label else {}) == expected


def test_an_alert_of_an_unknown_tenant_is_counted_and_not_stored(desk: Desk) -> None:
    assert desk.deliver(alert(namespace="another"), alert()) == DeliveryReceipt(accepted=1, unmatched=1)
    kept = [info.key for info in desk.store.list("control/alerts/")]
    assert kept == [alert_key(parse_delivery(delivery(alert())).alerts[0].id, "firing")]


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ([], "the document"),
        ({}, "version: Field required"),
        ({"version": "3", "alerts": []}, "version '3'; only Alertmanager's version 4"),
        (delivery({**alert(), "status": "unsure"}), "alerts.0.status"),
        (delivery({**alert(), "fingerprint": "../../runs/x"}), "hexadecimal"),
        (delivery({**alert(), "startsAt": "x" * 100}), "alerts.0.startsAt"),
        (delivery(*[alert()] * 1001), "at most 1000"),
    ],
)
def test_an_invalid_delivery_is_refused_with_the_place(document: object, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        parse_delivery(document)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"action": AlertAction.NOTIFY}, HandlerAction.NOTIFY),
        ({"action": AlertAction.IGNORE, "status": SubmissionStatus.FAILED}, HandlerAction.NOTIFY),
        ({"last_submission": 3}, HandlerAction.SKIP_SUPERSEDED),
        ({"action": AlertAction.RESUME}, HandlerAction.RECONCILE),
        ({"action": AlertAction.FORK}, HandlerAction.FORK),
        ({"action": AlertAction.FORK, "is_resolved": True}, HandlerAction.SKIP_RESOLVED),
        ({}, HandlerAction.STOP),
        ({"is_stopping": True}, HandlerAction.WAIT),
        ({"is_resolved": True}, HandlerAction.SKIP_RESOLVED),
        ({"is_resolved": True, "is_intended": True}, HandlerAction.STOP),
        ({"status": SubmissionStatus.FAILED}, HandlerAction.RECONCILE),
        ({"status": SubmissionStatus.WORKFLOW_GONE, "is_resolved": True}, HandlerAction.RECONCILE),
    ],
)
def test_the_next_move(changes: dict[str, Any], expected: HandlerAction) -> None:
    now = AlertState(AlertAction.SAVE_AND_RESTART, False, 2, 2, SubmissionStatus.RUNNING, False, False)
    assert choose_handler_action(now._replace(**changes)) is expected


def test_rules_come_from_a_file_and_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "rules.json"
    file.write_text('{"TrainingStalled": "save-and-restart"}')
    rules = read_alert_rules(file)
    assert choose_alert_action(rules, "TrainingStalled") is AlertAction.SAVE_AND_RESTART
    assert choose_alert_action(rules, "Other") is AlertAction.NOTIFY
    file.write_text('{"TrainingStalled": "reboot"}')
    with pytest.raises(UsageError, match="one of resume, save-and-restart, fork, notify, ignore"):
        read_alert_rules(file)
    with pytest.raises(UsageError, match="cannot read alert rules"):
        read_alert_rules(tmp_path / "missing.json")


def test_labels_that_name_a_run_or_a_workflow() -> None:
    assert find_run_label({"run": "a", "tiphys_run": "b"}) == "b"
    assert find_workflow_label({"workflow": "w"}) == "w"
    assert find_run_label({"workflow": "w"}) == ""


def test_the_result_of_an_alert_stays_on_record(desk: Desk) -> None:
    ended(desk)
    desk.deliver(alert())
    desk.work()
    done = find_record(
        desk.store, alert_key(parse_delivery(delivery(alert())).alerts[0].id, "result"), AlertResultRecord
    )
    assert done is not None
    assert done.outcome == "resumed"
