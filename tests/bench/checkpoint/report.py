"""What is promised of checkpoints, the table of all measurements, and how the pages say it."""

from collections.abc import Iterator, Mapping
from typing import Any

from bench.aims import Aim, Measured
from bench.page import rows

AIMS = {
    "stall_first_ratio": Aim("≥", 20),
    "stall_steady_ratio": Aim("≥", 100),
    "stall_over_memcpy": Aim("≤", 1.3),
    "overlap_stall_p99_milliseconds": Aim("≤", 5),
    "durable_ratio": Aim("≥", 1.5),
    "verify_over_sha256": Aim("≥", 0.8),
    "restore_verify_overhead": Aim("≤", 1.10),
    "restore_over_read_and_hash": Aim("≤", 1.10),
    "near_restore_over_copy_and_hash": Aim("≤", 1.5),
    "near_restore_over_bucket": Aim("≤", 0.3),
    "near_peak_over_state": Aim("≤", 2.3),
    "near_damage_accepted": Aim("≤", 0),
    "corrupt_found": Aim("≥", 1000),
    "corrupt_total": Aim("≥", 1000),
    "good_refused": Aim("≤", 0),
    "sigterm_landed_ratio": Aim("≥", 1.0),
    "step_inflation": Aim("≤", 0.10),
    "launcher_milliseconds": Aim("≤", 25),
    "launcher_mib": Aim("≤", 15),
    "restart_in_place_seconds": Aim("≤", 1.5),
    "restart_spare_seconds": Aim("≤", 0.5),
    "rss_drift": Aim("≤", 0.02),
}
"""Of a state of 1 GiB on two cores, in the order of the last line."""
QUICK_AIMS = {
    "stall_first_ratio": Aim("≥", 3),
    "stall_steady_ratio": Aim("≥", 10),
    **{name: AIMS[name] for name in ("corrupt_found", "corrupt_total", "good_refused", "sigterm_landed_ratio")},
    **{name: AIMS[name] for name in ("launcher_milliseconds", "launcher_mib", "rss_drift", "near_damage_accepted")},
}
"""Of a state of 32 MiB. Its copies, hashes and uploads take milliseconds, and what a save costs whatever its size
outweighs them, so other ratios are not judged.
"""

WORDS = {
    "stall_over_memcpy": "stall of a save, times that of a memcpy into warm memory",
    "overlap_stall_milliseconds": "stall of a save whose weights are copied beside the next step, ms",
    "overlap_stall_p99_milliseconds": "the same, 99th percentile of 100 saves",
    "stall_steady_ratio": "times that a blocking `put_object` would stall instead",
    "stall_first_ratio": "the same for the first save of a process",
    "durable_ratio": "times faster committed than one `put_object`, at full speed",
    "verify_over_sha256": "speed of `tiphys verify --deep`, as a share of SHA-256 on all cores",
    "restore_verify_overhead": "restore with hashes compared, times one without, throttled",
    "restore_over_read_and_hash": "the same at full speed, times one without and a SHA-256 pass on all cores",
    "near_restore_over_copy_and_hash": "restart in the pod at full speed, times a copy and a SHA-256 pass on all cores",
    "near_restore_over_bucket": "restart in the pod, times a restore from the bucket, throttled",
    "near_peak_over_state": "most memory of the pod over such a restart, times the state",
    "near_damage_accepted": "damaged near copies that were restored, of 1,000",
    "corrupt_found": "damaged runs, caches and checkpoints that were noticed",
    "good_refused": "sound checkpoints that were refused",
    "sigterm_landed_ratio": "saves that landed after SIGTERM, where the upload fits the grace period",
    "step_inflation": "how much longer a training step takes during an upload, throttled",
    "launcher_milliseconds": "start of a program below the launcher, ms more than without it",
    "launcher_mib": "memory of the launcher while its program runs, MiB",
    "restart_in_place_seconds": "death of a training to its next step in the same pod, s",
    "restart_spare_seconds": "the same with a spare process",
    "rss_drift": "growth of a training's memory from its 20th to its 200th save",
}
_PERCENT = ("step_inflation", "sigterm_landed_ratio", "rss_drift")


def values(parts: Mapping[str, Any]) -> dict[str, Measured]:
    """What the parts measured, by name."""
    return {name: value for part in parts.values() for name, value in part.get("line", {}).items()}


def table(parts: Mapping[str, Any]) -> str:
    """Every number with its spread."""
    found = [row for name, part in parts.items() for row in _rows(name, part)]
    width = max((len(name) for name, _ in found), default=0)
    return "\n".join(f"{name:<{width}}  {words}" for name, words in found)


def block(report: Mapping[str, Any]) -> list[str]:
    """Markdown of the committed report."""
    parts, settings = report["parts"], report["settings"]
    landing = parts.get("landing")
    landed = (
        f" {landing['landed']} of {landing['trials']} saves landed after SIGTERM "
        f"(at least {landing['wilson_lower_bound']:.1%}, Wilson 95 %)."
        if landing
        else ""
    )
    return [
        f"A state of {settings['state']}, on {report['machine']['cores']} cores with the S3 server beside it; "
        f"throttled means {settings['throttle_megabytes_per_second']:g} MB/s and "
        f"{1000 * settings['throttle_latency_seconds']:g} ms per request.{landed}",
        "",
        *rows(WORDS, values(parts), AIMS, _PERCENT),
        "",
        *_peers(parts.get("peers", {})),
    ]


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


def _time(measured: Mapping[str, Any]) -> str:
    median = measured["median"]
    return f"{1000 * median:.0f} ms" if median < 1 else f"{median:.1f} s"


def _rows(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and "samples" in value:
        low, high = value["range"]
        yield name, f"{value['median']:>12,g}   {low:,g} … {high:,g}   n={len(value['samples'])}"
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if key != "line":
                yield from _rows(f"{name}.{key}", inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _rows(f"{name}[{index}]", inner)
    else:
        yield name, f"{value:>12,g}" if isinstance(value, float | int) else str(value)
