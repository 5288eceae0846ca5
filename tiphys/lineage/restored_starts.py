"""Finds the checkpoint that each attempt really started from.

Admission chooses a checkpoint by the sizes of its objects. The program reads the bytes, and may have to take an older
one, or none. Claims have the choice, events what came of it.
"""

import re
from collections.abc import Iterable

from tiphys.records import AttemptClaim, CheckpointRef, Event
from tiphys.store import Attempt

_EVENT_CHECKPOINT = re.compile(r"([0-9]{1,9})-([0-9]{1,15})")


def find_restored_starts(attempts: Iterable[Attempt], events: Iterable[Event]) -> dict[int, CheckpointRef | None]:
    """The checkpoint that each attempt of one step started from, by attempt; None for the beginning. Pure."""
    claims = [attempt.claim for attempt in attempts]
    restored: dict[tuple[str, int | None], list[str]] = {}
    skipped: set[tuple[str, int | None, str]] = set()
    for event in events:
        checkpoint = str(event.data.get("checkpoint", ""))
        if event.name == "checkpoint.skipped":
            skipped.add((event.step, event.attempt, checkpoint))
        elif event.name == "checkpoint.restored":
            restored.setdefault((event.step, event.attempt), []).append(checkpoint)
    return {
        claim.attempt: _find_start(
            claim,
            restored.get((claim.step, claim.attempt), ()),
            (claim.step, claim.attempt, str(claim.starts_from)) in skipped,
        )
        for claim in claims
    }


def _find_start(claim: AttemptClaim, restored: Iterable[str], is_skipped: bool) -> CheckpointRef | None:
    # Events name no lineage. What a fork restores first is its parent's.
    chosen = claim.starts_from
    lineage = chosen.lineage if chosen else claim.lineage
    for text in restored:
        ref = _parse_checkpoint(text, lineage)
        # A pod that Argo created again restores a checkpoint of its own attempt.
        if ref is not None and (lineage != claim.lineage or ref.attempt < claim.attempt):
            return ref
    return None if is_skipped else chosen


def _parse_checkpoint(text: str, lineage: str) -> CheckpointRef | None:
    """Parse the checkpoint of an event, written as ``attempt-step``."""
    match = _EVENT_CHECKPOINT.fullmatch(text)
    return CheckpointRef(lineage=lineage, attempt=int(match[1]), global_step=int(match[2])) if match else None
