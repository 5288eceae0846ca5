"""The outcome of a check: what was found, and the line that repairs it."""

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple


class State(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    """Runs go on, but slower or with less than they could have."""
    UNKNOWN = "unknown"
    """This account may not see it."""
    FAILED = "failed"
    """Runs would hang or fail."""


class Finding(NamedTuple):
    """One check. ``remedy`` is a command or a setting; empty where nothing is to be done."""

    name: str
    state: State
    sentence: str
    remedy: str = ""


def ok(name: str, sentence: str) -> Finding:
    """Nothing is to be done."""
    return Finding(name, State.OK, sentence)


def warning(name: str, sentence: str, remedy: str) -> Finding:
    """It works, and could work better."""
    return Finding(name, State.WARNING, sentence, remedy)


def failed(name: str, sentence: str, remedy: str) -> Finding:
    """It does not work."""
    return Finding(name, State.FAILED, sentence, remedy)


def unknown(name: str, reason: str, remedy: str = "") -> Finding:
    """It cannot be told, which is no failure."""
    return Finding(name, State.UNKNOWN, f"cannot tell, because {reason}", remedy)


def usable(findings: Iterable[Finding]) -> bool:
    """Whether runs can go on: nothing failed."""
    return all(finding.state is not State.FAILED for finding in findings)
