"""The order of one queue on traces that nothing was fitted to, and what its bounds on waiting cost.

* `families`: twelve kinds of random jobs on 64 GPUs. The mean completion of a queue that
  goes by attained GPU time, over that of a queue that starts whatever fits.
* `frontier`: the same ratio for a queue in which nothing may be preempted, by the hours for
  which a blocked request may be overtaken, with the longest wait of the large gangs.
* `gang_in_stream`: how long a gang that needs every GPU waits in an endless stream of
  small preemptible jobs, and what the rule promises.

Each preemption costs a save of 30 s and the 300 s of a restart.
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from bench.quota.attained import RESTART_SECONDS, SAVE_SECONDS, queues_on_nodes
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.simulation.jobs import PreemptionCosts, ReplayResult, TraceJob
from tiphys_plugin.quota.simulation.prepare import assign_to_queue, spread_over_nodes
from tiphys_plugin.quota.simulation.replay import POLICIES, replay_jobs
from tiphys_plugin.quota.simulation.trace import read_trace

GPUS = 64
GANG_GPUS = 32
"""GPUs from which a job counts as a gang whose wait is reported."""
COSTS = PreemptionCosts(save_seconds=SAVE_SECONDS, restart_seconds=RESTART_SECONDS)
HOUR = 3600.0
FRONTIER_HOURS = (0, 6, 12, 24, 48, 72, 120, 240)

_SMALL = {1: 50, 2: 15, 4: 15, 8: 20}
_GANGS = {1: 40, 2: 12, 4: 14, 8: 20, 16: 7, 32: 5, 64: 2}
"""Relative frequency of requests by number of GPUs."""


def _log_normal(median_seconds: float, sigma: float) -> Callable[[random.Random], float]:
    return lambda draw: median_seconds * math.exp(draw.gauss(0, sigma))


def _bimodal(draw: random.Random) -> float:
    return draw.uniform(300, 1200) if draw.random() < 0.85 else draw.uniform(12 * HOUR, 36 * HOUR)


_DURATIONS: dict[str, Callable[[random.Random], float]] = {
    "short": _log_normal(600, 1.0),
    "long": _log_normal(8 * HOUR, 1.0),
    "heavy": _log_normal(1800, 2.2),
    "bimodal": _bimodal,
}


class Family(NamedTuple):
    """A kind of jobs; ``load`` is what they ask for, relative to all GPUs. 0 per burst: they come evenly."""

    durations: str
    load: float
    sizes: dict[int, int]
    per_burst: int = 0

    @property
    def name(self) -> str:
        bursts = f", bursts of {self.per_burst}" if self.per_burst else ""
        return f"{self.durations}, load {self.load:g}, 1 to {max(self.sizes)} GPUs{bursts}"


FAMILIES = (
    Family("short", 0.5, _SMALL),
    Family("short", 1.5, _GANGS),
    Family("short", 3, _SMALL),
    Family("long", 0.8, _GANGS),
    Family("long", 1.5, _SMALL),
    Family("long", 5, _GANGS),
    Family("bimodal", 0.9, _GANGS),
    Family("bimodal", 2, _SMALL),
    Family("heavy", 0.7, _GANGS),
    Family("heavy", 2, _GANGS),
    Family("heavy", 5, _SMALL),
    Family("heavy", 1.2, _GANGS, per_burst=60),
)


def jobs_of(family: Family, seed: int, count: int) -> list[TraceJob]:
    """``count`` random jobs of the family."""
    draw = random.Random(f"{family.name} {seed}")
    gpus = draw.choices(list(family.sizes), list(family.sizes.values()), k=count)
    seconds = [max(1.0, _DURATIONS[family.durations](draw)) for _ in range(count)]
    span = sum(map(math.prod, zip(gpus, seconds, strict=True))) / (GPUS * family.load)
    if family.per_burst:
        begins = [draw.uniform(0, span) for _ in range(max(1, count // family.per_burst))]
        times = sorted(draw.choice(begins) + draw.uniform(0, 600) for _ in range(count))
    else:
        times = sorted(draw.uniform(0, span) for _ in range(count))
    return [
        TraceJob(f"{number}", *one, queue="all") for number, one in enumerate(zip(times, seconds, gpus, strict=True))
    ]


def families(seeds: Iterable[int], count: int) -> dict[str, Any]:
    """Mean completion by attained GPU time over that of skipping, by family and seed."""
    ours = queues_on_nodes(order="attained", preempts_longer=True)
    ratios: dict[str, dict[str, float]] = {}
    for family in FAMILIES:
        ratios[family.name] = {}
        for seed in seeds:
            jobs = spread_over_nodes(jobs_of(family, seed, count), ours)
            skip = mean_completion(replay_jobs(queues_on_nodes(), jobs, POLICIES["skip"]))
            ratio = mean_completion(replay_jobs(ours, jobs, costs=COSTS)) / skip
            ratios[family.name][str(seed)] = round(ratio, 4)
    overloaded = [geometric_mean(ratios[family.name].values()) for family in FAMILIES if family.load > 1]
    return {
        "jobs": count,
        "ratios": ratios,
        "overloaded_ratio": round(geometric_mean(overloaded), 4),
        "worst_ratio": max(max(by_seed.values()) for by_seed in ratios.values()),
    }


def frontier(traces: Sequence[Path]) -> dict[str, Any]:
    """By trace and bound: mean completion over that of skipping, and the longest wait of a gang in hours."""
    found: dict[str, Any] = {}
    for path in traces:
        jobs = assign_to_queue(read_trace(path).jobs, queues_on_nodes(), "all")
        jobs = spread_over_nodes(jobs, queues_on_nodes())
        skip = replay_jobs(queues_on_nodes(), jobs, POLICIES["skip"])
        points = {"skip": skip, "strict": replay_jobs(queues_on_nodes(backfill="strict"), jobs)}
        points |= {str(hours): replay_jobs(queues_on_nodes(backfill_hours=hours), jobs) for hours in FRONTIER_HOURS}
        found[path.stem] = {
            name: {
                "ratio": round(mean_completion(done) / mean_completion(skip), 4),
                "gang_wait_hours": round(longest_gang_wait(done) / HOUR),
            }
            for name, done in points.items()
        }
    return found


def gang_in_stream(seed: int, hours: float) -> dict[str, Any]:
    """The wait of a gang that needs every GPU, among small jobs that ask for twice all GPUs until the end."""
    queue = {"order": "attained", "preempts_longer": True}
    rules = Queues.model_validate({"queues": [{"name": "all", "gpus": {"*": GPUS}, **queue}]})
    draw, at = random.Random(seed), 0.0
    jobs = [TraceJob("gang", HOUR, HOUR, GPUS, "all")]
    while at < hours * HOUR:
        gpus, seconds = draw.randint(1, 2), draw.uniform(60, 4 * HOUR)
        jobs.append(TraceJob(f"small-{at}", at, seconds, gpus, "all"))
        at += gpus * seconds / (2 * GPUS)
    gang = next(run for run in replay_jobs(rules, jobs, costs=COSTS).runs if run.job.name == "gang")
    one = rules.queues[0]
    first_level_ends = one.attained_gpu_hours[0] * HOUR
    promised = one.yield_seconds(0, GPUS) + first_level_ends + 2 * (one.protected_seconds + SAVE_SECONDS)
    waited = gang.started_seconds - gang.submitted_seconds
    return {
        "jobs": len(jobs),
        "wait_seconds": round(waited),
        "promised_seconds": round(promised),
        "over_promised": round(waited / promised, 4),
    }


def mean_completion(done: ReplayResult) -> float:
    """Mean seconds from submission to end."""
    return math.fsum(run.ended_seconds - run.submitted_seconds for run in done.runs) / len(done.runs)


def longest_gang_wait(done: ReplayResult) -> float:
    """Seconds until the first start."""
    waits = (run.started_seconds - run.submitted_seconds for run in done.runs if run.job.gpus >= GANG_GPUS)
    return max(waits, default=0.0)
