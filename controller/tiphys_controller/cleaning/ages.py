"""How long ago something was, for people."""

from datetime import timedelta


def in_words(age: timedelta) -> str:
    """A time in the unit that suits it."""
    seconds = age.total_seconds()
    units = (("days", 86400), ("h", 3600), ("min", 60))
    unit, size = next((one for one in units if seconds >= 2 * one[1]), ("s", 1))
    return f"{int(seconds / size)} {unit}"
