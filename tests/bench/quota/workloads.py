"""Jobs and queues that put one promise of the ledger to the test."""

import random
from collections.abc import Iterator

from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.simulation.jobs import ReplayResult, TraceJob

GANG = "gang"
GPUS = 64
ARRIVES_SECONDS = 1000.0


def one_queue() -> Queues:
    return Queues.model_validate({"queues": [{"name": "all", "gpus": {"*": GPUS}}]})


def lending_queues() -> Queues:
    """The small jobs live on what the queue of the gang lends."""
    names = {"all": GPUS, "small": 0}
    document = [{"name": name, "gpus": {"*": gpus}, "cohort": "lab"} for name, gpus in names.items()]
    return Queues.model_validate({"queues": document})


def stream(horizon_seconds: float, seed: int, queue: str = "all", declared: bool = True) -> list[TraceJob]:
    """Small jobs that never let all GPUs be free at once, none of which has to wait, and one that needs all GPUs."""
    draw = random.Random(seed)
    small = []
    for number in range(int(horizon_seconds / 10)):
        duration = draw.randint(100, 300)
        limit = duration if declared else None
        small.append(
            TraceJob(f"small-{number}", 10.0 * number, duration, draw.randint(1, 2), queue, limit_seconds=limit)
        )
    return [*small, TraceJob(GANG, ARRIVES_SECONDS, 600, GPUS, "all", limit_seconds=600 if declared else None)]


def gang_wait(replay: ReplayResult) -> float:
    gang = next(run for run in replay.runs if run.job.name == GANG)
    return gang.started_seconds - gang.submitted_seconds


def gang_bound(replay: ReplayResult) -> float:
    """All that the gang has to wait for: the ends of what runs when it comes. Nobody waits before it."""
    before = [run for run in replay.runs if run.submitted_seconds < ARRIVES_SECONDS]
    assert all(run.started_seconds <= ARRIVES_SECONDS for run in before)
    return max(run.started_seconds + run.job.duration_seconds for run in before) - ARRIVES_SECONDS


WEIGHTS = {"one": 1, "two": 2, "four": 4}


def weighted_queues() -> Queues:
    """Three queues without GPUs of their own borrow the same 64."""
    borrowers = [{"name": name, "gpus": {"*": 0}, "cohort": "lab", "weight": w} for name, w in WEIGHTS.items()]
    return Queues.model_validate({"queues": [{"name": "owner", "gpus": {"*": GPUS}, "cohort": "lab"}, *borrowers]})


def saturating(hours: float, seed: int) -> list[TraceJob]:
    """Each queue asks for twice what its weight gives it, all the time."""
    return [job for name in WEIGHTS for job in _asking(name, hours * 3600, random.Random(f"{seed} {name}"))]


def _asking(name: str, horizon_seconds: float, draw: random.Random) -> Iterator[TraceJob]:
    due = GPUS * WEIGHTS[name] / sum(WEIGHTS.values())
    at, number = 0.0, 0
    while at < horizon_seconds:
        gpus, duration = draw.choice((1, 1, 2, 4)), draw.randint(1200, 3600)
        yield TraceJob(f"{name}-{number}", at, duration, gpus, name)
        at, number = at + gpus * duration / (2 * due), number + 1
