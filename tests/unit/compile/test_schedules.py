"""Which schedules and time zones compile accepts: those that the cron library of Argo runs.

| text | outcome |
|---|---|
| five fields of values, ranges, steps and lists; names of months and days | accepted |
| a descriptor, `@every` with a duration of Go | accepted |
| `CRON_TZ=` or `TZ=` before one of these | accepted, unless the CronWorkflow names a time zone too |
| seconds, Sunday as 7, anything else | refused, with the field and what it takes |
"""

import zoneinfo

import pytest

from hera_pipelines.compile.validate.schedules import check_schedules
from tiphys.errors import UsageError


@pytest.mark.parametrize(
    "schedule",
    [
        "0 2 * * *",
        "*/15 0-6/2 1,15 jan-MAR Mon-fri",
        "0 0 ? * sun,6",
        "5/10 007 31 12 0",
        "  0 2 * * * ",
        *("0 0 29 2 *", "0 0 31 jan-feb *", "0 0 31 */7 *", "0 0 30-31 4 ?", "0 0 31 2 1", "0 0 31 2 */2"),
        *("@yearly", "@annually", "@monthly", "@weekly", "@daily", "@midnight", "@hourly"),
        *("@every 1h30m", "@every 1.5h", "@every 90s", "@every 500ms"),
        "CRON_TZ=Europe/Berlin 0 2 * * *",
        "TZ=UTC @daily",
    ],
)
def test_a_schedule_that_argo_runs_is_accepted(schedule: str) -> None:
    check_schedules(["0 2 * * *", schedule], None)


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        ("", "it has 0 fields, and needs five: minute, hour, day of the month, month, day of the week"),
        ("* * * *", "it has 4 fields"),
        ("0 0 2 * * *", "it has 6 fields"),
        ("60 * * * *", "minute '60' is not within 0 to 59"),
        ("* 24 * * *", "hour '24' is not within 0 to 23"),
        ("* * 0 * *", "day of the month '0' is not within 1 to 31"),
        ("* * * 13 *", "month '13' is not within 1 to 12, or jan to dec"),
        ("* * * * 7", "day of the week '7' is not within 0 to 6, or sun to sat"),
        ("* * * * monday", "day of the week 'monday' is not within 0 to 6, or sun to sat"),
        ("* 9-8 * * *", "hour '9-8' ends before it begins"),
        ("* 1-2-3 * * *", "hour '1-2-3' is not within 0 to 23"),
        ("1,,2 * * * *", "minute '' is not within 0 to 59"),
        ("*-5 * * * *", "minute '*-5' is not within 0 to 59"),
        ("*/0 * * * *", "minute '*/0': the step after the slash is a number above 0"),
        ("*/x * * * *", "minute '*/x': the step after the slash is a number above 0"),
        ("*/٣ * * * *", "minute '*/٣': the step after the slash is a number above 0"),
        ("*/1/2 * * * *", "minute '*/1/2': the step after the slash is a number above 0"),
        ("² * * * *", "minute '²' is not within 0 to 59"),
        ("0 0 31 2 *", "no month 2 has a day 31, so it would never run"),
        ("0 0 30,31 feb ?", "no month feb has a day 30,31, so it would never run"),
        ("0 0 31 2-6/2,9,nov *,1", "no month 2-6/2,9,nov has a day 31, so it would never run"),
        ("@reboot", "write one of @yearly, "),
        ("@Daily", "write one of @yearly, "),
        ("@every", "write one of @yearly, "),
        ("@every 5", "write a duration such as '@every 1h30m'"),
        ("@every -1h", "write a duration such as '@every 1h30m'"),
        ("@every 1h 30m", "write a duration such as '@every 1h30m'"),
        ("CRON_TZ=UTC", "it has 1 fields"),
        ("CRON_TZ=UTC CRON_TZ=UTC * * * * *", "it has 6 fields"),
    ],
)
def test_a_schedule_that_argo_does_not_run_is_refused_with_the_field(schedule: str, reason: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_schedules(["0 2 * * *", schedule], None)
    assert str(refused.value).startswith(f"schedule {schedule!r} is not one that Argo runs: {reason}")


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "Local"])
def test_a_known_time_zone_is_accepted(zone: str) -> None:
    check_schedules(["@daily"], zone)


@pytest.mark.parametrize(
    ("zone", "hint"),
    [
        ("Europe/Berln", "did you mean 'Europe/Berlin'?"),
        ("+02:00", "write a name such as 'Europe/Berlin' or 'UTC'"),
        ("../etc/passwd", "write a name such as"),
        ("Europe", "did you mean"),
    ],
)
@pytest.mark.parametrize("is_in_schedule", [False, True])
def test_an_unknown_time_zone_is_refused(zone: str, hint: str, is_in_schedule: bool) -> None:
    schedule, timezone = (f"CRON_TZ={zone} @daily", None) if is_in_schedule else ("@daily", zone)
    with pytest.raises(UsageError) as refused:
        check_schedules([schedule], timezone)
    assert f"the IANA database has no time zone {zone!r}; " in str(refused.value)
    assert hint in str(refused.value)


def test_a_second_time_zone_is_refused() -> None:
    with pytest.raises(UsageError, match="names a time zone, and so does timezone 'UTC'; give one"):
        check_schedules(["CRON_TZ=Europe/Berlin @daily"], "UTC")


def test_a_machine_without_time_zones_leaves_the_check_to_argo() -> None:
    zoneinfo.reset_tzpath(to=())
    try:
        check_schedules(["@daily"], "Mars/Olympus")
    finally:
        zoneinfo.reset_tzpath()
