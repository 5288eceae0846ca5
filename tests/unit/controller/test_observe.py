"""How many requests a plan costs: a few listings, and one read for each record that they leave in doubt."""

import pytest
from support.compiled import History, gated, pipeline_of
from support.counting import CountingStore
from support.memory import MemoryStore
from tiphys_controller import plan_run

from tiphys.errors import IntegrityError
from tiphys.records import AdoptedRecord, RunRecord
from tiphys.store import RunLayout

RUN = "digits-1"
STEPS = 40
# The run's record; listings of submissions, attempts, projections, adoptions and outputs.
FIXED = 6


def history_of(store: MemoryStore, reads: bool = False) -> History:
    """A chain of steps. With ``reads``, each reads a value of the one before."""
    value = "{{{{tasks.s{}.outputs.parameters.n}}}}"
    tasks = [
        gated(
            f"s{i}",
            **({"depends": f"s{i - 1}"} if i else {}),
            **({"arguments": {"parameters": [{"name": "n", "value": value.format(i - 1)}]}} if i and reads else {}),
        )
        for i in range(STEPS)
    ]
    record = RunRecord(run=RUN, pipeline="digits", workflow=pipeline_of(*tasks), digest="d")
    store.create(RunLayout(RUN).record, record.to_bytes())
    return History(store, RUN)


def requests_of(store: MemoryStore) -> int:
    counting = CountingStore(store)
    report = plan_run(counting, RUN)
    assert report.requests == counting.requests.total()
    return report.requests


def test_finished_steps_cost_nothing_of_their_own() -> None:
    store = MemoryStore()
    history = history_of(store)
    for i in range(STEPS):
        history.done(f"s{i}", parameters={"n": "5"}, artifacts={f"a{j}": b"x" for j in range(5)})

    assert requests_of(store) == FIXED


@pytest.mark.parametrize("failed", [1, 7])
def test_each_step_that_failed_costs_one_read(failed: int) -> None:
    store = MemoryStore()
    history = history_of(store)
    for i in range(STEPS - failed):
        history.done(f"s{i}", parameters={"n": "5"})
    for i in range(STEPS - failed, STEPS):
        history.failed(f"s{i}")

    assert requests_of(store) == FIXED + failed


def test_steps_that_never_started_cost_nothing() -> None:
    store = MemoryStore()
    history_of(store)

    assert requests_of(store) == FIXED


def test_a_value_that_crosses_the_border_costs_one_read() -> None:
    store = MemoryStore()
    history = history_of(store, reads=True)
    for i in range(STEPS - 3):
        history.done(f"s{i}", parameters={"n": "5"})

    assert requests_of(store) == FIXED + 1


def test_a_lost_projection_costs_one_read() -> None:
    store = MemoryStore()
    history = history_of(store)
    for i in range(STEPS):
        history.done(f"s{i}", projection=i != 3)

    assert requests_of(store) == FIXED + 1


def test_a_foreign_object_among_the_records_is_passed_over() -> None:
    store = MemoryStore()
    history = history_of(store)
    for i in range(STEPS):
        history.done(f"s{i}")
    for prefix in (history.layout.attempts, history.layout.done, history.layout.all_outputs):
        store.create(f"{prefix}README.txt", b"left by a person")

    assert plan_run(store, RUN).running == ()


def test_a_submission_whose_claim_was_removed_is_named() -> None:
    store = MemoryStore()
    history_of(store)
    store.create(RunLayout(RUN).submission_bound(1), b"{}")

    with pytest.raises(IntegrityError, match="submission 1 has records but no claim"):
        plan_run(store, RUN)


def took_over(store: MemoryStore, step: str, source: str = RUN) -> None:
    record = AdoptedRecord(
        run=RUN, submission=2, step=step, step_key="k", source_run=source, source_step=step, source_attempt=1
    )
    store.create(RunLayout(RUN).adopted(2, step), record.to_bytes())


def test_a_step_that_was_taken_over_costs_one_read() -> None:
    store = MemoryStore()
    history = history_of(store)
    for i in range(STEPS):
        history.done(f"s{i}", parameters={"n": "5"})
        took_over(store, f"s{i}")

    assert requests_of(store) == FIXED + STEPS


def test_a_result_of_another_run_costs_a_listing_and_its_end_record_as_well() -> None:
    store = MemoryStore()
    history = history_of(store)
    for i in range(1, STEPS):
        history.done(f"s{i}", parameters={"n": "5"})
    History(store, "digits-0").done("s0")
    took_over(store, "s0", source="digits-0")

    assert requests_of(store) == FIXED + 3


def test_telling_that_an_attempt_came_later_costs_one_read_more() -> None:
    store = MemoryStore()
    history = history_of(store)
    for i in range(1, STEPS):
        history.done(f"s{i}", parameters={"n": "5"})
    took_over(store, "s0", source="digits-0")
    history.done("s0", submission=3)

    assert requests_of(store) == FIXED + 2
