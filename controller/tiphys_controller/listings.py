"""Turns each listing of a run, row by row as it comes, into what it shows of the steps.

No listing is kept: there may be hundreds of thousands of rows, and while one
page is awaited, another is read.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tiphys.store import ObjectInfo
from tiphys.store.layout import parse_attempt, parse_done, parse_output
from tiphys_controller.evidence import StepListing

Projections = Mapping[str, Mapping[int, frozenset[str]]]
"""Listing digests of done projections, by step id and by attempt."""
Sizes = Mapping[str, Mapping[int, Mapping[str, int]]]
"""Sizes of outputs, by step id, by attempt, and by key relative to the outputs of the attempt."""


class Attempts(NamedTuple):
    """Numbers of attempts, by step id."""

    claimed: Mapping[str, set[int]]
    ended: Mapping[str, set[int]]


def attempts_of(rows: Iterable[ObjectInfo]) -> Attempts:
    """What ``attempts/`` shows."""
    claimed: dict[str, set[int]] = defaultdict(set)
    ended: dict[str, set[int]] = defaultdict(set)
    for info in rows:
        if place := parse_attempt(info.key):
            (ended if place[2] else claimed)[place[0]].add(place[1])
    return Attempts(claimed, ended)


def projections_of(rows: Iterable[ObjectInfo]) -> Projections:
    """What ``done/`` shows."""
    found: dict[str, dict[int, frozenset[str]]] = defaultdict(dict)
    for info in rows:
        if projection := parse_done(info.key):
            step, attempt, digest = projection
            found[step][attempt] = found[step].get(attempt, frozenset()) | {digest}
    return found


def sizes_of(rows: Iterable[ObjectInfo]) -> Sizes:
    """What ``outputs/`` shows."""
    found: dict[str, dict[int, dict[str, int]]] = defaultdict(lambda: defaultdict(dict))
    for info in rows:
        if output := parse_output(info.key):
            _, step, attempt, key = output
            found[step][attempt][key] = info.size
    return found


def by_step(attempts: Attempts, projections: Projections, sizes: Sizes) -> dict[str, StepListing]:
    """What is listed of each step that has an attempt, by step id."""
    return {
        step: StepListing(
            attempts=frozenset(numbers),
            ended=frozenset(attempts.ended.get(step, ())),
            projections=projections.get(step, {}),
            outputs=sizes.get(step, {}),
        )
        for step, numbers in attempts.claimed.items()
    }
