"""A trace of trainings whose durations nobody knows: by attained GPU time, and first come first served.

The traces are data of others and not part of the project: ``TIPHYS_TRACES`` is the
folder that holds those of the simulator of Muri (Y. Zhao et al., "Multi-Resource
Interleaving for Deep Learning Training", SIGCOMM 2022) under the names of `TRACES`,
with the mean seconds from submission to end that its authors report for Tiresias, on
8 nodes with 8 GPUs each.

What is compared: a queue that goes by GPU time in the levels that every queue
has that says nothing else, in which trainings save and go for those that have
had less; against whoever fits in order of arrival, passing over who does not.
Both are placed on the nodes. Each preemption costs a save of 30 s and then the
300 s of a restart. Nothing is fitted to the trace.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.quota.placement import FOLDER
from tiphys_plugin.quota.queue import DEFAULT_LEVEL_GPU_HOURS
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.simulation.jobs import PreemptionCosts, ReplayResult
from tiphys_plugin.quota.simulation.prepare import assign_to_queue, spread_over_nodes
from tiphys_plugin.quota.simulation.replay import POLICIES, replay_jobs
from tiphys_plugin.quota.simulation.results import measure_replay
from tiphys_plugin.quota.simulation.trace import read_trace

TRACES = {"muri_trace1.csv": 3_330_371, "muri_trace3.csv": 347_213}
TRACE = "muri_trace1.csv"
NODES, GPUS_PER_NODE = 8, 8
SAVE_SECONDS = 30.0
OTHER_SAVES = (0.0, 15.0, 45.0)
"""A little more or less at the begin changes which trainings meet years later: how far the number moves by that."""
RESTART_SECONDS = 300.0


def absent(environ: Mapping[str, str]) -> str | None:
    """What keeps the trace from being replayed, in a sentence; None if nothing does."""
    folder = environ.get(FOLDER)
    if not folder:
        return f"trainings of unknown duration are not measured: set {FOLDER} to the folder that holds {TRACE}"
    for name in TRACES:
        if not (Path(folder) / name).is_file():
            return (
                f"trainings of unknown duration are not measured: {name} not found in {folder}, the folder of {FOLDER}"
            )
    return None


def attained(path: Path, saves: tuple[float, ...] = ()) -> dict[str, Any]:
    """Mean seconds from submission to end, and their ratios to Tiresias and to first come first served.

    ``saves`` are seconds that a save might take in its place.
    """
    jobs = spread_over_nodes(assign_to_queue(read_trace(path).jobs, queues_on_nodes(), "all"), queues_on_nodes())
    by_time = queues_on_nodes(order="attained", preempts_longer=True)
    ours = _summary(
        replay_jobs(by_time, jobs, costs=PreemptionCosts(save_seconds=SAVE_SECONDS, restart_seconds=RESTART_SECONDS))
    )
    fifo = _summary(replay_jobs(queues_on_nodes(), jobs, POLICIES["skip"]))
    others = {
        f"{save:g}": _summary(
            replay_jobs(by_time, jobs, costs=PreemptionCosts(save_seconds=save, restart_seconds=RESTART_SECONDS))
        )
        for save in saves
    }
    return {
        "jobs": len(jobs),
        "levels_gpu_hours": list(DEFAULT_LEVEL_GPU_HOURS),
        "save_seconds": SAVE_SECONDS,
        "restart_seconds": RESTART_SECONDS,
        "attained": ours,
        "fifo_skip": fifo,
        "published_tiresias_seconds": TRACES[path.name],
        "tiresias_ratio": round(ours["mean_completion_seconds"] / TRACES[path.name], 4),
        "fifo_ratio": round(ours["mean_completion_seconds"] / fifo["mean_completion_seconds"], 4),
        **({"with_other_save_seconds": others} if others else {}),
    }


def queues_on_nodes(**changes: object) -> Queues:
    """One queue for all GPUs, with other settings than the default ones."""
    nodes = [{"name": f"n{number}", "gpu_type": "V100", "gpus": GPUS_PER_NODE} for number in range(NODES)]
    queue = {"name": "all", "gpus": {"*": NODES * GPUS_PER_NODE}, **changes}
    return Queues.model_validate({"queues": [queue], "nodes": nodes})


def _summary(done: ReplayResult) -> dict[str, Any]:
    found = measure_replay(done)
    total = found.total
    assert total.completion_seconds is not None
    assert len(done.runs) == total.jobs, "some never ran, and a mean over the others says nothing"
    return {
        "mean_completion_seconds": round(total.completion_seconds),
        "preemptions": total.preemptions,
        "lost_gpu_hours": round(total.lost_gpu_hours),
        "gpu_hours": round(total.gpu_hours),
        "last_end_seconds": round(found.span_seconds),
        "in_use": round(found.inventory_utilisation or 0.0, 4),
    }
