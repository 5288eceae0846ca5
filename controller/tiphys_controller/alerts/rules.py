"""What to do for which alert: the administrator's rules, and the next move for one alert. Pure."""

import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from tiphys.errors import UsageError
from tiphys_controller.auto_resume.state import Standing

OTHERS = "*"
RUN_LABELS = ("tiphys_run", "label_tiphys_dev_run", "run")
WORKFLOW_LABELS = ("workflow", "workflow_name", "label_workflows_argoproj_io_workflow")


class AlertAction(StrEnum):
    """What an alert of one name asks for."""

    RESUME = "resume"
    """Resume its run if that has ended."""
    SAVE_AND_RESTART = "save-and-restart"
    """Stop its Workflow, so that programs save, and resume the run once that is over."""
    FORK = "fork"
    """Begin another run that goes on from its newest checkpoint; the run itself is left alone."""
    NOTIFY = "notify"
    """Tell of it beside the Workflow, and do nothing."""
    IGNORE = "ignore"


Rules = Mapping[str, AlertAction]
"""By name of the alert; ``*`` stands for all others."""

NOTIFY_OF_ALL: Rules = {OTHERS: AlertAction.NOTIFY}
_FORM = TypeAdapter(dict[str, AlertAction])


def read_rules(file: Path) -> Rules:
    """Rules from a JSON file, such as ``{"TrainingStalled": "save-and-restart", "*": "notify"}``.

    Raises:
        UsageError: there is no such file, or it says something else.
    """
    try:
        return {**NOTIFY_OF_ALL, **_FORM.validate_python(json.loads(file.read_text()))}
    except OSError as error:
        raise UsageError(f"cannot read the rules for alerts from {file}: {error.strerror}") from error
    except (ValueError, ValidationError) as error:
        known = ", ".join(AlertAction)
        raise UsageError(
            f"{file} holds no rules for alerts: give a JSON object of alert names and one of {known}"
        ) from error


def rule_for(rules: Rules, name: str) -> AlertAction:
    return rules.get(name) or rules.get(OTHERS, AlertAction.NOTIFY)


def run_label(labels: Mapping[str, str]) -> str:
    """The run that an alert names; empty for none."""
    return next((labels[name] for name in RUN_LABELS if labels.get(name)), "")


def workflow_label(labels: Mapping[str, str]) -> str:
    """The Workflow that an alert names; empty for none."""
    return next((labels[name] for name in WORKFLOW_LABELS if labels.get(name)), "")


class Move(StrEnum):
    """The next thing to do for an alert."""

    TELL = "tell"
    ATTEND = "attend"
    """Have the run resumed if nothing speaks against it."""
    STOP = "stop"
    FORK = "fork"
    WAIT = "wait"
    DROP = "drop"
    """It was resolved before anything had to be done."""
    GONE_ON = "gone-on"
    """Another submission was made since: whatever the alert said was about the one before."""


class Situation(NamedTuple):
    """What an alert has met."""

    action: AlertAction
    resolved: bool
    about: int
    """Number of the submission that was the last one when it was first looked at."""
    last: int
    """Of the one that is the last now."""
    standing: Standing
    stopping: bool
    """Whether its Workflow has been asked to end."""
    intended: bool
    """Whether the submission after it was decided on."""


def next_move(now: Situation) -> Move:
    """What to do for one alert."""
    if now.action in (AlertAction.NOTIFY, AlertAction.IGNORE):
        return Move.TELL
    if now.last > now.about:
        return Move.GONE_ON
    if now.action is AlertAction.FORK:
        return Move.DROP if now.resolved else Move.FORK
    if now.action is AlertAction.RESUME or now.standing is not Standing.RUNS:
        return Move.ATTEND
    if now.stopping:
        return Move.WAIT
    return Move.DROP if now.resolved and not now.intended else Move.STOP
