"""What a run's listings show of its steps, in whatever order the rows arrive."""

import random

import pytest
from tiphys_controller.plan.listing import RunListing

from tiphys.store import ObjectInfo, RunLayout

LAYOUT = RunLayout("digits-1")
DIGEST = "ab" * 32
ROWS = [
    ObjectInfo(LAYOUT.attempt("fit", 1), 10),
    ObjectInfo(LAYOUT.attempt_end("fit", 1), 10),
    ObjectInfo(LAYOUT.attempt_crash("fit", 1), 10),
    ObjectInfo(LAYOUT.attempt("fit", 2), 10),
    ObjectInfo(LAYOUT.outputs("fit", 1) + "artifacts/model", 7),
    ObjectInfo(LAYOUT.done_marker("fit", 1, DIGEST), 0),
    ObjectInfo(LAYOUT.done_marker("fit", 1, DIGEST[::-1]), 0),
    ObjectInfo(LAYOUT.reused(3, "prep"), 10),
    ObjectInfo(LAYOUT.reused(2, "prep"), 10),
    ObjectInfo(LAYOUT.reused_attempt(2, "prep", 1), 0),
    ObjectInfo(LAYOUT.run_record, 10),
]


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_collected_by_step_in_any_order(seed: int) -> None:
    rows = random.Random(seed).sample(ROWS, len(ROWS))

    listing = RunListing().add(rows[:5]).add(rows[5:])

    assert listing.last_reuse == {"prep": 3}
    assert listing.reused_attempts == {(2, "prep", 1)}
    steps = listing.build_steps()
    assert set(steps) == {"fit", "prep"}
    assert (steps["fit"].attempts, steps["fit"].ended_attempts) == ({1, 2}, {1})
    assert {name: info.size for name, info in steps["fit"].outputs[1].items()} == {"artifacts/model": 7}
    assert steps["fit"].projections == {1: {DIGEST, DIGEST[::-1]}}
    assert steps["prep"].last_attempt == 0
