"""How long one decision takes: requests that are decided one by one, against a large book."""

import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from bench.samples import percentile
from tiphys_plugin.quota.lease import Lease, LeaseRequest, PendingRequest
from tiphys_plugin.quota.placement.inventory import ClusterFreeCapacity, NodeInventory
from tiphys_plugin.quota.placement.model import GangRequest, GpuNode, Placement, PodRequest
from tiphys_plugin.quota.placement.place import find_placement
from tiphys_plugin.quota.placement.scoring import PlacementPolicy, best_fit
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler.decide import SchedulingState, decide_admission

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


def decisions(nodes: int, waiting: int, samples: int, seed: int) -> dict[str, Any]:
    """Milliseconds for each of ``samples`` decisions about requests that stand anywhere in the line.

    Attempts run on all of ``nodes`` but for some 2 % of their GPUs.

    Before every tenth one a lease has gone and another one come, so what was
    worked out for the decisions before is of no use to it.
    """
    draw = random.Random(seed)
    state = _state(nodes, waiting, draw)
    times, after_a_change = [], []
    for number, mine in enumerate(draw.choices(state.pending, k=samples)):
        if changed := number % CHANGE_EVERY == 0:
            state = replace(state, leases=(*state.leases[1:], replace(state.leases[0], id=f"next-{number}")))
        rest = replace(state, pending=tuple(one for one in state.pending if one is not mine))
        began = time.perf_counter()
        decide_admission(rest, mine.request, mine.arrival, NOW)
        times.append(1000 * (time.perf_counter() - began))
        after_a_change += times[-1:] if changed else []
    return {
        "nodes": nodes,
        "leases": len(state.leases),
        "waiting": waiting,
        "samples": samples,
        "p50_ms": percentile(times, 50),
        "p99_ms": percentile(times, 99),
        "p50_after_a_change_ms": percentile(after_a_change, 50),
        "per_second": round(1000 * len(times) / sum(times), 1),
    }


def _state(nodes: int, waiting: int, draw: random.Random) -> SchedulingState:
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
    return SchedulingState(Queues.model_validate(document), held, line)


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
