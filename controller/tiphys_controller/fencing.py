"""Takes unfinished attempts away from whoever may still hold them.

An end record is create-only, so a fence and a late finish cannot both count:
whoever writes the end first decides.
"""

from collections.abc import Sequence

from tiphys.records import AttemptClaim, AttemptEnd, Outcome
from tiphys.store import RunLayout, Store, claim, read_record
from tiphys_controller.evidence import EndKey


def fence(store: Store, run: str, attempts: Sequence[EndKey]) -> list[AttemptEnd]:
    """End each attempt as fenced, unless somebody has ended it first; answers what each end says now."""
    return [_fence(store, RunLayout(run), *attempt) for attempt in attempts]


def _fence(store: Store, layout: RunLayout, step: str, attempt: int) -> AttemptEnd:
    claimed = read_record(store, layout.attempt(step, attempt), AttemptClaim)
    wanted = AttemptEnd(
        run=layout.run,
        step=step,
        attempt=attempt,
        submission=claimed.submission,
        outcome=Outcome.FENCED,
        message="fenced by a resume of the run",
        step_key=claimed.step_key,
    )
    return claim(store, layout.attempt_end(step, attempt), wanted).record
