"""Escalation: changes to the next attempt after failures of earlier ones.

A retry under the same conditions repeats the failure. The causes of all attempts
of a step therefore count, across preemptions and submissions, and the next
attempt gets more memory, another node, no spot node, or a smaller batch. Pure:
a function of the claims and ends.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tiphys.failures.retry_budget import ends_since_progress
from tiphys.protocol.quantities import format_memory_quantity
from tiphys.protocol.step_spec import RetryPolicy
from tiphys.records import AttemptEnd, AttemptEndOutcome, Cause, Escalation
from tiphys.store import Attempt

MIN_BATCH_SCALE = 0.25
_NODE_CAUSES = (Cause.INFRASTRUCTURE, Cause.HANG, Cause.UNKNOWN)
_NOT_NODE_RULES = ("exit-code-76", "image-not-pulled")
"""Rules with these causes that do not blame the node: a newer attempt exists, or the registry is unavailable."""


class AttemptBaseline(NamedTuple):
    """The next attempt without any escalation."""

    submission: int
    step_key: str
    memory_bytes: int | None = None
    """Memory limit of its container; None without a limit, or if the policy does not raise it."""


def compute_escalation(
    attempts: Sequence[Attempt], policy: RetryPolicy, baseline: AttemptBaseline
) -> Escalation | None:
    """Changes to the attempt after ``attempts``; None without changes."""
    memory = _escalated_memory_bytes(attempts, policy, baseline.memory_bytes)
    on_demand = _needs_on_demand(attempts, policy, baseline.submission)
    avoided = _nodes_to_avoid(attempts, policy)
    scale = _escalated_batch_scale(attempts, baseline.step_key)
    is_raised = memory is not None and baseline.memory_bytes is not None and memory > baseline.memory_bytes
    changes = [
        *([f"{format_memory_quantity(memory)} of memory"] if is_raised and memory else []),
        *(["no spot node"] if on_demand else []),
        *([f"rather not on {', '.join(avoided)}"] if avoided else []),
        *([f"batch scale {scale:g}"] if scale < 1 else []),
    ]
    if not changes and memory is None:
        return None
    return Escalation(
        memory_bytes=memory,
        on_demand=on_demand,
        avoided_nodes=avoided,
        batch_scale=scale,
        explanation=", ".join(changes),
    )


def _escalated_memory_bytes(attempts: Sequence[Attempt], policy: RetryPolicy, base: int | None) -> int | None:
    """More than the largest limit that was too small, up to the ceiling; never less than the step declares now."""
    if base is None or policy.memory_ceiling_bytes is None:
        return None
    insufficient = [
        (claim.escalation.memory_bytes if claim.escalation else None) or base
        for claim, end in attempts
        if end is not None and end.cause is Cause.OUT_OF_MEMORY
    ]
    if not insufficient:
        return base
    return max(base, min(math.ceil(max(insufficient) * policy.memory_factor), policy.memory_ceiling_bytes))


def _needs_on_demand(attempts: Sequence[Attempt], policy: RetryPolicy, submission: int) -> bool:
    """Whether preemptions reached the limit of the policy, or one more would exhaust the retry budget."""
    if policy.on_demand_after is None:
        return False
    ends = ends_since_progress(list(_failed_ends(attempts)))
    preemptions = [end for end in ends if end.cause is Cause.PREEMPTION and not end.lost_gpus_to_queue]
    charged = sum(1 for end in preemptions if end.submission == submission)
    is_last_retry = policy.preemption is not None and 0 < policy.preemption <= charged
    return len(preemptions) >= policy.on_demand_after or is_last_retry


def _nodes_to_avoid(attempts: Sequence[Attempt], policy: RetryPolicy) -> tuple[str, ...]:
    """Nodes with too many failed attempts since the last attempt that made progress there."""
    if policy.avoid_node_after is None:
        return ()
    failures: Counter[str] = Counter()
    for end in _failed_ends(attempts):
        evidence = end.evidence
        if evidence is None or not evidence.node:
            continue
        if end.progress:
            failures[evidence.node] = 0
        failures[evidence.node] += end.cause in _NODE_CAUSES and evidence.rule not in _NOT_NODE_RULES
    return tuple(sorted(node for node, count in failures.items() if count >= policy.avoid_node_after))


def _escalated_batch_scale(attempts: Sequence[Attempt], step_key: str) -> float:
    """Half for each GPU out of memory of the same program, not below `MIN_BATCH_SCALE`."""
    gpu_full_ends = [
        end for end in _failed_ends(attempts) if end.cause is Cause.GPU_OUT_OF_MEMORY and end.step_key == step_key
    ]
    return max(0.5 ** len(gpu_full_ends), MIN_BATCH_SCALE)


def _failed_ends(attempts: Sequence[Attempt]) -> Iterator[AttemptEnd]:
    return (end for _, end in attempts if end is not None and end.outcome is AttemptEndOutcome.FAILED)
