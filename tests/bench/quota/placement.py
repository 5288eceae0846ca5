"""How much of a real cluster placements fill: the openb trace, by the service's own placement.

The trace is data of others and not part of the project: ``TIPHYS_TRACES`` is
the folder that holds its two files (openb_node_list_all_node.csv and
openb_pod_list_default.csv of alibaba/clusterdata, cluster-trace-gpu-v2023).

The method is that of Q. Weng et al., "Beware of Fragmentation", ATC 2023, and
of its published artifact: the tasks of the trace arrive in random order, then
tasks that are drawn from it with replacement, until what arrived asks for as
many GPUs as the nodes with GPUs have. Each is placed when it arrives or never,
and none leaves. What is compared is the part of all GPUs that is then used.
"""

import csv
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from tiphys_plugin.quota.placement.inventory import ClusterFreeCapacity, NodeInventory
from tiphys_plugin.quota.placement.model import WHOLE_GPU, GangRequest, GpuNode, Placement, PodRequest
from tiphys_plugin.quota.placement.place import find_placement
from tiphys_plugin.quota.placement.scoring import BestFitScorer, FragmentationScorer, PlacementPolicy

FOLDER = "TIPHYS_TRACES"
NODES = "openb_node_list_all_node.csv"
TASKS = "openb_pod_list_default.csv"
TYPED_TASKS = "openb_pod_list_gpuspec33.csv"
"""The same trace with a third of the tasks bound to types of GPUs, often to any of several."""
SCORERS = {"best-fit": BestFitScorer, "fragmentation": FragmentationScorer}
COVERED_SHARE = 0.95
PUBLISHED = {"best-fit": 92.9, "fragmentation": 95.2}
PUBLISHED_TYPED = {"best-fit": 80.4, "fragmentation": 87.8}


class Outcome(NamedTuple):
    """``allocated`` percent of all GPUs, after so many tasks arrived, of which some had no place."""

    allocated: float
    tasks: int
    unplaced: int
    seconds: float


def find_typical_requests(pods: Iterable[PodRequest]) -> dict[PodRequest, float]:
    """The most frequent requests that together cover `COVERED_SHARE` of ``pods``, with their frequencies."""
    counts = Counter(replace(pod, host_memory_mb=0) for pod in pods)
    typical: dict[PodRequest, float] = {}
    for pod, frequency in counts.most_common():
        if sum(typical.values()) >= COVERED_SHARE * counts.total():
            break
        typical[pod] = frequency
    return typical


def absent(environ: Mapping[str, str]) -> str | None:
    """What keeps the trace from being replayed, in a sentence; None if nothing does."""
    folder = environ.get(FOLDER)
    if not folder:
        return f"allocation is not measured: set {FOLDER} to the folder that holds {NODES} and {TASKS}"
    missing = [name for name in (NODES, TASKS) if not (Path(folder) / name).is_file()]
    if missing:
        return f"allocation is not measured: {' and '.join(missing)} not found in {folder}, the folder of {FOLDER}"
    return None


def allocation(folder: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """The allocation by each policy, seed by seed; ``typed`` is that of `TYPED_TASKS`, if the folder has it."""
    nodes = read_nodes(folder / NODES)
    found: dict[str, Any] = {
        "nodes": len(nodes),
        "gpus": sum(node.gpus for node in nodes),
        "seeds": list(seeds),
        **_by_policy(nodes, read_tasks(folder / TASKS), seeds, PUBLISHED),
    }
    if (folder / TYPED_TASKS).is_file():
        found["typed"] = _by_policy(nodes, read_tasks(folder / TYPED_TASKS), seeds, PUBLISHED_TYPED)
    return found


def _by_policy(
    nodes: Sequence[GpuNode], tasks: Sequence[PodRequest], seeds: Sequence[int], published: Mapping[str, float]
) -> dict[str, Any]:
    return {
        policy: _summary(published[policy], [fill(nodes, tasks, policy, seed) for seed in seeds]) for policy in SCORERS
    }


def _summary(published: float, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "allocated_percent": round(mean(one.allocated for one in outcomes), 2),
        "published_percent": published,
        "by_seed": [round(one.allocated, 2) for one in outcomes],
        "tasks": [one.tasks for one in outcomes],
        "unplaced": [one.unplaced for one in outcomes],
        "seconds_per_seed": round(mean(one.seconds for one in outcomes), 1),
    }


def fill(nodes: Sequence[GpuNode], tasks: Sequence[PodRequest], policy: str, seed: int) -> Outcome:
    """Let tasks arrive until they ask for as many GPUs as there are."""
    began = time.perf_counter()
    free = ClusterFreeCapacity(NodeInventory(nodes))
    stock: Counter[str] = Counter()
    for node in nodes:
        stock[node.gpu_type] += node.gpus
    chosen = PlacementPolicy(SCORERS[policy](find_typical_requests(tasks), stock))
    capacity = WHOLE_GPU * sum(node.gpus for node in nodes)
    arrived = used = unplaced = 0
    for number, task in enumerate(_arriving(tasks, seed), 1):
        arrived += task.gpus * task.gpu_milli
        found = find_placement(free, GangRequest(task), chosen)
        if isinstance(found, Placement):
            free.allocate(found)
            used += task.gpus * task.gpu_milli
        else:
            unplaced += 1
        if arrived >= capacity:
            return Outcome(100 * used / capacity, number, unplaced, time.perf_counter() - began)
    raise AssertionError("tasks go on arriving")


def _arriving(tasks: Sequence[PodRequest], seed: int) -> Iterator[PodRequest]:
    draw = random.Random(seed)
    yield from draw.sample(tasks, len(tasks))
    while True:
        yield draw.choice(tasks)


def read_nodes(path: Path) -> list[GpuNode]:
    """The nodes that have GPUs."""
    with path.open(encoding="utf-8", newline="") as file:
        return [
            GpuNode(
                name=row["sn"],
                gpu_type=row["model"],
                gpus=int(row["gpu"]),
                cpu_milli=int(row["cpu_milli"]),
                host_memory_mb=int(row["memory_mib"]),
            )
            for row in csv.DictReader(file)
            if int(row["gpu"])
        ]


def read_tasks(path: Path) -> list[PodRequest]:
    """What each task asks for. A list without the column ``gpu_spec`` asks for no type of GPU."""
    with path.open(encoding="utf-8", newline="") as file:
        return [
            PodRequest(
                gpus=int(row["num_gpu"]),
                **_types(row.get("gpu_spec") or ""),
                gpu_milli=int(row["gpu_milli"]) or WHOLE_GPU,
                cpu_milli=int(row["cpu_milli"]),
                host_memory_mb=int(row["memory_mib"]),
            )
            for row in csv.DictReader(file)
        ]


def _types(spec: str) -> dict[str, Any]:
    types = tuple(dict.fromkeys(spec.split("|")))
    return {"gpu_types": types} if len(types) > 1 else {"gpu_type": types[0] or None}
