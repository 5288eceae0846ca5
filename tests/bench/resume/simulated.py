"""The largest published training, again and again: a seeded simulation, with what it takes for granted written out.

Failures: 419 unexpected interruptions in 54 days on 16,384 GPUs (Llama Team, "The Llama 3 Herd of Models", 2024,
table 5). ByteRobust (arXiv 2509.16293) publishes 97 % effective training time on 9,600 GPUs over three months.
"""

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.resume.faults import KINDS
from bench.resume.optimum import optimum
from bench.samples import significant

from tiphys.checkpoint.save.interval import young_interval_seconds

DAYS = 54.0
INTERRUPTIONS = 419
GPUS = 16_384
PUBLISHED_BYTEROBUST = 0.97
SEEDS = range(20)
QUICK_SEEDS = range(3)
_DAY = 86400.0


@dataclass(frozen=True)
class Assumed:
    """What no measurement of this machine can tell; all in seconds."""

    step: float = 5.0
    """One optimizer step."""
    stall: float = 1.0
    """Training waits so long for a copy of the state."""
    upload: float = 60.0
    """Until a save that was begun is committed; a failure before that loses it."""
    detect: float = 30.0
    """From a failure until its end is on record: the kubelet tells, or the node's lease runs out."""
    decide: float = 1.0
    """Plan, claim and create: the bound that is measured beside this."""
    start: float = 180.0
    """From the new Workflow to running programs: scheduling, images that the nodes have, libraries, process groups."""
    load: float = 60.0
    first_step: float = 30.0
    """Compilation and warm-up."""
    grace: float = 120.0
    """Between SIGTERM and SIGKILL; a save takes less, so what is told to stop loses nothing."""

    person: float = 1800.0
    """Until a person has found and removed a checkpoint that cannot be read, where the program does not."""

    @property
    def restart(self) -> float:
        return self.detect + self.decide + self.start + self.load + self.first_step


def measure(quick: bool) -> dict[str, Any]:
    assumed = Assumed()
    mtbf = DAYS * _DAY / INTERRUPTIONS
    best = optimum(assumed.stall, assumed.restart, mtbf, assumed.step)
    interval = young_interval_seconds(assumed.stall, mtbf)
    ways: dict[str, Callable[[int], float]] = {
        "scratch": lambda seed: _scratch(seed, mtbf, assumed),
        "folder": lambda seed: _saving(seed, mtbf, assumed, interval, knows=False),
        "tiphys": lambda seed: _saving(seed, mtbf, assumed, interval, knows=True),
    }
    found = {name: [way(seed) for seed in (QUICK_SEEDS if quick else SEEDS)] for name, way in ways.items()}
    return {
        "gpus": GPUS,
        "days": DAYS,
        "mtbf_seconds": significant(mtbf),
        "kinds": KINDS,
        "assumed_seconds": {**vars(assumed), "restart": assumed.restart},
        "interval_seconds": significant(interval),
        "optimum_interval_seconds": significant(best.interval),
        "optimum_share": significant(best.share),
        "published_byterobust": PUBLISHED_BYTEROBUST,
        "goodput": {
            name: {"mean": significant(statistics.mean(shares)), "least": significant(min(shares))}
            for name, shares in found.items()
        },
    }


def _scratch(seed: int, mtbf: float, assumed: Assumed) -> float:
    """What the last of the 54 days has to show: the training since the last failure."""
    chance, now = random.Random(seed), 0.0
    begun = assumed.start
    while (now := now + chance.expovariate(1 / mtbf)) < DAYS * _DAY:
        begun = now + assumed.restart
    return max(0.0, DAYS * _DAY - begun) / (DAYS * _DAY)


def _saving(seed: int, mtbf: float, assumed: Assumed, interval: float, *, knows: bool) -> float:
    """Saves every ``interval``; ``knows``: saves on SIGTERM, too, and passes a damaged checkpoint over by itself."""
    chance, end = random.Random(seed), DAYS * _DAY
    useful = now = 0.0
    saved: list[float] = [0.0]
    """Useful training that each checkpoint holds, oldest first."""
    now += assumed.start
    while now < end:
        fails = now + chance.expovariate(1 / mtbf)
        (kind,) = chance.choices(list(KINDS), list(KINDS.values()))
        useful, now, saved = _train(useful, now, min(fails, end), interval, assumed, saved)
        if fails >= end:
            break
        if kind == "sigterm" and knows:
            saved.append(useful)
        elif kind == "corruption":
            saved = saved[:-1] or [0.0]
            now += 0.0 if knows else assumed.person
        useful = saved[-1]
        now += assumed.restart
    return useful / end


def _train(
    useful: float, now: float, until: float, interval: float, assumed: Assumed, saved: list[float]
) -> tuple[float, float, list[float]]:
    """Train ``until`` a failure. A save counts once it is committed."""
    begun: list[tuple[float, float]] = []
    while now + interval + assumed.stall <= until:
        now += interval
        useful += interval
        begun.append((now + assumed.stall + assumed.upload, useful))
        now += assumed.stall
    useful += min(interval, max(0.0, until - now))
    return useful, until, [*saved[-2:], *(held for committed, held in begun if committed <= until)][-3:]
