"""Maps alerts to actions, and chooses the next action for one alert.

The administrator's rules name one action per alert name. The next action also
depends on what became of the alert's run since the alert first fired.
"""

import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from tiphys.errors import UsageError
from tiphys_controller.auto_resume.state import SubmissionStatus

ANY_ALERT = "*"
RUN_LABELS = ("tiphys_run", "label_tiphys_dev_run", "run")
WORKFLOW_LABELS = ("workflow", "workflow_name", "label_workflows_argoproj_io_workflow")


class AlertAction(StrEnum):
    """Action that a rule assigns to an alert name."""

    RESUME = "resume"
    """Resume the run if it has ended."""
    SAVE_AND_RESTART = "save-and-restart"
    """Stop the Workflow, so that programs save a checkpoint, and resume the run once it has ended."""
    FORK = "fork"
    """Fork the run from its newest checkpoint; the run itself is left alone."""
    NOTIFY = "notify"
    """Report the alert as an Event of the Workflow, and do nothing else."""
    IGNORE = "ignore"


AlertRules = Mapping[str, AlertAction]
"""Actions by alert name; ``*`` covers all other names."""

DEFAULT_ALERT_RULES: AlertRules = {ANY_ALERT: AlertAction.NOTIFY}
_RULES_ADAPTER = TypeAdapter(dict[str, AlertAction])


def read_alert_rules(file: Path) -> AlertRules:
    """Read rules from a JSON file, such as ``{"TrainingStalled": "save-and-restart", "*": "notify"}``.

    Raises:
        UsageError: the file cannot be read, or does not hold rules.
    """
    try:
        return {**DEFAULT_ALERT_RULES, **_RULES_ADAPTER.validate_python(json.loads(file.read_text()))}
    except OSError as error:
        raise UsageError(f"cannot read alert rules from {file}: {error.strerror}") from error
    except (ValueError, ValidationError) as error:
        actions = ", ".join(AlertAction)
        raise UsageError(
            f"{file} is not an alert rules file: write a JSON object that maps alert names to one of {actions}"
        ) from error


def choose_alert_action(rules: AlertRules, name: str) -> AlertAction:
    return rules.get(name) or rules.get(ANY_ALERT, AlertAction.NOTIFY)


def find_run_label(labels: Mapping[str, str]) -> str:
    """Name of the run in the labels of an alert; empty without one."""
    return next((labels[name] for name in RUN_LABELS if labels.get(name)), "")


def find_workflow_label(labels: Mapping[str, str]) -> str:
    """Name of the Workflow in the labels of an alert; empty without one."""
    return next((labels[name] for name in WORKFLOW_LABELS if labels.get(name)), "")


class HandlerAction(StrEnum):
    """Next action of the handler for an alert."""

    NOTIFY = "notify"
    RECONCILE = "reconcile"
    """Resume the run if no brake forbids it."""
    STOP = "stop"
    FORK = "fork"
    WAIT = "wait"
    SKIP_RESOLVED = "skip-resolved"
    """The alert was resolved before an action was due."""
    SKIP_SUPERSEDED = "skip-superseded"
    """A newer submission exists, so the alert is out of date."""


class AlertState(NamedTuple):
    """State of an alert and of its run."""

    action: AlertAction
    is_resolved: bool
    alert_submission: int
    """Last submission of the run when the alert was first handled."""
    last_submission: int
    """Last submission of the run now."""
    status: SubmissionStatus
    is_stopping: bool
    """Whether its Workflow has a ``spec.shutdown``."""
    is_intended: bool
    """Whether a controller has recorded that it is about to make the next submission."""


def choose_handler_action(state: AlertState) -> HandlerAction:
    """Choose the next action for one alert."""
    if state.action in (AlertAction.NOTIFY, AlertAction.IGNORE):
        return HandlerAction.NOTIFY
    if state.last_submission > state.alert_submission:
        return HandlerAction.SKIP_SUPERSEDED
    if state.action is AlertAction.FORK:
        return HandlerAction.SKIP_RESOLVED if state.is_resolved else HandlerAction.FORK
    if state.action is AlertAction.RESUME or state.status is not SubmissionStatus.RUNNING:
        return HandlerAction.RECONCILE
    if state.is_stopping:
        return HandlerAction.WAIT
    return HandlerAction.SKIP_RESOLVED if state.is_resolved and not state.is_intended else HandlerAction.STOP
