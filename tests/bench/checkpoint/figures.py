"""The figures that README quotes, made from the committed report so that they cannot drift from it. Pure."""

from collections.abc import Mapping
from typing import Any

from bench.checkpoint.report import AIMS
from bench.samples import median_of

BEGIN = "<!-- made from tests/bench/reports/checkpoint.json by `python -m bench.checkpoint --readme` -->"
END = "<!-- end of what is made -->"

_WORDS = {
    "stall_over_memcpy": "stall of a save, times that of a memcpy into warm memory",
    "stall_steady_ratio": "times that a blocking `put_object` would stall instead",
    "stall_first_ratio": "the same for the first save of a process",
    "durable_ratio": "times faster committed than one `put_object`, at full speed",
    "verify_over_sha256": "speed of `tiphys verify --deep`, as a share of SHA-256 on all cores",
    "restore_verify_overhead": "restore with hashes compared, times one without, throttled",
    "corrupt_found": "damaged runs, caches and checkpoints that were noticed",
    "good_refused": "sound checkpoints that were refused",
    "sigterm_landed_ratio": "saves that landed after SIGTERM, where the upload fits the grace period",
    "step_inflation": "how much longer a training step takes during an upload, throttled",
}


def block(report: Mapping[str, Any]) -> str:
    """Markdown between two comments."""
    parts, settings = report["parts"], report["settings"]
    line = {name: median_of(value) for part in parts.values() for name, value in part.get("line", {}).items()}
    stall, landing = parts["stall"], parts.get("landing")
    landed = (
        f"; {landing['landed']} of {landing['trials']} saves landed after SIGTERM "
        f"(at least {landing['wilson_lower_bound']:.1%}, Wilson 95 %)"
        if landing
        else ""
    )
    said = (
        f"A state of {settings['state']}, on {report['machine']['cores']} cores with the S3 server beside it; "
        f"throttled means {settings['throttle_megabytes_per_second']:g} MB/s and "
        f"{1000 * settings['throttle_latency_seconds']:g} ms per request. A save stalls training for "
        f"{_time(stall['steady_seconds'])}{landed}."
    )
    rows = [f"| {_WORDS[name]} | {_value(name, line)} | {_aim(name)} |" for name in _WORDS if name in line]
    table = ["| | measured | aim |", "|---|---|---|", *rows]
    return "\n".join([BEGIN, said, "", *table, "", *_peers(parts.get("peers", {})), END])


def inserted(text: str, report: Mapping[str, Any]) -> str:
    """``text`` with the block exchanged.

    Raises:
        ValueError: the comments that hold its place are not there.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README needs the lines {BEGIN!r} and {END!r} where the figures shall stand")
    return before + block(report) + after


def _peers(peers: Mapping[str, Any]) -> list[str]:
    measured = {name: one for name, one in peers.items() if "throttled" in one}
    if not measured:
        return []
    rows = [
        f"| {name} | {_time(one['throttled']['stall_seconds'])} | {_time(one['throttled']['durable_seconds'])} "
        f"| {_time(one['free']['stall_seconds'])} | {_time(one['free']['durable_seconds'])} |"
        for name, one in measured.items()
    ]
    head = "| | stall, throttled | durable, throttled | stall, full speed | durable, full speed |"
    return [head, "|---|---|---|---|---|", *rows]


def _value(name: str, line: Mapping[str, float]) -> str:
    if name == "corrupt_found":
        return f"{line[name]:,g} of {line['corrupt_total']:,g}"
    return f"{line[name]:.1%}" if name in ("step_inflation", "sigterm_landed_ratio") else f"{line[name]:g}"


def _aim(name: str) -> str:
    aim = AIMS[name]
    if name in ("step_inflation", "sigterm_landed_ratio"):
        return f"{aim.sign} {aim.value:.0%}"
    return f"{aim.sign} {aim.value:,g}"


def _time(measured: Mapping[str, Any]) -> str:
    median = measured["median"]
    return f"{1000 * median:.0f} ms" if median < 1 else f"{median:.1f} s"
