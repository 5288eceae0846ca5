"""What does the next attempt get that those before it had not?

To repeat a failure under the same conditions repeats the failure. So the causes
of all attempts of a step are remembered, over evictions in between and over
submissions, and the next one gets more memory, another node, or no spot node.
Pure: ends and claims in, what is changed out.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tiphys.protocol.quantities import memory_quantity
from tiphys.protocol.step_spec import RetryPolicy
from tiphys.records import AttemptEnd, Cause, Escalation, Outcome
from tiphys.store import Attempt

LEAST_BATCH_SCALE = 0.25
_OF_NODES = (Cause.INFRASTRUCTURE, Cause.HANG, Cause.UNKNOWN)
_NOT_OF_NODES = ("exit-code-76", "image-not-pulled")
"""Rules of such causes that say nothing of the node: another attempt took its place, the registry is away."""


class Situation(NamedTuple):
    """What the next attempt would be without any escalation."""

    submission: int
    step_key: str
    memory_bytes: int | None = None
    """What its container may use; None if that has no limit, or nobody asked to raise it."""


def escalate(attempts: Sequence[Attempt], policy: RetryPolicy, now: Situation) -> Escalation | None:
    """What is changed for the attempt after ``attempts``; None for nothing."""
    memory = _memory(attempts, policy, now.memory_bytes)
    on_demand = _on_demand(attempts, policy, now.submission)
    avoided = _avoided(attempts, policy)
    scale = _batch_scale(attempts, now.step_key)
    grown = memory is not None and now.memory_bytes is not None and memory > now.memory_bytes
    because = [
        *([f"{memory_quantity(memory)} of memory"] if grown and memory else []),
        *(["no spot node"] if on_demand else []),
        *([f"rather not on {', '.join(avoided)}"] if avoided else []),
        *([f"batch scale {scale:g}"] if scale < 1 else []),
    ]
    if not because and memory is None:
        return None
    return Escalation(
        memory_bytes=memory, on_demand=on_demand, avoided_nodes=avoided, batch_scale=scale, words=", ".join(because)
    )


def _memory(attempts: Sequence[Attempt], policy: RetryPolicy, base: int | None) -> int | None:
    """Above what was too little before, whatever ended the attempts since; never less than the step asks for today."""
    if base is None or policy.memory_ceiling_bytes is None:
        return None
    too_little = [
        (claim.escalation.memory_bytes if claim.escalation else None) or base
        for claim, end in attempts
        if end is not None and end.cause is Cause.OUT_OF_MEMORY
    ]
    if not too_little:
        return base
    return max(base, min(math.ceil(max(too_little) * policy.memory_factor), policy.memory_ceiling_bytes))


def _on_demand(attempts: Sequence[Attempt], policy: RetryPolicy, submission: int) -> bool:
    """Whether spot nodes were taken away too often, or once more would be the end of the step."""
    if policy.on_demand_after is None:
        return False
    taken = [end for end in _since_progress(attempts) if end.cause is Cause.PREEMPTION and end.preempted is None]
    charged = sum(1 for end in taken if end.submission == submission)
    last_try = policy.preemption is not None and 0 < policy.preemption <= charged
    return len(taken) >= policy.on_demand_after or last_try


def _avoided(attempts: Sequence[Attempt], policy: RetryPolicy) -> tuple[str, ...]:
    """Nodes on which attempts have failed too often since one has got ahead there."""
    if policy.avoid_node_after is None:
        return ()
    failures: Counter[str] = Counter()
    for end in _failed(attempts):
        found = end.evidence
        if found is None or not found.node:
            continue
        if end.progress:
            failures[found.node] = 0
        failures[found.node] += end.cause in _OF_NODES and found.rule not in _NOT_OF_NODES
    return tuple(sorted(node for node, count in failures.items() if count >= policy.avoid_node_after))


def _batch_scale(attempts: Sequence[Attempt], step_key: str) -> float:
    """Half for each time that the GPU was too small for the same program."""
    full = [end for end in _failed(attempts) if end.cause is Cause.GPU_OUT_OF_MEMORY and end.step_key == step_key]
    return max(0.5 ** len(full), LEAST_BATCH_SCALE)


def _failed(attempts: Sequence[Attempt]) -> Iterator[AttemptEnd]:
    return (end for _, end in attempts if end is not None and end.outcome is Outcome.FAILED)


def _since_progress(attempts: Sequence[Attempt]) -> list[AttemptEnd]:
    ends = list(_failed(attempts))
    newest = max((index for index, end in enumerate(ends) if end.progress), default=0)
    return ends[newest:]
