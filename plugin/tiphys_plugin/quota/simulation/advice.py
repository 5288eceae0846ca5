"""Finds the queues whose rules cost time on a trace, and a setting under which they cost less.

The yardstick is the plain queue of the policy ``skip``: any job starts as soon as it
fits, and nothing is preempted. It starves large gangs, so a queue may lose to it for a
good reason; the point is to know by how much. No order is best for all jobs: trainings of
equal length lose by every preemption, and without preemption short ones wait for long ones.

The settings that are tried are those of the queue file, one change at a time. They are
replayed on the same trace, so a recommendation is measured, and fits that trace only.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tiphys_plugin.quota.queue import DEFAULT_BACKFILL_HOURS, PREEMPTIBLE_MIN_RUNTIME_SECONDS, Queue
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.simulation.results import SimulationOutcome

LOSS_FACTOR = 1.02
"""A mean completion longer than that of the plain queue by more than this factor is a loss; less is chance."""
_LONGER = 4

Settings = Mapping[str, Any]
"""Fields of a queue in the queue file; None: the field is left out."""


@dataclass(frozen=True)
class MeasuredSettings:
    """What a change of settings did to the mean completion of its queue, and of all jobs, in seconds."""

    settings: Settings
    completion_seconds: float
    total_completion_seconds: float


@dataclass(frozen=True)
class QueueLoss:
    """A queue whose jobs complete later than those of a plain queue; mean completions in seconds."""

    queue: str
    completion_seconds: float
    plain_completion_seconds: float
    alternatives: tuple[MeasuredSettings, ...] = ()
    """Changes of settings under which its jobs complete earlier, and not all jobs together later. The best is first."""

    @property
    def factor(self) -> float:
        return self.completion_seconds / self.plain_completion_seconds


def find_losses(
    queues: Queues, outcome: SimulationOutcome, plain: SimulationOutcome, measure: Callable[[Queues], SimulationOutcome]
) -> list[QueueLoss]:
    """The queues that lose to the plain one, the largest loss first.

    Args:
        queues: The queues of ``outcome``.
        outcome: A replay under the policy of the service.
        plain: The replay of the same jobs under the policy ``skip``.
        measure: Replays the same jobs under other queues.
    """
    plain_by_queue = {result.queue: result.completion_seconds for result in plain.queues}
    losses = []
    for result in outcome.queues:
        queue, plain_seconds = queues.find(result.queue or ""), plain_by_queue[result.queue]
        if queue is None or not result.completion_seconds or not plain_seconds:
            continue
        loss = QueueLoss(queue.name, result.completion_seconds, plain_seconds)
        if loss.factor > LOSS_FACTOR:
            losses.append(replace(loss, alternatives=_find_alternatives(queues, queue, outcome, measure)))
    return sorted(losses, key=lambda loss: -loss.factor)


def _find_alternatives(
    queues: Queues, queue: Queue, outcome: SimulationOutcome, measure: Callable[[Queues], SimulationOutcome]
) -> tuple[MeasuredSettings, ...]:
    before = _completion_of(outcome, queue.name)
    measured = []
    for changes in list_alternatives(queue):
        settings = {
            name: value for name, value in changes.items() if value is not None or name in queue.model_fields_set
        }
        after = measure(with_settings(queues, queue.name, settings))
        measured.append(
            MeasuredSettings(settings, _completion_of(after, queue.name), after.total.completion_seconds or 0.0)
        )
    total_before = outcome.total.completion_seconds or 0.0
    better = [
        row for row in measured if row.completion_seconds < before and row.total_completion_seconds <= total_before
    ]
    return tuple(sorted(better, key=lambda result: result.completion_seconds))


def _completion_of(outcome: SimulationOutcome, queue: str) -> float:
    return next(result.completion_seconds or 0.0 for result in outcome.queues if result.queue == queue)


def list_alternatives(queue: Queue) -> Iterator[Settings]:
    """Changes of the settings that decide the order of a queue, each worth a replay."""
    if queue.is_backfill_preemptible:
        yield {"min_runtime_seconds": _LONGER * max(queue.protected_seconds, PREEMPTIBLE_MIN_RUNTIME_SECONDS)}
    if queue.order == "attained":
        by_arrival = {"order": None, "preempts_longer": None, "attained_gpu_hours": None, "min_runtime_seconds": None}
        yield {**by_arrival, "backfill": None}
        if queue.preempts_longer:
            yield {**by_arrival, "backfill": "preemptible"}
        return
    if queue.is_backfill_bounded:
        yield {"backfill_hours": _LONGER * max(queue.backfill_hours, DEFAULT_BACKFILL_HOURS)}
    if queue.backfill == "strict":
        yield {"backfill": "bounded"}
    yield {"backfill": None, "backfill_hours": None, "order": "attained", "preempts_longer": True}


def with_settings(queues: Queues, name: str, settings: Settings) -> Queues:
    """``queues`` with other ``settings`` of the queue ``name``."""
    document = queues.model_dump(exclude_unset=True)
    for queue in document["queues"]:
        if queue["name"] == name:
            queue.update(settings)
            for field in [field for field, value in queue.items() if value is None]:
                del queue[field]
    return Queues.model_validate(document)
