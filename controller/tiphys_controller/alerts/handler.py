"""Acts on alerts that lie in storage: each is pinned to one submission of one run, so it is acted upon once."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from tiphys.errors import ConflictError, IntegrityError, NotFoundError, UsageError
from tiphys.records import AlertDone, AlertRecord, AlertTaken, AutomaticResume, Event
from tiphys.records.names import LONGEST_RUN_NAME
from tiphys.store import RunLayout, Store, append_events, claim, find_record, read_record, submissions
from tiphys.store.layout import ALERTS, alert_key, parse_alert
from tiphys_controller.alerts.rules import AlertAction, Move, Rules, Situation, next_move, rule_for
from tiphys_controller.auto_resume.act import Attendant
from tiphys_controller.auto_resume.decide import Action
from tiphys_controller.auto_resume.state import Mode, Observed, RunKey, Standing

_ALERT_DIGITS = 8
_log = structlog.get_logger()


class Surroundings(Protocol):
    """What the worker asks of the cluster."""

    def find_run(self, namespace: str, labels: Mapping[str, str]) -> str:
        """The run that an alert is about; empty for none."""

    def shutdowns(self, namespace: str) -> Mapping[str, str]:
        """By uid, ``spec.shutdown`` of Workflows for which that was seen."""

    def handled(self, key: RunKey, alert: str, record: AlertRecord, done: AlertDone) -> None:
        """An alert was acted upon; said once."""


@dataclass
class Orders:
    """All alerts of all tenants that are not done yet."""

    stores: Callable[[str], Store]
    attendant: Attendant
    rules: Rules
    around: Surroundings
    _done: set[tuple[str, str]] = field(default_factory=set)

    def work(self, namespace: str) -> int:
        """Do what can be done for each alert of a tenant; answers how many have to wait.

        Raises:
            StoreError: storage or API server is out of reach; what was not done is done the next time.
            FencedError: another controller leads by now.
        """
        store, found = self.stores(namespace), defaultdict[str, set[str]](set)
        for info in store.list(ALERTS):
            if (place := parse_alert(info.key)) is not None and (namespace, place[0]) not in self._done:
                found[place[0]].add(place[1])
        waiting = 0
        for alert, kept in found.items():
            if "done" in kept or ("firing" in kept and self._act(namespace, alert, resolved="resolved" in kept)):
                self._done.add((namespace, alert))
            else:
                waiting += "firing" in kept
        return waiting

    def _act(self, namespace: str, alert: str, *, resolved: bool) -> bool:
        """One alert that fires, or did; whether it is done with."""
        store = self.stores(namespace)
        record = read_record(store, alert_key(alert, "firing"), AlertRecord)
        taken = self._take(store, namespace, alert, record)
        key = (namespace, taken.run)
        if not taken.run:
            return self._finish(
                key, alert, record, AlertDone(outcome="unmatched", message="it names no run that is here")
            )
        try:
            moved = self._moved(key, alert, taken, record, resolved)
        except (NotFoundError, UsageError, IntegrityError) as error:
            moved = AlertDone(outcome="refused", message=str(error))
        except ConflictError as error:
            _log.info("alert.put_off", namespace=namespace, run=taken.run, alert=alert, reason=str(error))
            return False
        return moved is not None and self._finish(key, alert, record, moved)

    def _take(self, store: Store, namespace: str, alert: str, record: AlertRecord) -> AlertTaken:
        held = find_record(store, alert_key(alert, "taken"), AlertTaken)
        if held is not None:
            return held
        run = self.around.find_run(namespace, record.labels)
        last = max((one.claim.submission for one in submissions(store, run)), default=0) if run else 0
        wanted = AlertTaken(action=rule_for(self.rules, record.name), run=run, submission=last)
        return claim(store, alert_key(alert, "taken"), wanted).record

    def _moved(
        self, key: RunKey, alert: str, taken: AlertTaken, record: AlertRecord, resolved: bool
    ) -> AlertDone | None:
        """Make the next move for an alert; None while it has to wait."""
        action, shutdowns = AlertAction(taken.action), self.around.shutdowns(key[0])
        seen = self.attendant.examine(key, shutdowns)
        match next_move(_situation(action, resolved, taken, seen, shutdowns)):
            case Move.TELL:
                return AlertDone(outcome="told", message=record.summary or "it fires")
            case Move.DROP:
                return AlertDone(outcome="resolved", message="it was resolved before anything was done")
            case Move.GONE_ON:
                return self._gone_on(key, alert, action, taken.submission + 1)
            case Move.WAIT:
                return None
            case Move.FORK:
                return self._forked(key, alert)
            case Move.STOP:
                decision = self.attendant.restart(key, alert)
                if decision.action is Action.LEAVE:
                    return AlertDone(outcome="left", message=decision.message)
                if decision.action is Action.RESUME and self.attendant.mode is not Mode.ON:
                    return self._not_done("had it save and end, and resumed it", record.summary or "it fires")
                return None
            case Move.ATTEND:
                return self._attended(key, alert, action, shutdowns)
        return None

    def _attended(self, key: RunKey, alert: str, action: AlertAction, shutdowns: Mapping[str, str]) -> AlertDone | None:
        attended = self.attendant.attend(key, shutdowns, alert=alert)
        if attended.resumed is not None:
            return _resumed(action, attended.resumed.submission or 0, attended.decision.message)
        if attended.decision.action is Action.WAIT:
            return None
        if attended.decision.action is Action.RESUME:
            return self._not_done("resumed it", attended.decision.message)
        return AlertDone(outcome="left", message=attended.decision.message)

    def _forked(self, key: RunKey, alert: str) -> AlertDone | None:
        name = fork_name(key[1], alert)
        decision = self.attendant.fork(key, name)
        if decision.action is Action.WAIT:
            return None
        if decision.action is Action.LEAVE:
            return AlertDone(outcome="left", message=decision.message)
        if self.attendant.mode is not Mode.ON:
            return self._not_done("forked it", decision.message)
        return AlertDone(outcome="forked", message=f"run {name} goes on from run {key[1]}")

    def _not_done(self, would: str, why: str) -> AlertDone:
        """What was decided, where nothing is done: said once, as if it had been."""
        dry = self.attendant.mode is Mode.DRY_RUN
        instead = f"dry run: would have {would}" if dry else "not done, since nothing goes on by itself here"
        return AlertDone(outcome="left", message=f"{instead}: {why}")

    def _gone_on(self, key: RunKey, alert: str, action: AlertAction, submission: int) -> AlertDone:
        made = find_record(self.stores(key[0]), RunLayout(key[1]).automatic(submission), AutomaticResume)
        if made is not None and made.alert == alert:
            return _resumed(action, submission, made.reason)
        return AlertDone(outcome="left", message=f"submission {submission} was made for another reason meanwhile")

    def _finish(self, key: RunKey, alert: str, record: AlertRecord, done: AlertDone) -> bool:
        store = self.stores(key[0])
        if claim(store, alert_key(alert, "done"), done).won:
            if key[1]:
                told = f"alert {record.name or alert}: {done.message}"
                data = {"alert": alert, "outcome": done.outcome}
                append_events(store, key[1], "controller", [Event(name="alert.handled", message=told, data=data)])
            self.around.handled(key, alert, record, done)
        return True


def fork_name(run: str, alert: str) -> str:
    """Name of the run that an alert has another one begin from: one for each alert."""
    return f"{run[: LONGEST_RUN_NAME - _ALERT_DIGITS - 1].rstrip('-.')}-{alert[:_ALERT_DIGITS]}"


def _situation(
    action: AlertAction, resolved: bool, taken: AlertTaken, seen: Observed, shutdowns: Mapping[str, str]
) -> Situation:
    unsent = seen.standing is Standing.UNSENT
    return Situation(
        action,
        resolved,
        about=taken.submission,
        last=min(seen.submission, taken.submission) if unsent else seen.submission,
        standing=seen.standing,
        stopping=bool(shutdowns.get(seen.uid)),
        intended=seen.intended,
    )


def _resumed(action: AlertAction, submission: int, why: str) -> AlertDone:
    outcome = "restarted" if action is AlertAction.SAVE_AND_RESTART else "resumed"
    return AlertDone(outcome=outcome, message=f"submission {submission} goes on: {why}")
