"""Finds the checkpoint that each attempt really started from.

Admission chooses a checkpoint by the sizes of its objects. The program reads the bytes, and may have to take an older
one, or none. Claims have the choice, events what came of it.
"""

import re
from collections.abc import Iterable, Mapping

from tiphys.records import AttemptClaim, CheckpointRef, Event
from tiphys.store import Attempt

_EVENT_CHECKPOINT = re.compile(r"([0-9]{1,9})-([0-9]{1,15})")


def find_restored_starts(attempts: Iterable[Attempt], events: Iterable[Event]) -> dict[int, CheckpointRef | None]:
    """The checkpoint that each attempt of one step started from, by attempt; None for the beginning. Pure.

    Args:
        attempts: Attempts of the step.
        events: Events of the run.
    """
    restored: dict[tuple[str, int | None], CheckpointRef] = {}
    skipped: set[tuple[str, int | None, str]] = set()
    claims = {attempt.claim.attempt: attempt.claim for attempt in attempts}
    for event in events:
        if event.name == "checkpoint.skipped":
            skipped.add((event.step, event.attempt, str(event.data.get("checkpoint", ""))))
        elif event.name == "checkpoint.restored":
            claim = claims.get(event.attempt or 0)
            if claim is not None and (ref := _parse_checkpoint(event, claim.lineage)) is not None:
                restored[event.step, event.attempt] = ref
    return {number: _find_start(claim, restored, skipped) for number, claim in claims.items()}


def _find_start(
    claim: AttemptClaim,
    restored: Mapping[tuple[str, int | None], CheckpointRef],
    skipped: Iterable[tuple[str, int | None, str]],
) -> CheckpointRef | None:
    chosen, found = claim.starts_from, restored.get((claim.step, claim.attempt))
    if found is not None:
        return chosen if str(chosen) == str(found) else found  # only the claim names another run's lineage
    return None if (claim.step, claim.attempt, str(chosen)) in skipped else chosen


def _parse_checkpoint(event: Event, lineage: str) -> CheckpointRef | None:
    """Parse the checkpoint of an event, written as ``attempt-step``."""
    match = _EVENT_CHECKPOINT.fullmatch(str(event.data.get("checkpoint", "")))
    return CheckpointRef(lineage=lineage, attempt=int(match[1]), global_step=int(match[2])) if match else None
