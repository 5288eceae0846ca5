"""Do queues that want more than there is get what their weights promise?"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from tiphys_plugin.queues import Queue, Queues
from tiphys_plugin.simulation.timeline import Span


def fairness(queues: Queues, spans: Sequence[Span]) -> dict[str, float]:
    """Jain's index of each cohort in which two queues ever had to wait at the same time.

    Compared is what each queue held while it waited beside others, to what its
    weight would have given it of all that they held. 1: everybody got that;
    1/n: one of n had it all.
    Source: R. Jain, D. Chiu, W. Hawe, "A Quantitative Measure of Fairness", DEC TR-301, 1984.
    """
    cohorts = sorted({queue.cohort for queue in queues.queues if queue.cohort is not None})
    indexes = {cohort: jain(_ratios(_members(queues, cohort), spans)) for cohort in cohorts}
    return {cohort: index for cohort, index in indexes.items() if index is not None}


def jain(values: Sequence[float]) -> float | None:
    """None for less than two values, or if all are zero."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if len(values) > 1 and squares else None


def _members(queues: Queues, cohort: str) -> list[Queue]:
    return [queue for queue in queues.queues if queue.cohort == cohort and not queue.stopped]


def _ratios(members: Sequence[Queue], spans: Iterable[Span]) -> list[float]:
    """Of each queue that ever had a rival: GPU-seconds that it got to those that were its due."""
    got: dict[str, float] = defaultdict(float)
    due: dict[str, float] = defaultdict(float)
    for span in spans:
        rivals = [queue for queue in members if span.waiting_jobs[queue.name]]
        if len(rivals) < 2:
            continue
        held = {queue.name: sum(span.held[queue.name, pool] for pool in queue.gpus) for queue in rivals}
        weights = sum(queue.weight for queue in rivals)
        for queue in rivals:
            got[queue.name] += span.seconds * held[queue.name]
            due[queue.name] += span.seconds * sum(held.values()) * queue.weight / weights
    return [got[name] / due[name] for name in due if due[name]]
