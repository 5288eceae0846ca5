"""What every check of a store, of a cluster or of a pipeline has in common: its findings, and how it is run.

A check is a pure generator function of an observation. It yields findings, and `check` adds its name to each. A value
that could not be read ends the check: `known` turns it into a finding, and never guesses.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import wraps
from typing import NamedTuple, ParamSpec, TypeVar

ValueT = TypeVar("ValueT")
Observed = ParamSpec("Observed")


class CheckStatus(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    """Runs work, but slower or with fewer features, or something may go wrong."""
    UNKNOWN = "unknown"
    """It could not be looked at, which is no failure."""
    FAILED = "failed"
    """Runs would hang or fail."""


class Finding(NamedTuple):
    """Result of a check. ``remedy`` is a command or a setting; empty if nothing is to be done."""

    check: str
    state: CheckStatus
    sentence: str
    remedy: str = ""
    place: str = ""
    """Namespace of workflows, or step of the pipeline, that it is about; empty: all."""

    @property
    def name(self) -> str:
        """Name of the check, behind the place."""
        return f"{self.place}/{self.check}" if self.place else self.check


@dataclass(frozen=True)
class UnknownValue:
    """A value that could not be read, with the reason."""

    reason: str


class _UnknownError(Exception):
    """A check needs a value that could not be read."""


def passed(sentence: str, place: str = "") -> Finding:
    """A finding without a problem."""
    return Finding("", CheckStatus.OK, sentence, "", place)


def warning(sentence: str, remedy: str, place: str = "") -> Finding:
    """A finding about something that works and could work better, or that may go wrong."""
    return Finding("", CheckStatus.WARNING, sentence, remedy, place)


def failed(sentence: str, remedy: str, place: str = "") -> Finding:
    """A finding about something that does not work, or will go wrong."""
    return Finding("", CheckStatus.FAILED, sentence, remedy, place)


def not_checked(reason: str, remedy: str = "", place: str = "") -> Finding:
    """A finding about something that could not be looked at."""
    return Finding("", CheckStatus.UNKNOWN, f"not checked: {reason}", remedy, place)


def known(value: ValueT | UnknownValue) -> ValueT:
    """The value; inside of a check only, which ends with the reason if there is none."""
    if isinstance(value, UnknownValue):
        raise _UnknownError(value.reason)
    return value


def check(name: str) -> Callable[[Callable[Observed, Iterable[Finding]]], Callable[Observed, list[Finding]]]:
    """Make a check of a generator function: its findings get ``name``."""

    def frame(examine: Callable[Observed, Iterable[Finding]]) -> Callable[Observed, list[Finding]]:
        @wraps(examine)
        def run(*observed: Observed.args, **options: Observed.kwargs) -> list[Finding]:
            return [finding._replace(check=name) for finding in _end_at_unknown(examine(*observed, **options))]

        return run

    return frame


def _end_at_unknown(findings: Iterable[Finding]) -> Iterator[Finding]:
    try:
        yield from findings
    except _UnknownError as error:
        yield not_checked(str(error))


def failed_checks(findings: Iterable[Finding]) -> list[str]:
    """Names of the checks that failed. Warnings, and what was not checked, do not count."""
    return list(dict.fromkeys(finding.check for finding in findings if finding.state is CheckStatus.FAILED))
