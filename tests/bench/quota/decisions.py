"""How long one decision takes: requests that are decided one by one, against a large book."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from statistics import mean
from typing import Any

from bench.samples import percentile, seconds, significant, summary
from tiphys_plugin.quota.lease import Lease, LeaseRequest, LedgerState, PendingRequest
from tiphys_plugin.quota.placement.inventory import ClusterFreeCapacity, NodeInventory
from tiphys_plugin.quota.placement.model import GangRequest, GpuNode, Placement, PodRequest
from tiphys_plugin.quota.placement.place import find_placement
from tiphys_plugin.quota.placement.scoring import PlacementPolicy, best_fit
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler.cache import SchedulerCache
from tiphys_plugin.quota.scheduler.decide import decide_admission

NOW = datetime(2026, 1, 1, tzinfo=UTC)
COHORTS = 3
QUEUES = 12
TYPES = ("A100", "H100", "*")
KINDS = ("A100", "H100", "T4")
SIZES = (1, 1, 1, 2, 4, 8)
GPUS_PER_NODE = 8
NODES_PER_RACK = 16
FREE = 0.02
"""Of each quota, and of the nodes."""
CHANGE_EVERY = 10
"""Decisions, for each change of what is held: who waits asks every few seconds, and trainings take hours."""
ROUNDS = 5
"""Of which ratios are taken; fewer where there are few decisions."""


def decisions(nodes: int, waiting: int, samples: int, seed: int) -> dict[str, Any]:
    """CPU time of ``samples`` decisions about requests anywhere in the line, each in turns with `plain_scan`.

    Attempts run on all of ``nodes`` but for some 2 % of their GPUs. Before every tenth decision a lease has gone and
    another one come, so what was worked out for the decisions before is of no use to it.

    CPU time, since a decision neither reads nor writes: what else the machine does is no part of it.
    """
    draw = random.Random(seed)
    state = _state(nodes, waiting, draw)
    cache = SchedulerCache()
    times, scans, after_a_change = [], [], []
    for number, mine in enumerate(draw.choices(state.pending, k=samples)):
        if changed := number % CHANGE_EVERY == 0:
            state = replace(state, leases=(*state.leases[1:], replace(state.leases[0], id=f"next-{number}")))
        times.append(_cpu_seconds(partial(decide_admission, state, mine.request, mine.arrival, NOW, cache)))
        scans.append(_cpu_seconds(partial(plain_scan, state)))
        after_a_change += times[-1:] if changed else []
    length = max(CHANGE_EVERY, samples // ROUNDS)
    rounds = [(times[n : n + length], mean(scans[n : n + length])) for n in range(0, samples, length)]
    return {
        "nodes": nodes,
        "leases": len(state.leases),
        "waiting": waiting,
        "samples": samples,
        "p50_ms": _milliseconds(times, 50),
        "p99_ms": _milliseconds(times, 99),
        "p50_after_a_change_ms": _milliseconds(after_a_change, 50),
        "per_second": significant(len(times) / sum(times)),
        "scan_p50_ms": _milliseconds(scans, 50),
        "over_scan": summary([mean(part) / scan for part, scan in rounds]),
        "p99_over_scan": summary([percentile(part, 99) / scan for part, scan in rounds]),
    }


def plain_scan(state: LedgerState) -> list[PendingRequest]:
    """The least that a scheduler without memory does for one decision, a plain loop over the same requests.

    It adds up what is held by queue and type and by node, and puts the line into its order.
    """
    held: Counter[tuple[str, str]] = Counter()
    used: Counter[str] = Counter()
    for lease in state.leases:
        held[lease.request.queue, lease.pool] += lease.request.gpus
        for node in lease.nodes:
            used[node] += lease.request.gpus
    return sorted(state.pending, key=lambda one: (-one.request.priority, one.arrival))


def _cpu_seconds(call: Callable[[], object]) -> float:
    return seconds(call, time.thread_time)


def _milliseconds(values: Sequence[float], percent: float) -> float:
    return significant(1000 * percentile(values, percent))


def _state(nodes: int, waiting: int, draw: random.Random) -> LedgerState:
    held = tuple(_leases(nodes, draw))
    quotas: Counter[tuple[str, str]] = Counter()
    for one in held:
        quotas[one.request.queue, one.pool] += one.request.gpus
    queues = [
        {
            "name": _queue(number),
            "cohort": f"cohort-{number % COHORTS}",
            "weight": 1 + number % 4,
            "gpus": {pool: max(16, int((1 + FREE) * quotas[_queue(number), pool])) for pool in TYPES},
        }
        for number in range(QUEUES)
    ]
    document = {"queues": queues, "nodes": [node.model_dump() for node in _fleet(nodes)]}
    line = tuple(PendingRequest(_request(len(held) + number, draw), number + 1, NOW, NOW) for number in range(waiting))
    return LedgerState(held, line, queues=Queues.model_validate(document))


def _fleet(nodes: int) -> list[GpuNode]:
    return [
        GpuNode(
            name=f"node-{number}",
            gpu_type=KINDS[number % len(KINDS)],
            gpus=GPUS_PER_NODE,
            rack=f"rack-{number // NODES_PER_RACK}",
        )
        for number in range(nodes)
    ]


def _leases(nodes: int, draw: random.Random) -> Iterator[Lease]:
    """Requests as they come, each on a node, until the nodes are nearly full."""
    free, policy, left = (
        ClusterFreeCapacity(NodeInventory(_fleet(nodes))),
        PlacementPolicy(best_fit),
        GPUS_PER_NODE * nodes * (1 - FREE),
    )
    number = 0
    while left > 0:
        number += 1
        request = _request(number, draw)
        found = find_placement(free, GangRequest(PodRequest(request.gpus, request.gpu_type)), policy)
        if isinstance(found, Placement):
            free.allocate(found)
            left -= request.gpus
            granted = NOW - timedelta(seconds=draw.uniform(0, 3600))
            yield Lease(f"lease-{number}", request, _pool(request), granted, granted, found.nodes)


def _request(number: int, draw: random.Random) -> LeaseRequest:
    """Half of them say for how long; all leases end later than now."""
    return LeaseRequest(
        uid=f"u{number}",
        step="fit",
        node_hash=f"n{number}",
        namespace="ml",
        workflow=f"w{number}",
        instance_hash=f"w{number}.fit",
        run=f"r{number}",
        attempt=1,
        queue=_queue(draw.randrange(QUEUES)),
        gpus=draw.choice(SIZES),
        gpu_type=draw.choice(KINDS),
        priority=draw.choice((0, 0, 0, 10)),
        seconds=draw.choice((None, draw.randint(3601, 86400))),
    )


def _queue(number: int) -> str:
    return f"queue-{number}"


def _pool(request: LeaseRequest) -> str:
    return request.gpu_type if request.gpu_type in TYPES else "*"
