"""What is promised of GPU quotas, and how the pages say it."""

from collections.abc import Mapping
from typing import Any

from bench.aims import Aim, Measured
from bench.page import rows
from tiphys_plugin.quota.queue import DEFAULT_BACKFILL_HOURS

ALLOCATIONS = {"bestfit_alloc": "best-fit", "fgd_alloc": "fragmentation"}
TYPED_ALLOCATIONS = {f"{name}_typed": policy for name, policy in ALLOCATIONS.items()}
AIMS = {
    "tiresias_ratio": Aim("≤", 0.62),
    "fifo_ratio": Aim("≤", 0.38),
    "tiresias_ratio_3": Aim("≤", 1.15),
    "fifo_ratio_3": Aim("≤", 0.82),
    "backfill_ratio_1": Aim("≤", 1.4),
    "backfill_ratio_3": Aim("≤", 1.4),
    "families_ratio": Aim("≤", 0.75),
    "families_worst": Aim("≤", 1.02),
    "gang_over_promised": Aim("≤", 1),
    "bestfit_alloc": Aim("≥", 93.9),
    "fgd_alloc": Aim("≥", 95.2),
    "bestfit_alloc_typed": Aim("≥", 80.4),
    "fgd_alloc_typed": Aim("≥", 87.8),
    "decision_over_scan": Aim("≤", 1.5),
    "decision_p99_over_scan": Aim("≤", 25),
    "ledger_per_second_1": Aim("≥", 100),
    "ledger_per_second_3": Aim("≥", 150),
    "ledger_p99_ms_1": Aim("≤", 1000),
    "ledger_bytes_1": Aim("≤", 4096),
    "high_priority_wait_ratio": Aim("≤", 1),
    "preempt_loss_ratio": Aim("≤", 0.10),
    "over_admissions": Aim("≤", 0),
    "leaks": Aim("≤", 0),
    "double_grants": Aim("≤", 0),
}
QUICK_AIMS = {name: aim for name, aim in AIMS.items() if name != "decision_p99_over_scan"}
"""Without what needs more samples than a quick run has."""

WORDS = {
    "tiresias_ratio": "mean completion of trainings of unknown duration, 64 GPUs, times that published for Tiresias",
    "fifo_ratio": "the same, times first come, first served with skipping",
    "tiresias_ratio_3": "the same on trace 3, times that published for Tiresias",
    "fifo_ratio_3": "the same on trace 3, times first come, first served with skipping",
    "backfill_ratio_1": "mean completion in a default queue on trace 1, times first come, first served with skipping",
    "backfill_ratio_3": "the same on trace 3",
    "families_ratio": "mean completion by attained GPU time, times skipping: random jobs that ask for too much",
    "families_worst": "the worst of all twelve families of random jobs and seeds",
    "gang_over_promised": "wait of a gang for all GPUs in an endless stream of preemptible jobs, over what is promised",
    "bestfit_alloc": "percent of 6,212 GPUs in use when all were asked for: best fit (published: 92.9)",
    "fgd_alloc": "the same: least fragmentation (published: 95.2)",
    "bestfit_alloc_typed": "the same where a third of the tasks asks for types: best fit (published: 80.4)",
    "fgd_alloc_typed": "the same: least fragmentation (published: 87.8)",
    "decision_over_scan": "CPU time of a decision, beside 1,000 requests on 1,000 nodes, times a plain loop over them",
    "decision_p99_over_scan": "the same, p99",
    "ledger_per_second_1": "admissions per second through the ledger of a real API server, beside 50,000 that wait",
    "ledger_per_second_3": "the same, by three services",
    "ledger_p99_ms_1": "milliseconds from request to answer there, p99, by one service",
    "ledger_bytes_1": "bytes written there for an admission and its release",
    "high_priority_wait_ratio": "p99 wait of a request of high priority, over grace period, save and two polls",
    "preempt_loss_ratio": "GPU-seconds that preemption loses, over those without the time to save, for saves of 3 s",
    "over_admissions": "quotas exceeded, by many processes of which some are killed",
    "double_grants": "leases granted twice, by the same",
    "leaks": "leases lost, by the same",
}


def values(report: Mapping[str, Any]) -> dict[str, Measured]:
    """What is compared; decisions are those on a thousand nodes beside a thousand that wait."""
    core = report["core"]["1000 on 1000"]
    filled = report.get("allocation", {})
    typed = filled.get("typed", {})
    unknown, third = report.get("attained", {}), report.get("attained_trace3", {})
    by_trace = {number: report.get("frontier", {}).get(f"muri_trace{number}", {}) for number in (1, 3)}
    default = f"{DEFAULT_BACKFILL_HOURS:g}"
    services = report.get("cluster", {}).get("services", {})
    return {
        **{name: unknown[name] for name in ("tiresias_ratio", "fifo_ratio") if name in unknown},
        **{f"{name}_3": third[name] for name in ("tiresias_ratio", "fifo_ratio") if name in third},
        **{f"backfill_ratio_{number}": found[default]["ratio"] for number, found in by_trace.items() if found},
        **{
            name: report[part][key]
            for name, part, key in (
                ("families_ratio", "families", "overloaded_ratio"),
                ("families_worst", "families", "worst_ratio"),
                ("gang_over_promised", "gang_in_stream", "over_promised"),
            )
            if part in report
        },
        **{name: filled[policy]["allocated_percent"] for name, policy in ALLOCATIONS.items() if policy in filled},
        **{name: typed[policy]["allocated_percent"] for name, policy in TYPED_ALLOCATIONS.items() if policy in typed},
        **{f"decision_{name}": core[name] for name in ("over_scan", "p99_over_scan") if name in core},
        **{f"ledger_per_second_{number}": found["per_second"] for number, found in services.items()},
        **{
            f"ledger_{name}_1": services["1"][key]
            for name, key in (("p99_ms", "p99_ms"), ("bytes", "bytes_per_admission"))
            if key in services.get("1", {})
        },
        "high_priority_wait_ratio": report["preemption"]["wait_ratio"],
        "preempt_loss_ratio": report["preemption"]["loss_ratio"],
        **{
            name: sum(one[name] for one in report["campaigns"].values())
            for name in ("over_admissions", "leaks", "double_grants")
        },
    }


def _describe_log(campaigns: Mapping[str, Any]) -> str:
    """What happened to the ledger of the cluster in its campaign; empty in reports without it."""
    if (found := campaigns.get("log")) is None:
        return ""
    damages = sum(times for kind, times in found["faults"].items() if " to " not in kind)
    faults = sum(found["faults"].values()) - damages
    return (
        f"; {found['requests']:,} of these by services on a ledger of the cluster, with {faults} lost, refused or "
        f"broken answers, and {damages} times a part of its log deleted, cut or emptied"
    )


def block(report: Mapping[str, Any]) -> list[str]:
    """Markdown of the committed report."""
    core, campaigns = report["core"]["1000 on 1000"], report["campaigns"].values()
    by_save = {float(save): one["ratio"] for save, one in report["preemption"]["loss_by_save_seconds"].items()}
    losses = ", ".join(f"{by_save[save]:.3g} for saves of {save:g} s" for save in sorted(by_save))
    asked, kills = (sum(one[name] for one in campaigns) for name in ("requests", "kills"))
    return [
        *rows(WORDS, values(report), AIMS),
        "",
        f"GPUs idle while a victim saves, so preemption loses more with longer saves: {losses}. "
        f"The processes made {asked:,} requests and met {kills} kills{_describe_log(report['campaigns'])}. "
        f"On the machine of the report, {report['machine']['cores']} cores of {report['machine']['cpu']}, "
        f"{core['per_second']:.0f} decisions per second are made, with a p99 of {core['p99_ms']:.3g} ms; other "
        "machines make more or fewer.",
    ]
