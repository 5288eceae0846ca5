"""What is promised of hundreds of trainings at once, and how the page says it."""

from collections.abc import Mapping
from typing import Any

from bench.aims import Aim, Measured
from bench.page import rows
from bench.samples import significant

_SERVICES = ("Tiphys plugin", "Tiphys controller")
_OWN_FAULTS = ("pod evicted", "node lost")
AIMS = {
    "etcd_half_seconds": Aim("≤", 180),
    "etcd_all_seconds": Aim("≤", 600),
    "etcd_lost": Aim("≤", 0),
    "hour_lost": Aim("≤", 0),
    "hour_doubled": Aim("≤", 0),
    "hour_next_pod_p99": Aim("≤", 20),
    "hour_service_mib": Aim("≤", 400),
    "hour_growth": Aim("≤", 1.02),
}
WORDS = {
    "etcd_half_seconds": "seconds from the loss of etcd until half of the trainings went on, the installation included",
    "etcd_all_seconds": "the same for all of them",
    "etcd_lost": "trainings that did not go on from their newest checkpoint, or ended in another state",
    "hour_lost": "acknowledged checkpoints lost, and trainings that ended in another state, under faults",
    "hour_doubled": "times that two pods of a training ran at once",
    "hour_next_pod_p50": "seconds from the end of a pod that was evicted, or lost its node, to the next one, median",
    "hour_next_pod_p99": "the same, p99",
    "hour_service_mib": "memory of a service at the end, the larger of plugin and controller, MiB",
    "hour_growth": "the same over that after a sixth of the time",
}


def values(report: Mapping[str, Any]) -> dict[str, Measured]:
    """What was measured, by name."""
    found: dict[str, Measured] = {}
    parts = report["parts"]
    if etcd := parts.get("etcd"):
        found |= {f"etcd_{name}_seconds": etcd["seconds"][name] for name in ("half", "all")}
        found["etcd_lost"] = max(etcd["of"] - etcd["from_newest"], _lost(etcd))
    if hour := parts.get("hour"):
        gaps = [hour["next_pod_seconds"][fault] for fault in _OWN_FAULTS if fault in hour["next_pod_seconds"]]
        looks = list(hour["costs"].values())
        growth = [looks[-1][name]["rss_mib"] / looks[min(1, len(looks) - 1)][name]["rss_mib"] for name in _SERVICES]
        found |= {
            "hour_lost": _lost(hour),
            "hour_doubled": hour["must_not_happen"].get("doubled", 0),
            "hour_next_pod_p50": max(gap["p50"] for gap in gaps),
            "hour_next_pod_p99": max(gap["p99"] for gap in gaps),
            "hour_service_mib": max(looks[-1][name]["rss_mib"] for name in _SERVICES),
            "hour_growth": significant(max(growth)),
        }
    return found


def block(report: Mapping[str, Any]) -> list[str]:
    """Markdown of the committed report."""
    lines = rows(WORDS, values(report), AIMS)
    parts = report["parts"]
    if etcd := parts.get("etcd"):
        seconds, runs = etcd["seconds"], etcd["settings"]["runs"]
        lines += [
            "",
            f"{runs:,} trainings were in flight when etcd was emptied. Argo and Tiphys were installed again after "
            f"{seconds['installed']:.0f} s; `tiphys recover` took {seconds['command']:.0f} s, and all trained on "
            f"{seconds['all_from_installed']:.0f} s after the installation. {etcd['ended_as_undisturbed']:,} ended in "
            "the state of an undisturbed training.",
        ]
    if hour := parts.get("hour"):
        settings, faults = hour["settings"], hour["faults"]
        told = ", ".join(f"{count:,} × {fault}" for fault, count in sorted(faults.items()))
        lines += [
            "",
            f"{settings['runs']:,} trainings of 8 GPUs ran for {settings['minutes']:g} minutes with a fault every "
            f"{settings['fault_seconds']:g} s: {told}. {hour['acknowledged']:,} checkpoints were acknowledged. What "
            "the parts took, memory at the end and CPU between the first look and the last:",
            "",
            "| | MiB | CPU, % of a core |",
            "|---|---|---|",
            *_cost_rows(hour["costs"]),
        ]
    return lines


def _lost(part: Mapping[str, Any]) -> int:
    lost: int = part["must_not_happen"].get("lost", 0)
    others: int = part["of"] - part["ended_as_undisturbed"]
    return lost + others


def _cost_rows(costs: Mapping[str, Any]) -> list[str]:
    (began, first), *_, (ended, last) = costs.items()
    seconds = float(ended) - float(began)
    used = {part: look["cpu_seconds"] - first[part]["cpu_seconds"] for part, look in last.items() if part in first}
    return [f"| {part} | {last[part]['rss_mib']:,.0f} | {100 * cpu / seconds:.1f} |" for part, cpu in used.items()]
