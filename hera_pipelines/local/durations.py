"""Argo's durations: ``10s``, ``1h30m``, or a bare number of seconds."""

import re

from tiphys.errors import UsageError

_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


def seconds(text: str) -> float:
    """Seconds that ``text`` stands for.

    Raises:
        UsageError: it is not a duration.
    """
    stripped = text.strip()
    if re.fullmatch(r"\d+", stripped):
        return float(stripped)
    if not stripped or _PART.sub("", stripped):
        raise UsageError(f"{text!r} is not a duration; write for example 10s, 5m or 1h30m")
    return sum(float(number) * _DURATION_UNITS[unit] for number, unit in _PART.findall(stripped))
