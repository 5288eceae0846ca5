"""The result of a check: its status, a sentence, and the remedy."""

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple


class CheckStatus(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    """Runs work, but slower or with fewer features."""
    UNKNOWN = "unknown"
    """This account may not read it."""
    FAILED = "failed"
    """Runs would hang or fail."""


class DoctorFinding(NamedTuple):
    """Result of one check. ``remedy`` is a command or a setting; empty if none is needed."""

    name: str
    state: CheckStatus
    sentence: str
    remedy: str = ""


def ok_finding(name: str, sentence: str) -> DoctorFinding:
    """A finding without a problem."""
    return DoctorFinding(name, CheckStatus.OK, sentence)


def warning_finding(name: str, sentence: str, remedy: str) -> DoctorFinding:
    """A finding about something that works, and could work better."""
    return DoctorFinding(name, CheckStatus.WARNING, sentence, remedy)


def failed_finding(name: str, sentence: str, remedy: str) -> DoctorFinding:
    """A finding about something that does not work."""
    return DoctorFinding(name, CheckStatus.FAILED, sentence, remedy)


def unknown_finding(name: str, reason: str, remedy: str = "") -> DoctorFinding:
    """A finding that could not be determined, which is no failure."""
    return DoctorFinding(name, CheckStatus.UNKNOWN, f"cannot tell, because {reason}", remedy)


def is_cluster_usable(findings: Iterable[DoctorFinding]) -> bool:
    """Whether runs can work: no check failed."""
    return all(finding.state is not CheckStatus.FAILED for finding in findings)
