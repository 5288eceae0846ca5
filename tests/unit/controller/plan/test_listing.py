"""What a run's listings show of its steps, in whatever order the rows arrive."""

import random

import pytest
from tiphys_controller.plan.listing import RunListing

from tiphys.store import ObjectInfo, RunLayout
from tiphys.store.runs import AttemptNumbers
from tiphys.store.workflow_layout import OutputOrigin, pod_outputs

LAYOUT = RunLayout("digits-1")
DIGEST = "ab" * 32
ROWS = [
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
    steps = listing.build_steps({"fit": AttemptNumbers({1, 2}, {1})}, with_outputs=True)
    assert set(steps) == {"fit", "prep"}
    assert (steps["fit"].attempts, steps["fit"].ended_attempts) == ({1, 2}, {1})
    assert steps["fit"].outputs is not None
    assert {name: info.size for name, info in steps["fit"].outputs[1].items()} == {"artifacts/model": 7}
    assert steps["fit"].projections == {1: {DIGEST, DIGEST[::-1]}}
    assert steps["prep"].last_attempt == 0


def test_the_outputs_of_a_pod_are_those_of_the_attempt_that_it_was() -> None:
    origins = {
        "pod-a": OutputOrigin("pod-a", "digits-1", "prep", 2),
        "pod-b": OutputOrigin("pod-b", "digits-1", "sweep.0123456789ab.0", 1),
    }
    keys = [
        f"{pod_outputs('uid-1', 'pod-a')}model/weights",
        f"{pod_outputs('uid-1', 'pod-b')}loss",
        f"{pod_outputs('uid-1', 'pod-of-a-try-that-failed')}model/weights",
        "data/workflows/uid-1/no-output-of-a-pod",
    ]
    listing = RunListing().add(ROWS)

    listing.add_pod_outputs([ObjectInfo(key, 7) for key in keys], origins)

    outputs = listing.outputs
    assert {name: info.key for name, info in outputs["prep"][2].items()} == {"model/weights": keys[0]}
    assert {name: info.key for name, info in outputs["sweep.0123456789ab.0"][1].items()} == {"loss": keys[1]}
    assert set(outputs) == {"fit", "prep", "sweep.0123456789ab.0"}
