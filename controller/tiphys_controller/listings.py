"""Turns the rows of a run's listings into what they show of each step."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from tiphys.store import ObjectInfo
from tiphys.store.layout import parse_attempt, parse_done, parse_output
from tiphys_controller.evidence import StepListing

Sizes = Mapping[str, Mapping[int, Mapping[str, int]]]
"""Sizes of outputs, by step id, by attempt, and by key relative to the outputs of the attempt."""


def by_step(
    attempts: Iterable[ObjectInfo], done: Iterable[ObjectInfo], outputs: Iterable[ObjectInfo]
) -> dict[str, StepListing]:
    """What is listed of each step that has an attempt, by step id. Objects of others are passed over."""
    claimed: dict[str, set[int]] = defaultdict(set)
    ended: dict[str, set[int]] = defaultdict(set)
    projected: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for info in attempts:
        if place := parse_attempt(info.key):
            (ended if place[2] else claimed)[place[0]].add(place[1])
    for info in done:
        if projection := parse_done(info.key):
            projected[projection[0]][projection[1]].add(projection[2])
    sizes = output_sizes(outputs)
    return {
        step: StepListing(
            attempts=frozenset(numbers),
            ended=frozenset(ended[step]),
            projections={attempt: frozenset(found) for attempt, found in projected[step].items()},
            outputs=sizes.get(step, {}),
        )
        for step, numbers in claimed.items()
    }


def output_sizes(outputs: Iterable[ObjectInfo]) -> Sizes:
    """Sizes of what attempts have left."""
    found: dict[str, dict[int, dict[str, int]]] = defaultdict(lambda: defaultdict(dict))
    for info in outputs:
        if output := parse_output(info.key):
            _, step, attempt, key = output
            found[step][attempt][key] = info.size
    return found
