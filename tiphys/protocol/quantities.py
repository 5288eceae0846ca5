"""Quantities in manifests, options and reports: memory as Kubernetes writes it, durations as Argo and Go write them.

They are parsed and formatted only here, so that options, environment variables and authors' arguments accept the same
text and every command prints the same form. Argo and Go accept less than that, so what they read has stricter parsers.
"""

import math
import re

from tiphys.errors import UsageError

_MEMORY_UNITS: dict[str, int] = {
    **{unit: 1024 ** (power + 1) for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi"))},
    **{unit: 1000 ** (power + 1) for power, unit in enumerate(("k", "M", "G", "T", "P"))},
    "": 1,
}
_MEMORY_QUANTITY = re.compile(r"(\d+(?:\.\d+)?(?:[eE]\d+)?)\s*([KMGTP]i|[kMGTP]|)")
_MI = _MEMORY_UNITS["Mi"]


def parse_memory_bytes(text: str | int, error_prefix: str) -> int:
    """Parse an amount of memory into whole bytes, rounded up.

    Raises:
        UsageError: ``text`` is not an amount of memory, or is zero.
    """
    match = _MEMORY_QUANTITY.fullmatch(str(text).strip())
    if match is None or float(match[1]) == 0:
        raise UsageError(f"{error_prefix}: {text!r} is not an amount of memory; write it like 8Gi or 512M")
    return math.ceil(float(match[1]) * _MEMORY_UNITS[match[2]])


def format_memory_quantity(size_bytes: int) -> str:
    """At least ``size_bytes``, in whole Mi, or in Gi where that is exact."""
    size_mi = math.ceil(size_bytes / _MI)
    return f"{size_mi // 1024}Gi" if size_mi % 1024 == 0 else f"{size_mi}Mi"


# Go's units (https://pkg.go.dev/time#ParseDuration) and days, largest first.
_SECONDS_PER_UNIT = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_NUMBER = r"(?:\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)"
_DURATION_PART = re.compile(rf"(?<![\d.])({_NUMBER})\s*(ms|us|µs|ns|d|h|m|s)\s*")
_GO_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|us|µs|ns|h|m|s))+")
_ARGO_DURATION = re.compile(rf"\d+|{_GO_DURATION.pattern}")
_FORMAT_UNITS = ("d", "h", "m", "s")


def parse_duration_seconds(text: str) -> float:
    """Seconds of a duration that a person or Argo wrote.

    Accepted are numbers with a unit (``d``, ``h``, ``m``, ``s``, ``ms``, ``us`` or ``ns``), one or several in a row and
    with or without blanks: ``10s``, ``1h30m``, ``3h 20m``, ``1.5m``, ``1e+06s``. A bare number means seconds, as in
    Argo's ``backoff.duration``.

    Raises:
        UsageError: ``text`` is not a duration; signs count as that.
    """
    stripped = text.strip()
    if re.fullmatch(_NUMBER, stripped):
        return float(stripped)
    if not stripped or _DURATION_PART.sub("", stripped):
        raise UsageError(f"{text!r} is not a duration; write for example 10s, 5m or 1h30m")
    return sum(float(number) * _SECONDS_PER_UNIT[unit] for number, unit in _DURATION_PART.findall(stripped))


def parse_go_duration_seconds(text: str) -> float:
    """Seconds of a duration that a Go program reads from its environment.

    Go accepts less than `parse_duration_seconds`: no days, no blanks, no exponents and no number without a unit.

    Raises:
        UsageError: ``time.ParseDuration`` of Go would refuse ``text``, or read it as a negative duration.
    """
    if not _GO_DURATION.fullmatch(text):
        raise UsageError(f"{text!r} is not a duration of Go; write for example 500ms, 10s or 1h30m")
    return parse_duration_seconds(text)


def parse_argo_duration_seconds(text: str) -> float:
    """Seconds of a duration in a Workflow or in a plugin's reply, for the local engine.

    Argo accepts less than `parse_duration_seconds`: no days, no blanks, no exponents, and of bare numbers only whole
    seconds (``ParseStringToDuration``). A Workflow that the local engine accepts must not fail in a cluster.

    Raises:
        UsageError: ``text`` is not a duration in this form.
    """
    if not _ARGO_DURATION.fullmatch(text.strip()):
        raise UsageError(f"{text!r} is not a duration of Argo; write for example 10s, 5m or 1h30m")
    return parse_duration_seconds(text)


def format_argo_duration(seconds: float) -> str:
    """A duration for a Workflow: seconds without an exponent, which Argo refuses, down to nanoseconds."""
    whole = f"{seconds:.9f}".rstrip("0").rstrip(".")
    return f"{whole}s"


def format_duration(seconds: float) -> str:
    """A duration in its two largest units, for people: ``3h 20m``, ``45s``, ``2.5s``, ``40ms``.

    Below a minute one decimal is kept where it is not zero; from a minute on, what is less than the second unit is cut
    off. `parse_duration_seconds` reads the text back.
    """
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    if 0.0005 <= seconds < 0.9995:
        return f"{seconds * 1000:.0f}ms"
    if round(seconds, 1) < 60:
        return f"{round(seconds, 1):g}s"
    remaining = round(seconds)
    counts: list[tuple[int, str]] = []
    for unit in _FORMAT_UNITS:
        count, remaining = divmod(remaining, int(_SECONDS_PER_UNIT[unit]))
        if count or counts:
            counts.append((count, unit))
    return " ".join(f"{count}{unit}" for count, unit in counts[:2] if count)


def format_bytes(size_bytes: int) -> str:
    """A size for people, in the largest binary unit up to TiB: ``512 B``, ``1.5 GiB``."""
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"
