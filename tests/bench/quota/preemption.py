"""Requests of high priority on a full cluster: how long they wait, and what it costs those that go for them.

Jobs of no priority ask for more GPUs than there are, by as much as the load
says, and now and then one of high priority comes. The service looks every few
seconds, who is asked saves and goes, and both are placed on nodes.

Waiting is measured where every training takes its whole grace period to go. It
may be as long as that, a save, and two looks: one until it is seen who has to
go, one until the GPUs are seen to be back.

Loss is that of the trainings that had to go, once by the handshake, which costs
the time of the save, and once as if each had been ended at the moment at which it
was asked, which costs all training since the checkpoint before.
"""

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

from bench.samples import percentile
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.simulation.jobs import PreemptionCosts, ReplayResult, SimulatedAttempt, TraceJob
from tiphys_plugin.quota.simulation.replay import replay_jobs
from tiphys_plugin.runtime.settings import PluginSettings

from tiphys.protocol.step_spec import CheckpointPolicy

NODES, GPUS_PER_NODE = 8, 8
GPUS = NODES * GPUS_PER_NODE
HIGH = 10
SIZES = (1, 1, 2, 4, 8)
GRACE_SECONDS = 60.0
SAVE_SECONDS = 3.2
"""A GiB for each rank, as ``bench-checkpoint`` measures it (``durable.committed_seconds``)."""
OTHER_SAVES = (10.0, 30.0)
CHECKPOINT_EVERY_SECONDS = float(CheckpointPolicy.model_fields["every"].default)
LOOK_SECONDS = PluginSettings.preemption_interval_seconds
BOUND_SECONDS = GRACE_SECONDS + SAVE_SECONDS + 2 * LOOK_SECONDS
HIGH_EVERY_SECONDS = 300.0
"""With `SIZES` and ten minutes for each they want a tenth of all GPUs: those of high priority seldom meet."""


def preemption(loads: Sequence[float], requests: int, seed: int, other_saves: Sequence[float] = ()) -> dict[str, Any]:
    """Waits by load, and the loss over all of them; that also for saves that take longer."""
    waits = {load: sorted(_waits(_replayed(load, requests, seed, GRACE_SECONDS))) for load in loads}
    worst = max(percentile(one, 99) for one in waits.values())
    lost = {f"{save:g}": _lost(loads, requests, seed, save) for save in (SAVE_SECONDS, *other_saves)}
    return {
        "grace_seconds": GRACE_SECONDS,
        "save_seconds": SAVE_SECONDS,
        "checkpoint_every_seconds": CHECKPOINT_EVERY_SECONDS,
        "look_every_seconds": LOOK_SECONDS,
        "bound_seconds": BOUND_SECONDS,
        "requests": requests,
        "p99_wait_seconds": {f"{load:g}": percentile(one, 99) for load, one in waits.items()},
        "longest_wait_seconds": {f"{load:g}": one[-1] for load, one in waits.items()},
        "wait_ratio": round(worst / BOUND_SECONDS, 4),
        "loss_by_save_seconds": lost,
        "loss_ratio": lost[f"{SAVE_SECONDS:g}"]["ratio"],
    }


def _lost(loads: Sequence[float], requests: int, seed: int, save_seconds: float) -> dict[str, Any]:
    done = [_replayed(load, requests, seed, save_seconds) for load in loads]
    saved, ended = (sum(one) for one in zip(*map(_losses, done), strict=True))
    return {
        "preemptions": sum(run.preemptions for one in done for run in one.runs),
        "gpu_seconds": round(saved),
        "gpu_seconds_if_ended_at_once": round(ended),
        "ratio": round(saved / ended, 4),
    }


def jobs_of(load: float, requests: int, seed: int) -> list[TraceJob]:
    """Low ones that ask for ``load`` times all GPUs as long as high ones come; the cluster is full before those do."""
    draw = random.Random(f"{seed} {load}")
    full = 3600.0
    horizon = full + requests * HIGH_EVERY_SECONDS
    return [*_low(load, horizon, draw), *_high(full, requests, draw)]


def _low(load: float, horizon: float, draw: random.Random) -> Iterator[TraceJob]:
    for number in range(GPUS):
        yield TraceJob(f"first-{number}", 0.0, draw.uniform(600, 14_400), 1, "all")
    at, number = 0.0, 0
    while at < horizon:
        gpus, seconds = draw.choice(SIZES), draw.uniform(600, 14_400)
        yield TraceJob(f"low-{number}", at, seconds, gpus, "all")
        at, number = at + gpus * seconds / (load * GPUS), number + 1


def _high(since: float, requests: int, draw: random.Random) -> Iterator[TraceJob]:
    at = since
    for number in range(requests):
        at += draw.expovariate(1 / HIGH_EVERY_SECONDS)
        yield TraceJob(f"high-{number}", at, draw.uniform(300, 900), draw.choice(SIZES), "all", priority=HIGH)


def _replayed(load: float, requests: int, seed: int, save_seconds: float) -> ReplayResult:
    costs = PreemptionCosts(CHECKPOINT_EVERY_SECONDS, save_seconds, look_every_seconds=LOOK_SECONDS)
    return replay_jobs(_queues(), jobs_of(load, requests, seed), costs=costs)


def _queues() -> Queues:
    nodes = [{"name": f"n{number}", "gpu_type": "A100", "gpus": GPUS_PER_NODE} for number in range(NODES)]
    queue = {"name": "all", "gpus": {"*": GPUS}, "preempts_lower_priority": True}
    return Queues.model_validate({"queues": [queue], "nodes": nodes})


def _waits(done: ReplayResult) -> list[float]:
    return [run.started_seconds - run.submitted_seconds for run in done.runs if run.job.priority == HIGH]


def _losses(done: ReplayResult) -> tuple[float, float]:
    """GPU-seconds lost by the handshake, and without it by the same trainings at the same moments."""
    gone = [(run.job.gpus, one) for run in done.runs for one in run.attempts[:-1]]
    saved = math.fsum(gpus * (one.held_seconds - one.kept_seconds - one.restart_seconds) for gpus, one in gone)
    return saved, math.fsum(gpus * _since_commit(one) for gpus, one in gone)


def _since_commit(one: SimulatedAttempt) -> float:
    trained = one.kept_seconds + one.lost_seconds
    return trained - CHECKPOINT_EVERY_SECONDS * math.floor(trained / CHECKPOINT_EVERY_SECONDS)
