"""Acts on stored alerts.

The first handling pins an alert to one submission of one run, create-only. So
each alert leads to one action, whichever replica handles it and however often
Alertmanager delivers it.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import structlog

from tiphys.errors import ConflictError, IntegrityError, NotFoundError, UsageError
from tiphys.records import AlertClaimRecord, AlertRecord, AlertResultRecord, AutoResumeRecord, Event
from tiphys.records.names import MAX_RUN_NAME_CHARACTERS
from tiphys.store import RunLayout, Store, append_events, claim_record, find_record, read_record, read_submissions
from tiphys.store.layout import alert_key
from tiphys_controller.alerts.rules import (
    AlertAction,
    AlertRules,
    AlertState,
    HandlerAction,
    choose_alert_action,
    choose_handler_action,
)
from tiphys_controller.auto_resume.act import AutoResumeReconciler
from tiphys_controller.auto_resume.decide import AutoResumeAction
from tiphys_controller.auto_resume.state import AutomationMode, RunKey, RunObservation, SubmissionStatus

_ALERT_DIGITS = 8
_log = structlog.get_logger()


class AlertContext(Protocol):
    """Cluster state that the handler needs, and the report of what it did."""

    def find_run(self, namespace: str, labels: Mapping[str, str]) -> str:
        """Name of the run that the labels of an alert identify; empty for none."""

    def find_shutdowns(self, namespace: str) -> Mapping[str, str]:
        """``spec.shutdown`` of the Workflows that have one, by uid."""

    def record_handled(self, key: RunKey, alert: str, record: AlertRecord, done: AlertResultRecord) -> None:
        """Report that an alert was handled; called once for each alert."""


@dataclass
class AlertHandler:
    """Handles the pending alerts of every tenant."""

    stores: Callable[[str], Store]
    reconciler: AutoResumeReconciler
    rules: AlertRules
    context: AlertContext

    def handle_pending(self, namespace: str, pending: Mapping[str, Collection[str]]) -> int:
        """Perform the next action for some alerts of a tenant; returns how many of them must wait.

        ``pending`` has the kinds of the stored records by the id of the alert, of alerts that fired and have no result.

        Raises:
            StoreError: storage or API server is out of reach; the next call handles the remaining alerts.
            FencedError: another controller leads by now.
        """
        return sum(
            not self._handle_firing(namespace, alert, resolved="resolved" in kinds) for alert, kinds in pending.items()
        )

    def _handle_firing(self, namespace: str, alert: str, *, resolved: bool) -> bool:
        """Handle an alert that fires or has fired; returns whether it is done."""
        store = self.stores(namespace)
        record = read_record(store, alert_key(alert, "firing"), AlertRecord)
        claim = self._pin_alert(store, namespace, alert, record)
        key = (namespace, claim.run)
        if not claim.run:
            return self._record_done(
                key,
                alert,
                record,
                AlertResultRecord(outcome="unmatched", message="its labels name no run of this store"),
            )
        try:
            result = self._perform_next_action(key, alert, claim, record, resolved)
        except (NotFoundError, UsageError, IntegrityError) as error:
            result = AlertResultRecord(outcome="refused", message=str(error))
        except ConflictError as error:
            _log.info("alert.put_off", namespace=namespace, run=claim.run, alert=alert, reason=str(error))
            return False
        return result is not None and self._record_done(key, alert, record, result)

    def _pin_alert(self, store: Store, namespace: str, alert: str, record: AlertRecord) -> AlertClaimRecord:
        claim = find_record(store, alert_key(alert, "claim"), AlertClaimRecord)
        if claim is not None:
            return claim
        run = self.context.find_run(namespace, record.labels)
        last = (
            max((submission.claim.submission for submission in read_submissions(store, run)), default=0) if run else 0
        )
        claim = AlertClaimRecord(run=run, submission=last)
        return claim_record(store, alert_key(alert, "claim"), claim).record

    def _perform_next_action(
        self, key: RunKey, alert: str, claim: AlertClaimRecord, record: AlertRecord, resolved: bool
    ) -> AlertResultRecord | None:
        """Perform the next action for an alert; None while it must wait."""
        action = choose_alert_action(self.rules, record.name)  # by the rules of now: no record brings an action
        with self.reconciler.lock_run(key):
            shutdowns = self.context.find_shutdowns(key[0])
            observation = self.reconciler.observe(key, shutdowns)
            match choose_handler_action(_build_alert_state(action, resolved, claim, observation, shutdowns)):
                case HandlerAction.NOTIFY:
                    return AlertResultRecord(outcome="told", message=record.summary or "the alert fires")
                case HandlerAction.SKIP_RESOLVED:
                    return AlertResultRecord(outcome="resolved", message="the alert was resolved before any action")
                case HandlerAction.SKIP_SUPERSEDED:
                    return self._describe_superseded(key, alert, action, claim.submission + 1)
                case HandlerAction.WAIT:
                    return None
                case HandlerAction.FORK:
                    return self._fork_run(key, alert)
                case HandlerAction.STOP:
                    decision = self.reconciler.stop_for_restart(key, alert, observation)
                    if decision.action is AutoResumeAction.LEAVE_ALONE:
                        return AlertResultRecord(outcome="left", message=decision.message)
                    if decision.action is AutoResumeAction.RESUME and self.reconciler.mode is not AutomationMode.ON:
                        return self._describe_not_done(
                            "stopped its Workflow and resumed it", record.summary or "the alert fires"
                        )
                    return None
                case HandlerAction.RECONCILE:
                    return self._reconcile_run(key, alert, action, shutdowns, observation)
        return None

    def _reconcile_run(
        self,
        key: RunKey,
        alert: str,
        action: AlertAction,
        shutdowns: Mapping[str, str],
        observation: RunObservation,
    ) -> AlertResultRecord | None:
        reconciled = self.reconciler.reconcile(key, shutdowns, alert=alert, observation=observation)
        if reconciled.resumed is not None:
            return _describe_resumed(action, reconciled.resumed.submission or 0, reconciled.decision.message)
        if reconciled.decision.action is AutoResumeAction.WAIT:
            return None
        if reconciled.decision.action is AutoResumeAction.RESUME:
            return self._describe_not_done("resumed it", reconciled.decision.message)
        return AlertResultRecord(outcome="left", message=reconciled.decision.message)

    def _fork_run(self, key: RunKey, alert: str) -> AlertResultRecord | None:
        name = build_fork_name(key[1], alert)
        decision = self.reconciler.fork_run(key, name)
        if decision.action is AutoResumeAction.WAIT:
            return None
        if decision.action is AutoResumeAction.LEAVE_ALONE:
            return AlertResultRecord(outcome="left", message=decision.message)
        if self.reconciler.mode is not AutomationMode.ON:
            return self._describe_not_done("forked it", decision.message)
        return AlertResultRecord(outcome="forked", message=f"run {name} continues from run {key[1]}")

    def _describe_not_done(self, would: str, why: str) -> AlertResultRecord:
        """Result for a decision that the automation mode does not carry out."""
        dry = self.reconciler.mode is AutomationMode.DRY_RUN
        instead = f"dry run: would have {would}" if dry else "not done, because automatic resumes are off"
        return AlertResultRecord(outcome="left", message=f"{instead}: {why}")

    def _describe_superseded(self, key: RunKey, alert: str, action: AlertAction, submission: int) -> AlertResultRecord:
        resume = find_record(self.stores(key[0]), RunLayout(key[1]).auto_resume(submission), AutoResumeRecord)
        if resume is not None and resume.alert == alert:
            return _describe_resumed(action, submission, resume.reason)
        return AlertResultRecord(outcome="left", message=f"submission {submission} was made for another reason")

    def _record_done(self, key: RunKey, alert: str, record: AlertRecord, done: AlertResultRecord) -> bool:
        store = self.stores(key[0])
        if claim_record(store, alert_key(alert, "result"), done).is_ours:
            if key[1]:
                message = f"alert {record.name or alert}: {done.message}"
                data = {"alert": alert, "outcome": done.outcome}
                append_events(store, key[1], "controller", [Event(name="alert.handled", message=message, data=data)])
            self.context.record_handled(key, alert, record, done)
        return True


def build_fork_name(run: str, alert: str) -> str:
    """Name of the fork that an alert makes of a run; each alert has its own."""
    return f"{run[: MAX_RUN_NAME_CHARACTERS - _ALERT_DIGITS - 1].rstrip('-.')}-{alert[:_ALERT_DIGITS]}"


def _build_alert_state(
    action: AlertAction,
    resolved: bool,
    claim: AlertClaimRecord,
    observation: RunObservation,
    shutdowns: Mapping[str, str],
) -> AlertState:
    unsent = observation.status is SubmissionStatus.UNSENT
    return AlertState(
        action,
        resolved,
        alert_submission=claim.submission,
        last_submission=min(observation.submission, claim.submission) if unsent else observation.submission,
        status=observation.status,
        is_stopping=bool(shutdowns.get(observation.workflow_uid)),
        is_intended=observation.is_intended,
    )


def _describe_resumed(action: AlertAction, submission: int, why: str) -> AlertResultRecord:
    outcome = "restarted" if action is AlertAction.SAVE_AND_RESTART else "resumed"
    return AlertResultRecord(outcome=outcome, message=f"submission {submission} continues the run: {why}")
