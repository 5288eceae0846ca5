"""Checks the schedules and the time zone of a CronWorkflow.

kubectl applies an invalid one without a word; then no Workflow ever starts.

Source: ``ParseStandard`` of github.com/robfig/cron v3, with which Argo reads
them: five fields without seconds, or a descriptor. It also accepts what can only
be a mistake, such as ``*-x``, ``1,,2`` or ``@every -1h``, and panics on a time
zone without a schedule. These are refused here.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from tiphys.errors import UsageError

_DESCRIPTORS = ("@yearly", "@annually", "@monthly", "@weekly", "@daily", "@midnight", "@hourly")
_EVERY = "@every "
_GO_DURATION = re.compile(r"\+?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:ns|us|µs|ms|s|m|h))+", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,9}")
_ZONE_PREFIX = re.compile(r"(?:CRON_)?TZ=([^ ]*) +(?! )(.*)")


class _Field(NamedTuple):
    """One field of a schedule, with its smallest and largest value."""

    name: str
    low: int
    high: int
    names: Mapping[str, int] = {}


_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_LONGEST_MONTHS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_FIELDS = (
    _Field("minute", 0, 59),
    _Field("hour", 0, 23),
    _Field("day of the month", 1, 31),
    _Field("month", 1, 12, {name: number for number, name in enumerate(_MONTHS, start=1)}),
    _Field("day of the week", 0, 6, {name: number for number, name in enumerate(_DAYS)}),
)


def check_schedules(schedules: Iterable[str], timezone: str | None) -> None:
    """Check the schedules and the time zone of a CronWorkflow.

    Raises:
        UsageError: Argo would not start Workflows by one of them.
    """
    if timezone:
        _check_timezone(timezone)
    for schedule in schedules:
        _check_schedule(schedule, timezone)


def _check_schedule(schedule: str, timezone: str | None) -> None:
    times = schedule
    if match := _ZONE_PREFIX.fullmatch(schedule):
        if timezone:
            raise UsageError(f"schedule {schedule!r} names a time zone, and so does timezone {timezone!r}; give one")
        zone, times = match.groups()
        _check_timezone(zone)
    try:
        _check_times(times)
    except ValueError as error:
        raise UsageError(f"schedule {schedule!r} is not one that Argo runs: {error}") from None


def _check_times(times: str) -> None:
    if times.startswith(_EVERY):
        if not _GO_DURATION.fullmatch(times.removeprefix(_EVERY)):
            raise ValueError("write a duration such as '@every 1h30m'")
    elif times.startswith("@"):
        if times not in _DESCRIPTORS:
            raise ValueError(f"write one of {', '.join(_DESCRIPTORS)}, or '@every 1h30m'")
    else:
        values = times.split()
        if len(values) != len(_FIELDS):
            names = ", ".join(field.name for field in _FIELDS)
            raise ValueError(f"it has {len(values)} fields, and needs five: {names}")
        fields = {
            field.name: {value for part in text.split(",") for value in _read_range(field, part)}
            for field, text in zip(_FIELDS, values, strict=True)
        }
        days = fields["day of the month"]
        # Beside a day of the week either of the two is enough; a step makes one of "*" (robfig/cron, ``dayMatches``).
        is_each_weekday = not {"*", "?", "*/1", "?/1"}.isdisjoint(values[-1].split(","))
        if is_each_weekday and not any(min(days) <= _LONGEST_MONTHS[month - 1] for month in fields["month"]):
            raise ValueError(f"no month {values[3]} has a day {values[2]}, so it would never run")


def _read_range(field: _Field, part: str) -> range:
    """The values of a range: ``*``, ``5``, ``1-5``, each also with a step such as ``*/15``."""
    values, slash, step = part.partition("/")
    if slash and not (_NUMBER.fullmatch(step) and int(step) > 0):
        raise ValueError(f"{field.name} {part!r}: the step after the slash is a number above 0")
    every = int(step) if slash else 1
    if values in ("*", "?"):
        return range(field.low, field.high + 1, every)
    first, hyphen, last = values.partition("-")
    begin = _read_value(field, part, first)
    end = _read_value(field, part, last) if hyphen else field.high if slash else begin
    if end < begin:
        raise ValueError(f"{field.name} {part!r} ends before it begins")
    return range(begin, end + 1, every)


def _read_value(field: _Field, part: str, text: str) -> int:
    value = field.names.get(text.lower())
    if value is None:
        value = int(text) if _NUMBER.fullmatch(text) else -1
    if not field.low <= value <= field.high:
        names = f", or {next(iter(field.names))} to {list(field.names)[-1]}" if field.names else ""
        raise ValueError(f"{field.name} {part!r} is not within {field.low} to {field.high}{names}")
    return value


def _check_timezone(zone: str) -> None:
    """Check a name of the IANA database; ``Local`` is the zone of the Argo controller.

    A machine without the database cannot tell, and leaves the check to Argo.
    """
    if zone == "Local":
        return
    try:
        ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        if known := available_timezones():
            similar = difflib.get_close_matches(zone, known, n=1)
            hint = f"did you mean {similar[0]!r}?" if similar else "write a name such as 'Europe/Berlin' or 'UTC'"
            raise UsageError(f"the IANA database has no time zone {zone!r}; {hint}") from None
