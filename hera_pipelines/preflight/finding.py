"""The result of a preflight check: a status of `tiphys doctor`, and the step and line that it is about."""

from typing import NamedTuple

from tiphys_controller.doctor import CheckStatus


class PreflightFinding(NamedTuple):
    """Result of one check. ``remedy`` is empty if nothing is to be done."""

    check: str
    state: CheckStatus
    sentence: str
    remedy: str = ""
    step: str = ""
    """The step, or the template of a plain task; empty for the whole Workflow."""


def passed(check: str, sentence: str, step: str = "") -> PreflightFinding:
    """A finding without a problem."""
    return PreflightFinding(check, CheckStatus.OK, sentence, "", step)


def warning(check: str, sentence: str, remedy: str, step: str = "") -> PreflightFinding:
    """A finding about something that may go wrong."""
    return PreflightFinding(check, CheckStatus.WARNING, sentence, remedy, step)


def problem(check: str, sentence: str, remedy: str, step: str = "") -> PreflightFinding:
    """A finding about something that will go wrong."""
    return PreflightFinding(check, CheckStatus.FAILED, sentence, remedy, step)


def not_checked(check: str, reason: str, remedy: str = "", step: str = "") -> PreflightFinding:
    """A finding about something that could not be looked at, which is no failure."""
    return PreflightFinding(check, CheckStatus.UNKNOWN, f"not checked: {reason}", remedy, step)
